"""The sample buffer of an asynchronous trainer: states of groups, and the bound on staleness.

           begin            finish          mark_rewarded        select        mark_trained
    issued -----> generating -----> generated ----------> rewarded ----> training -----> trained
      ^               |                |                     |              |
      +---------------+----------------+---------------------+--------------+   lost, abandon
                      |                |                     |
    dropped <---------+----------------+---------------------+   drop, from issued as well

The unit is a group: the samples of one prompt. A trained group is kept until its partition (the
step that trained it) is cleared; a dropped one is not kept. So the buffer has no more groups than
`StalenessController` lets begin, and those of one step, however long a run is.

Groups are in streaming order everywhere: oldest tokens first, then by id. A buffer is for one
thread, or for several that share a lock.

No token older than `staleness` = s versions is ever trained:
1. Tokens of a group are no older than the version it was begun with; `SampleQueue` checks this.
2. `StalenessController.mark_pushed(v)` fails while a group, begun or finished, has a version before
   v - s; `evict(v)` issues those again.
3. Step v + 1, which updates version v, selects and trains while the servers have v: ages are at
   most s.

That alone would waste work, so `num_to_begin` also sets a pace: while the servers have version v,
as many groups may have been begun as the batches up to step v + s + 1 need, plus the extra ones. A
step waits for a group that no later step could train in time. So no more groups than the extra ones
are issued again.

Replayed samples take the place of new groups. `expect` sets how many new groups the next step
needs; later steps are counted with new_per_step, the minimum.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

import numpy as np

from mcore_rl.config.rules import count_extra_groups

T = TypeVar("T")  # a column of a group: samples, rewards, log-probs; opaque here


class BufferStateError(RuntimeError):
    """A call that the state of a group, or of the run, does not allow."""


class GroupState(StrEnum):
    """States of a group; see the diagram above."""

    ISSUED = "issued"  # to be begun, for the first time or again
    GENERATING = "generating"
    GENERATED = "generated"  # all of its samples have arrived
    REWARDED = "rewarded"  # may be trained on
    TRAINING = "training"  # selected for its partition
    TRAINED = "trained"
    DROPPED = "dropped"  # by a filter


_REISSUED_OR_DROPPED = frozenset({GroupState.ISSUED, GroupState.DROPPED})
ALLOWED: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.ISSUED: frozenset({GroupState.GENERATING, GroupState.DROPPED}),
    GroupState.GENERATING: _REISSUED_OR_DROPPED | {GroupState.GENERATED},
    GroupState.GENERATED: _REISSUED_OR_DROPPED | {GroupState.REWARDED},
    GroupState.REWARDED: _REISSUED_OR_DROPPED | {GroupState.TRAINING},
    GroupState.TRAINING: frozenset({GroupState.ISSUED, GroupState.TRAINED}),
    GroupState.TRAINED: frozenset(),
    GroupState.DROPPED: frozenset(),
}
# Samples are in the buffer, and not trained yet.
HELD = (GroupState.GENERATED, GroupState.REWARDED, GroupState.TRAINING)
WAITING = (GroupState.GENERATING, GroupState.GENERATED, GroupState.REWARDED)  # not selected
ACTIVE = (GroupState.GENERATING, *HELD)  # begun, and not trained or dropped
COUNTED = ("issued", "begun", "trained", "dropped", "lost", "abandoned")  # counters of a run


@dataclass(slots=True, eq=False)
class SampleGroup(Generic[T]):
    """A group in the buffer. Read only: `SampleQueue` changes it."""

    group_id: int
    row: int  # of the data set; with the id, enough to begin it again
    num_samples: int  # the expected number, until they have arrived
    state: GroupState = GroupState.ISSUED
    begun_version: int = -1  # of the weights when it was begun
    oldest_version: int = -1  # of its tokens; begun_version until they have arrived
    partition: int = 0  # the step that trains it
    columns: dict[str, T] = field(default_factory=dict)

    def age(self, version: int) -> int:
        """Return the age of its oldest token, in versions, in an update of `version`."""
        return version - self.oldest_version


class _GroupsByState(Generic[T]):
    """Index of groups by state: the work per group does not grow with their number.

    A group is removed before its state, oldest version or number of samples changes.
    """

    def __init__(self) -> None:
        self.groups: dict[GroupState, dict[int, SampleGroup[T]]] = {s: {} for s in GroupState}
        self.num_samples: Counter[GroupState] = Counter()
        self.versions: dict[GroupState, Counter[int]] = {s: Counter() for s in GroupState}

    def add(self, group: SampleGroup[T]) -> None:
        self.groups[group.state][group.group_id] = group
        self.num_samples[group.state] += group.num_samples
        self.versions[group.state][group.oldest_version] += 1

    def remove(self, group: SampleGroup[T]) -> None:
        del self.groups[group.state][group.group_id]
        self.num_samples[group.state] -= group.num_samples
        versions = self.versions[group.state]
        versions[group.oldest_version] -= 1
        if not versions[group.oldest_version]:
            del versions[group.oldest_version]


class SampleQueue(Generic[T]):
    """The groups of a run, saved in its checkpoints. Every method may raise BufferStateError.

    Args:
        group_size: Number of samples that a group is expected to have.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._groups: dict[int, SampleGroup[T]] = {}
        self._by_state = _GroupsByState[T]()
        self._next_id = 0  # ids below have been issued
        self.last_trained = 0  # the last partition that was trained
        self.groups_total: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.samples_total: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    def __len__(self) -> int:
        return len(self._groups)

    def groups(self, *states: GroupState) -> list[SampleGroup[T]]:
        """Return the groups in one of these states, in streaming order."""
        groups = [group for state in states for group in self._by_state.groups[state].values()]
        return sorted(groups, key=lambda group: (group.oldest_version, group.group_id))

    def num_groups(self, *states: GroupState) -> int:
        """Return the number of groups in one of these states."""
        return sum(len(self._by_state.groups[state]) for state in states)

    def num_samples(self, *states: GroupState) -> int:
        """Return the number of samples of the groups in one of these states."""
        return sum(self._by_state.num_samples[state] for state in states)

    def num_by_version(self, *states: GroupState) -> Counter[int]:
        """Return the number of groups in one of these states by oldest version."""
        return sum((self._by_state.versions[state] for state in states), Counter[int]())

    def get_row(self, group_id: int) -> int:
        """Return the data set's row of a group."""
        return self._get(group_id).row

    def issue(self, group_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Add new groups, with ids higher than any before."""
        for group_id, row in zip(map(int, group_ids), map(int, rows), strict=True):
            if group_id < self._next_id:
                raise BufferStateError(
                    f"group {group_id} cannot be issued: it has been before; allowed: ids from "
                    f"{self._next_id}"
                )
            group = SampleGroup[T](group_id, row, self._group_size)
            self._groups[group_id] = group
            self._by_state.add(group)
            self._next_id = group_id + 1
            self._count("issued", group)

    def begin(self, group_ids: Sequence[int], version: int) -> None:
        """Record that servers with weights of `version` begin these groups."""
        with self._move(group_ids, GroupState.GENERATING) as groups:
            for group in groups:
                self._count("begun", group)
                group.begun_version = group.oldest_version = int(version)

    def finish(
        self, group_id: int, oldest_version: int, num_samples: int, columns: Mapping[str, T]
    ) -> None:
        """Add all samples of a group.

        Args:
            oldest_version: Oldest version of tokens that the policy chose; -1 if there are none.

        Raises:
            BufferStateError: a token is older than the weights that the group was begun with.
        """
        begun = self._get(group_id).begun_version
        if oldest_version != -1 and oldest_version < begun:
            raise BufferStateError(
                f"group {group_id} has tokens of version {oldest_version}; allowed: from {begun}, "
                "the version that it was begun with"
            )
        with self._move([group_id], GroupState.GENERATED) as (group,):
            if oldest_version != -1:
                group.oldest_version = int(oldest_version)
            group.num_samples, group.columns = int(num_samples), dict(columns)

    def mark_rewarded(self, group_ids: Sequence[int]) -> None:
        """Record that these groups have their rewards."""
        with self._move(group_ids, GroupState.REWARDED):
            pass

    def select(self, group_ids: Sequence[int], partition: int) -> None:
        """Select these groups for step `partition`, the one after the last that was trained."""
        self._check_partition(partition)
        with self._move(group_ids, GroupState.TRAINING) as groups:
            for group in groups:
                group.partition = partition

    def mark_trained(self, partition: int) -> None:
        """Record that all groups selected for the step have been trained."""
        self._check_partition(partition)
        selected = [group.group_id for group in self.groups(GroupState.TRAINING)]
        with self._move(selected, GroupState.TRAINED) as groups:
            for group in groups:
                self._count("trained", group)
        self.last_trained = partition

    def drop(self, group_ids: Sequence[int]) -> None:
        """Remove groups that a filter rejected."""
        with self._move(group_ids, GroupState.DROPPED) as groups:
            for group in groups:
                self._count("dropped", group)
                self._delete(group)

    def reissue_lost(self, group_ids: Sequence[int]) -> None:
        """Issue groups again whose server, or the node with their samples, has died."""
        self._reissue(group_ids, "lost")

    def abandon(self, group_ids: Sequence[int]) -> None:
        """Issue groups again that would be too old when a step could train them."""
        self._reissue(group_ids, "abandoned")

    def clear(self, partition: int) -> None:
        """Delete the groups trained in this step and those before it."""
        if partition > self.last_trained:
            raise BufferStateError(
                f"partition {partition} cannot be cleared: it is not trained; allowed: up to "
                f"{self.last_trained}"
            )
        for group in self.groups(GroupState.TRAINED):
            if group.partition <= partition:
                self._by_state.remove(group)
                self._delete(group)

    def metrics(self) -> dict[str, float]:
        """Return groups by state, samples that wait for training, and the counters of the run."""
        metrics = {f"queue/{state}": float(self.num_groups(state)) for state in ACTIVE}
        metrics["queue/waiting_samples"] = float(self.num_samples(*HELD))
        return metrics | {f"queue/{n}_total": float(self.groups_total[n]) for n in COUNTED}

    def state_dict(self) -> dict[str, Any]:
        """Return counters, and ids and rows of groups that have not ended, without samples."""
        pending = sorted(self.groups(GroupState.ISSUED, *ACTIVE), key=lambda group: group.group_id)
        return {
            "next_id": self._next_id,
            "last_trained": self.last_trained,
            "groups_total": dict(self.groups_total),
            "samples_total": dict(self.samples_total),
            "group_ids": np.array([group.group_id for group in pending], np.int64),
            "rows": np.array([group.row for group in pending], np.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore counters, and issue again the groups that had not ended."""
        self._next_id, self.last_trained = state["next_id"], state["last_trained"]
        self.groups_total = Counter(state["groups_total"])
        self.samples_total = Counter(state["samples_total"])
        pending = zip(state["group_ids"].tolist(), state["rows"].tolist(), strict=True)
        self._groups = {
            number: SampleGroup(number, row, self._group_size) for number, row in pending
        }
        self._by_state = _GroupsByState[T]()
        for group in self._groups.values():
            self._by_state.add(group)

    def _reissue(self, group_ids: Sequence[int], reason: str) -> None:
        with self._move(group_ids, GroupState.ISSUED) as groups:
            for group in groups:
                self._count(reason, group)
                group.begun_version = group.oldest_version = -1
                group.num_samples, group.partition = self._group_size, 0
                group.columns = {}

    def _delete(self, group: SampleGroup[T]) -> None:
        del self._groups[group.group_id]
        group.columns = {}  # the caller may still have the group

    @contextlib.contextmanager
    def _move(self, group_ids: Iterable[int], to: GroupState) -> Iterator[list[SampleGroup[T]]]:
        """Move all these groups to a new state, or none if one cannot.

        In the with block the fields may change by which groups are indexed.
        """
        groups = [self._get(group_id) for group_id in dict.fromkeys(group_ids)]
        for group in groups:
            if to not in ALLOWED[group.state]:
                allowed = ", ".join(sorted(ALLOWED[group.state])) or "nothing, it has ended"
                raise BufferStateError(
                    f"group {group.group_id} is {group.state} and cannot become {to}; "
                    f"allowed: {allowed}"
                )
        for group in groups:
            self._by_state.remove(group)
            group.state = to
        yield groups
        for group in groups:
            if group.group_id in self._groups:
                self._by_state.add(group)

    def _get(self, group_id: int) -> SampleGroup[T]:
        try:
            return self._groups[group_id]
        except KeyError:
            raise BufferStateError(
                f"group {group_id} is not in the buffer: never issued, dropped, or cleared; "
                f"allowed: one of the {len(self._groups)} in it"
            ) from None

    def _check_partition(self, partition: int) -> None:
        if partition != self.last_trained + 1:
            raise BufferStateError(
                f"partition {partition} cannot be trained after {self.last_trained}; allowed: "
                f"{self.last_trained + 1}"
            )

    def _count(self, name: str, group: SampleGroup[T]) -> None:
        self.groups_total[name] += 1
        self.samples_total[name] += group.num_samples


@dataclass(frozen=True, slots=True)
class StalenessSettings:
    """Settings of `StalenessController`.

    Raises:
        ValueError: a setting is not allowed.
    """

    groups_per_step: int  # maximum
    group_size: int  # samples
    num_steps: int  # of the run; nothing is begun for later steps
    staleness: int  # maximum age of a token in an update, in versions
    depth: int | None = None  # maximum of groups being generated; None: bounded by staleness
    # Extra groups begun beyond those that the batches need, as a share of groups_per_step. Those
    # that end too late for a batch wait for the next one, unless they become too old.
    oversampling: float = 0.0
    # No group is begun while so many samples are held or generated, unless the next batch lacks it.
    # None: bounded by staleness.
    max_samples: int | None = None
    # New groups that a step needs at least, when it replays the most. None: groups_per_step.
    new_per_step: int | None = None

    def __post_init__(self) -> None:
        lowest = {"groups_per_step": 1, "group_size": 1, "num_steps": 0, "staleness": 0}
        lowest |= {"depth": 1, "oversampling": 0}
        lowest["max_samples"] = self.groups_per_step * self.group_size
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ValueError(f"{name}={value}; allowed: {low} or more")
        if not 1 <= self.num_new <= self.groups_per_step:
            raise ValueError(
                f"new_per_step={self.new_per_step}; allowed: 1 to {self.groups_per_step}"
            )
        if self.oversampling and not self.staleness:
            raise ValueError(
                f"oversampling={self.oversampling} with staleness=0, where what is left over is "
                "too old; allowed: 0, or staleness of 1 or more"
            )

    @property
    def num_extra(self) -> int:
        """Groups begun beyond those that the batches need."""
        return count_extra_groups(self.oversampling, self.groups_per_step)

    @property
    def num_new(self) -> int:
        """New groups counted for a step for which `expect` was not called."""
        return self.groups_per_step if self.new_per_step is None else self.new_per_step


class StalenessController(Generic[T]):
    """Decides which groups of a queue are begun, trained and abandoned. Saved in checkpoints.

    A step of a trainer:

        expect(step, ...)                    # new groups that it needs, if it replays others
        queue.issue(...)                     # num_to_draw new groups, whenever it is not 0
        begin()                              # groups for the servers
        queue.finish(...), mark_rewarded, drop
        select(step)                         # the batch; None until enough groups are ready
        queue.mark_trained(step)
        evict(step)                          # groups that the servers have to end
        mark_pushed(step)                    # the servers have the version of this step
        queue.clear(step)

    Every method may raise BufferStateError.
    """

    def __init__(self, queue: SampleQueue[T], settings: StalenessSettings) -> None:
        self._queue, self._settings = queue, settings
        self.version = 0  # of the servers' weights
        self._expected = (0, 0)  # a step, and the number of groups it needs
        self._evicted: set[int] = set()  # groups that begin again after the push

    def expect(self, step: int, num_groups: int) -> None:
        """Set the number of new groups that the next step needs; it replays others."""
        limit = self._settings.groups_per_step
        if not 0 <= num_groups <= limit:
            raise BufferStateError(
                f"step {step} cannot need {num_groups} groups; allowed: 0 to {limit}"
            )
        self._expected = step, num_groups

    def _count_needed(self) -> int:
        """Return the number of groups that the step after the last trained one needs."""
        step, num_groups = self._expected
        return num_groups if step == self._queue.last_trained + 1 else self._settings.num_new

    def num_to_begin(self) -> int:
        """Return how many groups may be begun."""
        queue, settings = self._queue, self._settings
        last = min(self.version + settings.staleness + 1, settings.num_steps)
        num_batches = last - queue.last_trained  # untrained batches whose groups may be begun
        if num_batches <= 0:
            return 0
        needed = self._count_needed() + (num_batches - 1) * settings.num_new + settings.num_extra
        num = needed - queue.num_groups(*ACTIVE) - len(self._evicted)
        num_running = queue.num_groups(GroupState.GENERATING)
        num = min(num, self._limit_by_samples(num, num_running))
        if settings.depth is not None:
            num = min(num, settings.depth - num_running)
        return max(num, 0)

    def _limit_by_samples(self, num: int, num_running: int) -> int:
        """Limit a number of groups by max_samples, but not below what the next batch lacks."""
        queue, settings = self._queue, self._settings
        if settings.max_samples is not None:
            num = (
                settings.max_samples - queue.num_samples(*HELD)
            ) // settings.group_size - num_running
        num_waiting = queue.num_groups(GroupState.GENERATED, GroupState.REWARDED)
        num_lacking = max(self._count_needed() - queue.num_groups(GroupState.TRAINING), 0)
        return max(num, (num_lacking or settings.num_new) - num_running - num_waiting)

    def num_to_draw(self) -> int:
        """Return how many new groups the queue lacks for `begin`."""
        num = self.num_to_begin()
        return max(num - len(self._list_issued()), 0) if num else 0

    def _list_issued(self) -> list[SampleGroup[T]]:
        groups = self._queue.groups(GroupState.ISSUED)
        return [group for group in groups if group.group_id not in self._evicted]

    def begin(self) -> list[SampleGroup[T]]:
        """Begin as many issued groups as allowed, and return them by id."""
        num = self.num_to_begin()
        groups = self._list_issued()[:num] if num else []
        self._queue.begin([group.group_id for group in groups], self.version)
        return groups

    def select(self, step: int, num_groups: int | None = None) -> list[SampleGroup[T]] | None:
        """Select the groups of a step; return them in streaming order, or None if it has to wait.

        It waits until enough groups are ready, of such versions that later steps can train the
        others in time. Called again after groups were lost, it selects what the step lacks.

        Args:
            num_groups: Number of groups that the step needs. None: as set by `expect`.
        """
        last = self._queue.last_trained
        if step != self.version + 1 or step != last + 1:
            raise BufferStateError(
                f"step {step} cannot select: the servers have version {self.version}, and step "
                f"{last} is trained; allowed: step {last + 1}, with version {last}"
            )
        limit = self._settings.groups_per_step
        needed = self._count_needed() if num_groups is None else num_groups
        if not 0 <= needed <= limit:
            raise BufferStateError(
                f"step {step} cannot select {needed} groups; allowed: 0 to {limit}"
            )
        num = max(needed - self._queue.num_groups(GroupState.TRAINING), 0)
        if self._queue.num_groups(GroupState.REWARDED) < num or self._should_wait(num):
            return None
        selected = self._queue.groups(GroupState.REWARDED)[:num]
        self._queue.select([group.group_id for group in selected], step)
        return self._queue.groups(GroupState.TRAINING)

    def _should_wait(self, num_selected: int) -> bool:
        """Return whether later steps could not train all other groups before they are too old.

        Schedules by earliest deadline: the step selects the oldest rewarded groups, and n later
        steps train no more than n times new_per_step. The extra groups may be late. False if
        waiting cannot help: no selected group could be replaced by an older one. Counts by version,
        so the work does not grow with the number of groups.
        """
        settings = self._settings
        selected: Counter[int] = Counter()
        for version, num in sorted(self._queue.num_by_version(GroupState.REWARDED).items()):
            selected[version] = min(num, num_selected - selected.total())
        left = self._queue.num_by_version(*WAITING)
        left.subtract(selected)
        for num_steps in range(settings.staleness + 1):
            newest = self.version - settings.staleness + num_steps  # has num_steps more steps
            capacity = num_steps * settings.num_new + settings.num_extra
            is_late = sum(num for version, num in left.items() if version <= newest) > capacity
            if is_late and any(num and version > newest for version, num in selected.items()):
                return True
        return False

    def evict(self, next_version: int) -> list[int]:
        """Issue groups again that a push of `next_version` would make too old.

        Returns:
            Ids of groups that are being generated: the servers have to end them.
        """
        old = self._list_too_old(next_version)
        running = [group.group_id for group in old if group.state is GroupState.GENERATING]
        self._evicted = {group.group_id for group in old}
        self._queue.abandon(list(self._evicted))
        return running

    def mark_pushed(self, version: int) -> None:
        """Record that the servers have `version`, the next one, of step `version`."""
        if version != self.version + 1 or version != self._queue.last_trained:
            raise BufferStateError(
                f"version {version} cannot be pushed after {self.version}, with step "
                f"{self._queue.last_trained} trained; allowed: {self.version + 1}, of a step that "
                "is trained"
            )
        if old := self._list_too_old(version):
            raise BufferStateError(
                f"version {version} cannot be pushed: group {old[0].group_id} ({old[0].state}) has "
                f"version {old[0].oldest_version}; allowed: from "
                f"{version - self._settings.staleness}, after evict({version})"
            )
        self.version = version
        self._evicted.clear()

    def _list_too_old(self, version: int) -> list[SampleGroup[T]]:
        """Return groups, not selected, that no step could train once `version` is pushed."""
        waiting = self._queue.groups(*WAITING)
        return [group for group in waiting if group.age(version) > self._settings.staleness]

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
