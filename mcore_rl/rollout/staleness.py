"""What an asynchronous trainer begins, trains on and abandons: one object decides.

Why no token older than `staleness` s versions is ever trained:
1. Tokens of a group are no older than the version it was begun with, which the ledger checks.
2. `pushed(v)` refuses to go on while a group, begun or finished, has a version before v - s;
   `evict(v)` sends those back.
3. Step v + 1, which trains version v, selects and trains while v is pushed: ages are at most s.

That alone would waste work, so `num_to_begin` paces: while version v is pushed, as many groups may
have been begun as the batches up to step v + s + 1 need, and those over; and a step waits for a
group that no later one could train in time. So at most as many as are over are sent back.

What is replayed takes the place of new groups. `expect` says how many the next step needs; later
ones need no fewer than new_per_step, and are counted as that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mcore_rl.config.resolve import count_extra_groups
from mcore_rl.rollout.buffer import (
    ACTIVE,
    HELD,
    WAITING,
    GroupState,
    LedgerError,
    SampleGroup,
    SampleQueue,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pacing:
    """Settings of `Admission`. ValueError when one is not allowed."""

    groups_per_step: int  # the most that a step trains
    group_size: int  # samples
    num_steps: int  # of the run: nothing is begun for later ones
    staleness: int  # versions that the oldest token may be older than the policy that is trained
    depth: int | None = None  # groups that generate at once; None: as many as staleness lets
    # Groups begun beyond those that the batches need, as a share of groups_per_step. What of them
    # ends too late for a batch waits for the next one, if staleness lets it.
    over_issue: float = 0.0
    # Samples that are held or generated before nothing more is begun. What the next batch lacks is
    # begun all the same. None: no bound but that of staleness.
    max_samples: int | None = None
    # Groups that a step needs where as many are replayed as may be. None: groups_per_step.
    new_per_step: int | None = None

    def __post_init__(self) -> None:
        lowest = {"groups_per_step": 1, "group_size": 1, "num_steps": 0, "staleness": 0}
        lowest |= {"depth": 1, "over_issue": 0}
        lowest["max_samples"] = self.groups_per_step * self.group_size
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ValueError(f"{name}={value}; allowed: {low} or more")
        if not 1 <= self.num_new <= self.groups_per_step:
            raise ValueError(
                f"new_per_step={self.new_per_step}; allowed: 1 to {self.groups_per_step}"
            )
        if self.over_issue and not self.staleness:
            raise ValueError(
                f"over_issue={self.over_issue} with staleness=0, where what is left over is too "
                "old; allowed: 0, or staleness of 1 or more"
            )

    @property
    def num_extra(self) -> int:
        """Groups that may be begun beyond what the batches need."""
        return count_extra_groups(self.over_issue, self.groups_per_step)

    @property
    def num_new(self) -> int:
        """Groups that are counted for a step of which no more is known."""
        return self.groups_per_step if self.new_per_step is None else self.new_per_step


class Admission(Generic[T]):
    """Decides over the groups of a queue; a state of a checkpoint. A step of a trainer:

        expect(step, ...)                    # new groups that it needs, where some are replayed
        queue.issue(...)                     # num_to_draw new groups, whenever it is not 0
        begin()                              # ids and rows of groups for the servers
        queue.finish(...), mark_rewarded, drop
        select(step)                         # the batch; None until enough groups are ready
        queue.mark_trained(step)
        evict(step)                          # of which some have to be ended on the servers
        pushed(step)                         # the servers have the version of this step
        queue.clear(step)

    Every method may raise LedgerError.
    """

    def __init__(self, queue: SampleQueue[T], pacing: Pacing) -> None:
        self._queue, self._pacing = queue, pacing
        self.version = 0  # that the servers have
        self._expected = (0, 0)  # a step, and how many groups it needs
        self._evicted: set[int] = set()  # they begin again after the push

    def expect(self, step: int, num_groups: int) -> None:
        """The next step needs so many new groups: it replays the others."""
        most = self._pacing.groups_per_step
        if not 0 <= num_groups <= most:
            raise LedgerError(f"step {step} cannot need {num_groups} groups; allowed: 0 to {most}")
        self._expected = step, num_groups

    def _needed(self) -> int:
        """By the step after the last that is trained."""
        step, num_groups = self._expected
        return num_groups if step == self._queue.last_trained + 1 else self._pacing.num_new

    def num_to_begin(self) -> int:
        """How many groups may be begun now."""
        queue, pacing = self._queue, self._pacing
        last = min(self.version + pacing.staleness + 1, pacing.num_steps)
        batches = last - queue.last_trained  # to come, of those that may have been begun
        if batches <= 0:
            return 0
        needed = self._needed() + (batches - 1) * pacing.num_new + pacing.num_extra
        room = needed - queue.num_groups(*ACTIVE) - len(self._evicted)
        running = queue.num_groups(GroupState.GENERATING)
        room = min(room, self._room_for_samples(room, running))
        if pacing.depth is not None:
            room = min(room, pacing.depth - running)
        return max(room, 0)

    def _room_for_samples(self, room: int, running: int) -> int:
        """Groups whose samples may wait besides those there are, or what the next batch lacks."""
        queue, pacing = self._queue, self._pacing
        if pacing.max_samples is not None:
            room = (pacing.max_samples - queue.num_samples(*HELD)) // pacing.group_size - running
        waiting = queue.num_groups(GroupState.GENERATED, GroupState.REWARDED)
        lacking = max(self._needed() - queue.num_groups(GroupState.TRAINING), 0)
        return max(room, (lacking or pacing.num_new) - running - waiting)

    def num_to_draw(self) -> int:
        """New groups that the queue lacks for `begin`."""
        num = self.num_to_begin()
        return max(num - len(self._issued()), 0) if num else 0

    def _issued(self) -> list[SampleGroup[T]]:
        groups = self._queue.groups(GroupState.ISSUED)
        return [group for group in groups if group.group_id not in self._evicted]

    def begin(self) -> list[SampleGroup[T]]:
        """Issued groups, as many as may be, by id: they are generating from now on."""
        num = self.num_to_begin()
        chosen = self._issued()[:num] if num else []
        self._queue.begin([group.group_id for group in chosen], self.version)
        return chosen

    def select(self, step: int, num_groups: int | None = None) -> list[SampleGroup[T]] | None:
        """The groups of a step in streaming order; None until as many are ready as it needs.

        It needs `num_groups`, by default as many as are expected, of such versions that those to
        come can train the others in time. Called again after a loss, it fills the step up.
        """
        last = self._queue.last_trained
        if step != self.version + 1 or step != last + 1:
            raise LedgerError(
                f"step {step} cannot select: the servers have version {self.version}, and step "
                f"{last} is trained; allowed: step {last + 1}, with version {last}"
            )
        most = self._pacing.groups_per_step
        needed = self._needed() if num_groups is None else num_groups
        if not 0 <= needed <= most:
            raise LedgerError(f"step {step} cannot select {needed} groups; allowed: 0 to {most}")
        lacking = max(needed - self._queue.num_groups(GroupState.TRAINING), 0)
        if self._queue.num_groups(GroupState.REWARDED) < lacking or not self._leaves_time(lacking):
            return None
        chosen = self._queue.groups(GroupState.REWARDED)[:lacking]
        self._queue.select([group.group_id for group in chosen], step)
        return self._queue.groups(GroupState.TRAINING)

    def _leaves_time(self, num_chosen: int) -> bool:
        """Whether the steps to come can train what this one leaves, before it is too old.

        It chooses the oldest groups that are rewarded. As in scheduling by the earliest deadline: n
        steps train no more than n batches, of new_per_step. Those begun beyond the batches may be
        late. False only if waiting can help. It counts by version, whatever the number of groups.
        """
        pacing = self._pacing
        chosen: Counter[int] = Counter()
        for version, num in sorted(self._queue.num_by_version(GroupState.REWARDED).items()):
            chosen[version] = min(num, num_chosen - chosen.total())
        left = self._queue.num_by_version(*WAITING)
        left.subtract(chosen)
        for num_steps in range(pacing.staleness + 1):
            newest = self.version - pacing.staleness + num_steps  # with so many steps after this
            room = num_steps * pacing.num_new + pacing.num_extra
            is_late = sum(num for version, num in left.items() if version <= newest) > room
            if is_late and any(num and version > newest for version, num in chosen.items()):
                return False
        return True

    def evict(self, next_version: int) -> list[int]:
        """Before a push: what would be too old after it is issued again.

        Returns the ids of those that generate, which the servers have to end.
        """
        old = self._too_old(next_version)
        running = [group.group_id for group in old if group.state is GroupState.GENERATING]
        self._evicted = {group.group_id for group in old}
        self._queue.abandoned(list(self._evicted))
        return running

    def pushed(self, version: int) -> None:
        """The servers have `version`, one more than before, after step `version` was trained."""
        if version != self.version + 1 or version != self._queue.last_trained:
            raise LedgerError(
                f"version {version} cannot be pushed after {self.version}, with step "
                f"{self._queue.last_trained} trained; allowed: {self.version + 1}, of a step that "
                "is trained"
            )
        if old := self._too_old(version):
            raise LedgerError(
                f"version {version} cannot be pushed: group {old[0].group_id} ({old[0].state}) has "
                f"version {old[0].oldest_version}; allowed: from "
                f"{version - self._pacing.staleness}, after evict({version})"
            )
        self.version = version
        self._evicted.clear()

    def _too_old(self, version: int) -> list[SampleGroup[T]]:
        """Those not selected that no step could train once `version` is pushed."""
        waiting = self._queue.groups(*WAITING)
        return [group for group in waiting if group.age(version) > self._pacing.staleness]

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
