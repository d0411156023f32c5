"""Admission and ledger in 500 steps of random delays, filters, kills, crashes and checkpoints."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.checkpoint.run_checkpoints import RunCheckpoints, read_checkpoint
from mcore_rl.rollout.buffer import ACTIVE, GroupState, LedgerError, SampleQueue, Taken
from mcore_rl.rollout.staleness import Admission, Pacing

NUM_STEPS = 500


@dataclass(eq=False)
class Samples:
    """Those of a group, of one attempt."""

    oldest: int  # version of a token


@dataclass
class Done:
    """What a run has done, as the test counts it; a crash takes it back to the checkpoint."""

    num_prompts: int = 0
    steps: int = 0
    ends: dict[int, str] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    def end(self, group_id: int, how: str) -> None:
        assert group_id not in self.ends, f"group {group_id} was {self.ends[group_id]}, then {how}"
        self.ends[group_id] = how


class Run:
    """Servers with delays of a heavy tail, a filter, kills, crashes and checkpoints."""

    def __init__(self, pacing: Pacing, folder: Path, seed: int) -> None:
        self.pacing, self.rng, self.folder = pacing, np.random.default_rng(seed), folder
        # New groups of each step from 1 on: it replays as many as may be, or fewer.
        needs = np.random.default_rng(seed).integers(
            pacing.num_new, pacing.groups_per_step + 1, pacing.num_steps
        )
        self.needs = [0, *needs.tolist()]
        self.needed_until = np.cumsum(self.needs).tolist()  # in all
        self.begin_empty()
        self.done, self.clock = Done(), 0.0
        self.alive: weakref.WeakSet[Samples] = weakref.WeakSet()
        self.saved: tuple[Path, Done] | None = None
        self.seen = {"lost": 0, "late": 0, "crashes": 0, "redone": 0, "largest": 0, "oldest": 0}

    def begin_empty(self) -> None:
        """As a process begins."""
        self.queue: SampleQueue[object] = SampleQueue(self.pacing.group_size)
        self.admission: Admission[object] = Admission(self.queue, self.pacing)
        self.running: dict[int, tuple[float, int]] = {}  # when it ends, and its first version
        self.scoring: list[Taken[object]] = []
        self.current: dict[int, Samples] = {}  # of the last attempt of a group

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def begin(self) -> None:
        num, first = self.admission.num_to_draw(), self.done.num_prompts
        self.queue.issue(range(first, first + num), range(10 * first, 10 * (first + num), 10))
        self.done.num_prompts += num
        for group in self.admission.begin():
            assert group.row == 10 * group.group_id and group.group_id not in self.running
            ends = self.clock + float(self.rng.pareto(1.1)) + 0.1
            self.running[group.group_id] = ends, self.done.steps
            self.done.begun.add(group.group_id)
        self.check_bounds()

    def check_bounds(self) -> None:
        """Pacing: what the steps up to v + s + 1 need, and those over; memory likewise."""
        pacing, done = self.pacing, self.done
        num_dropped = sum(how == "dropped" for how in done.ends.values())
        batches = min(done.steps + pacing.staleness + 1, pacing.num_steps)
        extra = math.ceil(pacing.over_issue * pacing.groups_per_step)
        known = min(done.steps + 1, batches)
        counted = self.needed_until[known] + (batches - known) * pacing.num_new
        assert len(done.begun) - num_dropped <= counted + extra
        assert len(self.running) <= (pacing.depth or len(self.running))
        most = (pacing.staleness + 1) * pacing.groups_per_step + extra
        assert len(self.queue) <= most
        assert len(self.alive) <= most + len(self.scoring)
        self.seen["largest"] = max(self.seen["largest"], len(self.queue))
        if pacing.max_samples is not None:
            held = self.queue.num_samples(*ACTIVE[1:])
            assert held <= pacing.max_samples + pacing.groups_per_step * pacing.group_size

    def advance(self) -> None:
        """The next group ends, or scores come that were asked for before."""
        if self.scoring and (not self.running or self.chance(0.5)):
            self.score()
            return
        assert self.running, "nothing generates, and there is no batch"
        group_id = min(self.running, key=lambda group_id: self.running[group_id])
        self.clock, first = self.running.pop(group_id)
        oldest = int(self.rng.integers(first, self.done.steps + 1)) if self.chance(0.3) else first
        self.current[group_id] = samples = Samples(oldest)
        self.alive.add(samples)
        self.queue.finish(group_id, oldest, self.pacing.group_size, {"filter": samples})
        self.scoring += self.queue.take("score", "samples")

    def score(self) -> None:
        """A filter drops some groups; scores of samples that were lost come to nothing."""
        scored, self.scoring = self.scoring, []
        for taken in scored:
            is_current = self.current.get(taken.group_id) is taken.columns["samples"]
            assert self.queue.put(taken, {"scores": self.clock}) == is_current
            if not is_current:
                self.seen["late"] += 1
                continue
            self.queue.mark_rewarded([taken.group_id])
            if self.chance(0.15):
                self.queue.drop([taken.group_id])
                self.done.end(taken.group_id, "dropped")
                del self.current[taken.group_id]

    def kill(self) -> None:
        """A server goes, with what it generates and what it has generated."""
        on_it = [g.group_id for g in self.queue.groups(*ACTIVE) if self.chance(0.4)]
        self.queue.lost(on_it)
        self.seen["lost"] += len(on_it)
        for group_id in on_it:
            self.running.pop(group_id, None)
            self.current.pop(group_id, None)

    def moment(self, is_waiting: bool = False) -> None:
        self.begin()
        if is_waiting or self.running or self.scoring:
            self.advance()
        if self.chance(0.02):
            self.kill()

    def step(self, step: int) -> None:
        """Select, train while the servers go on, push; what is lost meanwhile is replaced."""
        self.admission.expect(step, self.needs[step])
        for _ in range(40 * (self.pacing.staleness + 1) * self.pacing.groups_per_step):
            if (batch := self.admission.select(step)) is None:
                self.moment(is_waiting=True)
                continue
            for _ in range(int(self.rng.integers(0, 2 * self.pacing.groups_per_step))):
                self.moment()
            if all(group.state is GroupState.TRAINING for group in batch):
                break
            self.seen["redone"] += 1
        else:
            raise AssertionError(f"step {step} has no batch")
        assert len(batch) == self.needs[step]
        assert sum(group.num_samples for group in batch) == len(batch) * self.pacing.group_size
        for group in batch:
            samples = self.current.pop(group.group_id)
            assert samples is group.columns["samples"]
            age = step - 1 - samples.oldest
            assert 0 <= age <= self.pacing.staleness, f"step {step} trains on an age of {age}"
            self.seen["oldest"] = max(self.seen["oldest"], age)
            self.done.end(group.group_id, "trained")
        self.queue.mark_trained(step)
        del batch, group, samples
        self.push(step)

    def push(self, step: int) -> None:
        for group_id in self.admission.evict(step):
            del self.running[group_id]
        for group in self.queue.groups(GroupState.ISSUED):
            self.current.pop(group.group_id, None)
        if self.chance(0.5):
            self.begin()  # another thread may, with weights that are about to be replaced
        self.admission.pushed(step)
        self.queue.clear(step)
        self.done.steps = step

    def save(self) -> None:
        written = RunCheckpoints(self.folder)
        written.begin(self.done.steps)
        parts = {"queue": self.queue.state_dict(), "admission": self.admission.state_dict()}
        path = written.publish(self.done.steps, {"parts": parts})
        self.saved = path, copy.deepcopy(self.done)

    def crash(self) -> None:
        path, done = self.saved
        parts = read_checkpoint(path).state["parts"]
        self.done = copy.deepcopy(done)
        self.begin_empty()
        self.queue.load_state_dict(parts["queue"])
        self.admission.load_state_dict(parts["admission"])
        self.seen["crashes"] += 1

    def all_steps(self) -> None:
        while self.done.steps < self.pacing.num_steps:
            if self.saved is not None and self.chance(0.02):
                for _ in range(int(self.rng.integers(0, 9))):
                    self.moment()  # in the middle of a step
                self.crash()
            self.step(self.done.steps + 1)
            if self.chance(0.1):
                self.save()
        self.check_end()

    def check_end(self) -> None:
        """Each group that was issued has ended once, or is in the ledger."""
        left = {group.group_id for group in self.queue.groups(GroupState.ISSUED, *ACTIVE)}
        assert left.isdisjoint(self.done.ends)
        assert left | self.done.ends.keys() == set(range(self.done.num_prompts))
        ends = list(self.done.ends.values())
        assert ends.count("trained") == self.needed_until[-1]
        counted, samples = self.queue.groups_total, self.queue.samples_total
        assert counted["issued"] == self.done.num_prompts
        for how in ("trained", "dropped"):
            assert counted[how] == ends.count(how)
            assert samples[how] == ends.count(how) * self.pacing.group_size


SETTINGS = {
    "s0": {"staleness": 0},
    "s0 depth 2": {"staleness": 0, "depth": 2},
    "s1": {"staleness": 1},
    "s1 oversampling": {"staleness": 1, "over_issue": 0.5},
    "s3 oversampling, depth": {"staleness": 3, "over_issue": 0.25, "depth": 6},
    "s3 few samples": {"staleness": 3, "max_samples": 15},
    "s1 replay": {"staleness": 1, "new_per_step": 2},
    "s3 replay, few samples": {"staleness": 3, "new_per_step": 1, "max_samples": 12},
}


def run_of(settings, folder: Path) -> Run:
    return Run(Pacing(4, 3, NUM_STEPS, **settings), folder, seed=0)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_token_older_than_staleness_is_trained_in_500_steps_of_delays_and_kills(
    settings, tmp_path
):
    run = run_of(settings, tmp_path)
    run.all_steps()
    assert run.seen["oldest"] == settings["staleness"]  # the bound is reached
    assert run.seen["lost"] > 100 and run.seen["crashes"] > 2 and run.seen["redone"] > 2
    assert run.seen["late"] > 5
    assert (run.queue.groups_total["abandoned"] > 0) == ("over_issue" in settings)


def faults() -> dict[str, Callable[[pytest.MonkeyPatch], None]]:
    """What each would be in the code; the run has to notice."""
    queue, admission = SampleQueue, Admission
    back, drop, state_of = queue._back_to_issued, queue.drop, queue.state_dict
    load, too_old, begin = queue.load_state_dict, admission._too_old, queue.begin
    num_to_begin, groups = admission.num_to_begin, queue.groups

    def keeps_partition_counter(self, state):
        last = self.last_trained
        load(self, {**state, "last_trained": last})

    def forgets_counts(self, state):
        totals = self.groups_total
        load(self, state)
        self.groups_total = totals

    def forgets_rewarded(self):
        state = state_of(self)
        kept = [g.group_id for g in groups(self, GroupState.ISSUED, GroupState.GENERATING)]
        chosen = np.isin(state["group_ids"], kept)
        return {**state, "group_ids": state["group_ids"][chosen], "rows": state["rows"][chosen]}

    def lost_counts_twice(self, group_ids, reason):
        back(self, group_ids, reason)
        first = self._next_id
        self.issue(range(first, first + len(group_ids)), [self._groups[i].row for i in group_ids])

    def lost_stays_taken(self, group_ids, reason):
        taken = {i: self._groups[i].taken_by for i in group_ids}
        back(self, group_ids, reason)
        for i, consumers in taken.items():
            self._groups[i].taken_by = consumers

    def same_attempt(self, group_ids, version):
        begin(self, group_ids, version)
        for i in group_ids:
            self._groups[i].attempt = 1

    def drop_is_counted_as_trained(self, group_ids):
        drop(self, group_ids)
        self.groups_total["trained"] += len(group_ids)

    def evicts_one_late(self, version):
        return too_old(self, version - 1)

    def begins_one_more(self):
        return num_to_begin(self) + 1

    def begins_by_what_was_issued(self):
        """Dropped ones are not replaced."""
        pacing = self._pacing
        last = min(self.version + pacing.staleness + 1, pacing.num_steps)
        in_all = last * pacing.groups_per_step + pacing.num_extra
        admitted = self._queue._next_id - self._queue.num_groups(GroupState.ISSUED)
        return max(min(num_to_begin(self), in_all - admitted), 0)

    def select_short(self, step, num_groups=None):
        ready = self._queue.groups(GroupState.REWARDED)[: self._pacing.groups_per_step]
        self._queue.select([group.group_id for group in ready], step)
        return self._queue.groups(GroupState.TRAINING) or None

    return {
        "version not restored": (admission, "load_state_dict", lambda self, state: None),
        "trained steps not restored": (queue, "load_state_dict", keeps_partition_counter),
        "totals not restored": (queue, "load_state_dict", forgets_counts),
        "ready groups not saved": (queue, "state_dict", forgets_rewarded),
        "lost group issued twice": (queue, "_back_to_issued", lost_counts_twice),
        "lost group stays taken": (queue, "_back_to_issued", lost_stays_taken),
        "late scores taken": (queue, "begin", same_attempt),
        "dropped counted as trained": (queue, "drop", drop_is_counted_as_trained),
        "eviction one version late": (admission, "_too_old", evicts_one_late),
        "no eviction": (admission, "evict", lambda self, version: []),
        "one group too many": (admission, "num_to_begin", begins_one_more),
        "dropped not replaced": (admission, "num_to_begin", begins_by_what_was_issued),
        "short batches": (admission, "select", select_short),
        "partitions not cleared": (queue, "clear", lambda self, partition: None),
    }


FAULTS = faults()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, monkeypatch, tmp_path):
    monkeypatch.setattr(*FAULTS[fault])
    run = run_of(SETTINGS["s1 oversampling"], tmp_path)
    with pytest.raises((AssertionError, LedgerError, KeyError)):
        run.all_steps()
