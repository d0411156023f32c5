"""The ledger of an asynchronous trainer: each group of samples that was issued and has not ended.

           begin            finish          mark_rewarded        select        mark_trained
    issued -----> generating -----> generated ----------> rewarded ----> training -----> trained
      ^               |                |                     |              |
      +---------------+----------------+---------------------+--------------+   lost, abandoned
                      |                |                     |
    dropped <---------+----------------+---------------------+   drop, from issued as well

The unit is a group: the samples of one prompt. A trained group is kept until its partition, the
step that it was trained in, is cleared; a dropped one is not kept. So the ledger has no more groups
than rollout/staleness.py lets be begun, and those of one step, however long a run is.

Groups are in streaming order everywhere: oldest tokens first, then by id. A ledger is for one
thread, or for several that share a lock.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")  # a column of a group: samples, rewards, log-probs; the ledger never looks inside


class LedgerError(RuntimeError):
    """A call that does not fit what the ledger has: which group, its state, what is allowed."""


class GroupState(StrEnum):
    ISSUED = "issued"  # to be begun, for the first time or again
    GENERATING = "generating"
    GENERATED = "generated"  # all of its samples have come
    REWARDED = "rewarded"  # may be trained on
    TRAINING = "training"  # selected for the step that is its partition
    TRAINED = "trained"
    DROPPED = "dropped"  # by a filter


_BACK_OR_DROPPED = frozenset({GroupState.ISSUED, GroupState.DROPPED})
ALLOWED: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.ISSUED: frozenset({GroupState.GENERATING, GroupState.DROPPED}),
    GroupState.GENERATING: _BACK_OR_DROPPED | {GroupState.GENERATED},
    GroupState.GENERATED: _BACK_OR_DROPPED | {GroupState.REWARDED},
    GroupState.REWARDED: _BACK_OR_DROPPED | {GroupState.TRAINING},
    GroupState.TRAINING: frozenset({GroupState.ISSUED, GroupState.TRAINED}),
    GroupState.TRAINED: frozenset(),
    GroupState.DROPPED: frozenset(),
}
# Their samples are here, and not trained yet.
HELD = (GroupState.GENERATED, GroupState.REWARDED, GroupState.TRAINING)
WAITING = (GroupState.GENERATING, GroupState.GENERATED, GroupState.REWARDED)  # not selected
ACTIVE = (GroupState.GENERATING, *HELD)  # admitted, and not ended
COUNTED = ("issued", "begun", "trained", "dropped", "lost", "abandoned")


@dataclass(slots=True, eq=False)
class SampleGroup(Generic[T]):
    """A group in the ledger. Read only: the ledger changes it."""

    group_id: int
    row: int  # of the data set: with the id, all that it takes to begin it again
    num_samples: int  # the expected number, until they have come
    state: GroupState = GroupState.ISSUED
    attempt: int = 0  # of the run: no two beginnings share one
    begun_version: int = -1  # of the policy when it was begun
    oldest_version: int = -1  # of its tokens; begun_version until they have come
    partition: int = 0  # the step that it is trained in
    columns: dict[str, T] = field(default_factory=dict)
    taken_by: set[str] = field(default_factory=set)

    def age(self, version: int) -> int:
        """Of its oldest token, in versions, when the policy of `version` is trained on it."""
        return version - self.oldest_version


@dataclass(frozen=True, slots=True)
class Taken(Generic[T]):
    """A group as a consumer got it."""

    group_id: int
    attempt: int
    columns: Mapping[str, T]  # those asked for


class _ByState(Generic[T]):
    """Index of groups by state, so that nobody has to look at all of them for each that comes.

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
    """The groups of a run; a state of a checkpoint. Every method may raise LedgerError."""

    def __init__(self, group_size: int) -> None:
        """`group_size` is the number of samples that a group is expected to have."""
        self._group_size = group_size
        self._groups: dict[int, SampleGroup[T]] = {}
        self._by_state = _ByState[T]()
        self._next_id = 0  # ids below have been issued
        self.last_trained = 0  # the newest partition that is trained
        self.groups_total: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.samples_total: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    def __len__(self) -> int:
        return len(self._groups)

    def groups(self, *states: GroupState) -> list[SampleGroup[T]]:
        """Those in one of these states, in streaming order."""
        found = [group for state in states for group in self._by_state.groups[state].values()]
        return sorted(found, key=lambda group: (group.oldest_version, group.group_id))

    def num_groups(self, *states: GroupState) -> int:
        return sum(len(self._by_state.groups[state]) for state in states)

    def num_samples(self, *states: GroupState) -> int:
        return sum(self._by_state.num_samples[state] for state in states)

    def num_by_version(self, *states: GroupState) -> Counter[int]:
        """How many groups there are of each oldest version."""
        return sum((self._by_state.versions[state] for state in states), Counter[int]())

    def row_of(self, group_id: int) -> int:
        """The row of the data set that a group is of."""
        return self._get(group_id).row

    def issue(self, group_ids: Sequence[int], rows: Sequence[int]) -> None:
        """New groups. Their ids are higher than any before, so that none is issued twice."""
        for group_id, row in zip(map(int, group_ids), map(int, rows), strict=True):
            if group_id < self._next_id:
                raise LedgerError(
                    f"group {group_id} cannot be issued: it has been before; allowed: ids from "
                    f"{self._next_id}"
                )
            group = SampleGroup[T](group_id, row, self._group_size)
            self._groups[group_id] = group
            self._by_state.add(group)
            self._next_id = group_id + 1
            self._count("issued", group)

    def begin(self, group_ids: Sequence[int], version: int) -> None:
        """Servers with weights of `version` are about to generate these."""
        with self._moved(group_ids, GroupState.GENERATING) as groups:
            for group in groups:
                self._count("begun", group)
                group.attempt = self.groups_total["begun"]
                group.begun_version = group.oldest_version = int(version)

    def finish(
        self, group_id: int, oldest_version: int, num_samples: int, columns: Mapping[str, T]
    ) -> None:
        """All samples of a group have come. `oldest_version` is -1 if no token was chosen.

        Raises:
            LedgerError: a token is older than the weights that the group was begun with.
        """
        begun = self._get(group_id).begun_version
        if oldest_version != -1 and oldest_version < begun:
            raise LedgerError(
                f"group {group_id} has tokens of version {oldest_version}; allowed: from {begun}, "
                "the version that it was begun with"
            )
        with self._moved([group_id], GroupState.GENERATED) as (group,):
            if oldest_version != -1:
                group.oldest_version = int(oldest_version)
            group.num_samples, group.columns = int(num_samples), dict(columns)

    def mark_rewarded(self, group_ids: Sequence[int]) -> None:
        with self._moved(group_ids, GroupState.REWARDED):
            pass

    def take(self, consumer: str, *needs: str, limit: int | None = None) -> list[Taken[T]]:
        """Groups that have all columns in `needs`, up to `limit`, in streaming order.

        A consumer gets a group once, and once more if it was lost meanwhile.
        """
        ready = [
            group
            for group in self.groups(*HELD)
            if consumer not in group.taken_by and group.columns.keys() >= set(needs)
        ][:limit]
        for group in ready:
            group.taken_by.add(consumer)
        return [Taken(g.group_id, g.attempt, {n: g.columns[n] for n in needs}) for g in ready]

    def put(self, taken: Taken[T], columns: Mapping[str, T]) -> bool:
        """What a consumer has made of a group; False if the group was lost or has ended since.

        Raises:
            LedgerError: the group has one of these columns.
        """
        group = self._groups.get(taken.group_id)
        if group is None or group.attempt != taken.attempt or group.state not in HELD:
            return False
        if twice := sorted(group.columns.keys() & columns.keys()):
            raise LedgerError(
                f"group {group.group_id} ({group.state}) has columns {', '.join(twice)} already; "
                "allowed: others"
            )
        group.columns |= columns
        return True

    def select(self, group_ids: Sequence[int], partition: int) -> None:
        """These are trained in step `partition`, the one after the last that is trained."""
        self._check_partition(partition)
        with self._moved(group_ids, GroupState.TRAINING) as groups:
            for group in groups:
                group.partition = partition

    def mark_trained(self, partition: int) -> None:
        """The step has been trained on all groups that were selected for it."""
        self._check_partition(partition)
        chosen = [group.group_id for group in self.groups(GroupState.TRAINING)]
        with self._moved(chosen, GroupState.TRAINED) as groups:
            for group in groups:
                self._count("trained", group)
        self.last_trained = partition

    def drop(self, group_ids: Sequence[int]) -> None:
        """These are not trained: the ledger lets go of them."""
        with self._moved(group_ids, GroupState.DROPPED) as groups:
            for group in groups:
                self._count("dropped", group)
                self._let_go(group)

    def lost(self, group_ids: Sequence[int]) -> None:
        """What held their samples, or generated them, is dead: they are to be begun again."""
        self._back_to_issued(group_ids, "lost")

    def abandoned(self, group_ids: Sequence[int]) -> None:
        """They would be too old when they could be trained: they are to be begun again."""
        self._back_to_issued(group_ids, "abandoned")

    def clear(self, partition: int) -> None:
        """Lets go of what was trained in this step and those before it."""
        if partition > self.last_trained:
            raise LedgerError(
                f"partition {partition} cannot be cleared: it is not trained; allowed: up to "
                f"{self.last_trained}"
            )
        for group in self.groups(GroupState.TRAINED):
            if group.partition <= partition:
                self._by_state.remove(group)
                self._let_go(group)

    def metrics(self) -> dict[str, float]:
        """Groups by state now, samples that wait for training, and how many groups ever were."""
        found = {f"queue/{state}": float(self.num_groups(state)) for state in ACTIVE}
        found["queue/waiting_samples"] = float(self.num_samples(*HELD))
        return found | {f"queue/{n}_total": float(self.groups_total[n]) for n in COUNTED}

    def state_dict(self) -> dict[str, Any]:
        """Counters, and ids and rows of all that has not ended. Samples are not in it."""
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
        """Counters are those of before; what had not ended is issued, to be begun again."""
        self._next_id, self.last_trained = state["next_id"], state["last_trained"]
        self.groups_total = Counter(state["groups_total"])
        self.samples_total = Counter(state["samples_total"])
        pending = zip(state["group_ids"].tolist(), state["rows"].tolist(), strict=True)
        self._groups = {
            number: SampleGroup(number, row, self._group_size) for number, row in pending
        }
        self._by_state = _ByState[T]()
        for group in self._groups.values():
            self._by_state.add(group)

    def _back_to_issued(self, group_ids: Sequence[int], reason: str) -> None:
        with self._moved(group_ids, GroupState.ISSUED) as groups:
            for group in groups:
                self._count(reason, group)
                group.begun_version = group.oldest_version = -1
                group.num_samples, group.partition = self._group_size, 0
                group.columns, group.taken_by = {}, set()

    def _let_go(self, group: SampleGroup[T]) -> None:
        """Of its columns too, for whoever still has the group."""
        del self._groups[group.group_id]
        group.columns = {}

    @contextlib.contextmanager
    def _moved(self, group_ids: Iterable[int], to: GroupState) -> Iterator[list[SampleGroup[T]]]:
        """Put these groups into a new state, all of them or, with an error, none.

        Inside, what the index goes by may be changed.
        """
        groups = [self._get(group_id) for group_id in dict.fromkeys(group_ids)]
        for group in groups:
            if to not in ALLOWED[group.state]:
                allowed = ", ".join(sorted(ALLOWED[group.state])) or "nothing, it has ended"
                raise LedgerError(
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
            raise LedgerError(
                f"group {group_id} is not in the ledger: never issued, dropped, or cleared; "
                f"allowed: one of the {len(self._groups)} in it"
            ) from None

    def _check_partition(self, partition: int) -> None:
        if partition != self.last_trained + 1:
            raise LedgerError(
                f"partition {partition} cannot be trained after {self.last_trained}; allowed: "
                f"{self.last_trained + 1}"
            )

    def _count(self, name: str, group: SampleGroup[T]) -> None:
        self.groups_total[name] += 1
        self.samples_total[name] += group.num_samples
