"""The sample buffer in 500 steps of random delays, filters, kills, crashes and checkpoints."""

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
from mcore_rl.rollout.buffer import (
    ACTIVE,
    BufferStateError,
    GroupState,
    SampleQueue,
    StalenessController,
    StalenessSettings,
)
from tests.nightly import all_but

NUM_STEPS = 500


@dataclass(eq=False)
class Samples:
    """Samples of a group, from one attempt."""

    oldest: int  # version of a token


@dataclass
class Progress:
    """Progress of a run, counted by the test; a crash restores that of the checkpoint."""

    num_prompts: int = 0
    steps: int = 0
    ends: dict[int, str] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    def end(self, group_id: int, reason: str) -> None:
        assert group_id not in self.ends, (
            f"group {group_id} was {self.ends[group_id]}, then {reason}"
        )
        self.ends[group_id] = reason


class Run:
    """Simulates servers with heavy-tailed delays, a filter, kills, crashes and checkpoints."""

    def __init__(self, pacing: StalenessSettings, folder: Path, seed: int) -> None:
        self.pacing, self.rng, self.folder = pacing, np.random.default_rng(seed), folder
        # New groups of each step from 1 on; it replays the others.
        needs = np.random.default_rng(seed).integers(
            pacing.num_new, pacing.groups_per_step + 1, pacing.num_steps
        )
        self.needs = [0, *needs.tolist()]
        self.needed_until = np.cumsum(self.needs).tolist()  # cumulative
        self.begin_process()
        self.progress, self.clock = Progress(), 0.0
        self.alive: weakref.WeakSet[Samples] = weakref.WeakSet()
        self.saved: tuple[Path, Progress] | None = None
        self.seen = {"lost": 0, "late": 0, "crashes": 0, "redone": 0, "largest": 0, "oldest": 0}

    def begin_process(self) -> None:
        """Make a new process."""
        self.queue: SampleQueue[object] = SampleQueue(self.pacing.group_size)
        self.controller: StalenessController[object] = StalenessController(self.queue, self.pacing)
        self.running: dict[int, tuple[float, int]] = {}  # time of its end, and its first version
        self.scoring: list[tuple[int, Samples]] = []  # groups that wait for their score
        self.current: dict[int, Samples] = {}  # samples of the last attempt, by group

    def draw(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def begin(self) -> None:
        num, first = self.controller.num_to_draw(), self.progress.num_prompts
        self.queue.issue(range(first, first + num), range(10 * first, 10 * (first + num), 10))
        self.progress.num_prompts += num
        for group in self.controller.begin():
            assert group.row == 10 * group.group_id and group.group_id not in self.running
            ends = self.clock + float(self.rng.pareto(1.1)) + 0.1
            self.running[group.group_id] = ends, self.progress.steps
            self.progress.begun.add(group.group_id)
        self.check_bounds()

    def check_bounds(self) -> None:
        """Check that groups begun, and memory, are bounded by the steps up to v + s + 1."""
        pacing, progress = self.pacing, self.progress
        num_dropped = sum(reason == "dropped" for reason in progress.ends.values())
        batches = min(progress.steps + pacing.staleness + 1, pacing.num_steps)
        extra = math.ceil(pacing.oversampling * pacing.groups_per_step)
        known = min(progress.steps + 1, batches)
        counted = self.needed_until[known] + (batches - known) * pacing.num_new
        assert len(progress.begun) - num_dropped <= counted + extra
        assert len(self.running) <= (pacing.depth or len(self.running))
        limit = (pacing.staleness + 1) * pacing.groups_per_step + extra
        assert len(self.queue) <= limit
        assert len(self.alive) <= limit + len(self.scoring)
        self.seen["largest"] = max(self.seen["largest"], len(self.queue))
        if pacing.max_samples is not None:
            held = self.queue.num_samples(*ACTIVE[1:])
            assert held <= pacing.max_samples + pacing.groups_per_step * pacing.group_size

    def advance(self) -> None:
        """End the next group, or score those that have ended."""
        if self.scoring and (not self.running or self.draw(0.5)):
            self.score()
            return
        assert self.running, "nothing generates, and there is no batch"
        group_id = min(self.running, key=lambda group_id: self.running[group_id])
        self.clock, first = self.running.pop(group_id)
        oldest = int(self.rng.integers(first, self.progress.steps + 1)) if self.draw(0.3) else first
        self.current[group_id] = samples = Samples(oldest)
        self.alive.add(samples)
        self.queue.finish(group_id, oldest, self.pacing.group_size, {"samples": samples})
        self.scoring.append((group_id, samples))

    def score(self) -> None:
        """Mark groups as rewarded, unless their samples were lost; a filter drops some."""
        scored, self.scoring = self.scoring, []
        for group_id, samples in scored:
            if self.current.get(group_id) is not samples:
                self.seen["late"] += 1
                continue
            self.queue.mark_rewarded([group_id])
            if self.draw(0.15):
                self.queue.drop([group_id])
                self.progress.end(group_id, "dropped")
                del self.current[group_id]

    def kill(self) -> None:
        """Kill a server: groups that it generates, or has generated, are lost."""
        lost = [g.group_id for g in self.queue.groups(*ACTIVE) if self.draw(0.4)]
        self.queue.reissue_lost(lost)
        self.seen["lost"] += len(lost)
        for group_id in lost:
            self.running.pop(group_id, None)
            self.current.pop(group_id, None)

    def advance_all(self, is_waiting: bool = False) -> None:
        self.begin()
        if is_waiting or self.running or self.scoring:
            self.advance()
        if self.draw(0.02):
            self.kill()

    def step(self, step: int) -> None:
        """Select, train while the servers run, and push; lost groups are replaced."""
        self.controller.expect(step, self.needs[step])
        for _ in range(40 * (self.pacing.staleness + 1) * self.pacing.groups_per_step):
            if (batch := self.controller.select(step)) is None:
                self.advance_all(is_waiting=True)
                continue
            for _ in range(int(self.rng.integers(0, 2 * self.pacing.groups_per_step))):
                self.advance_all()
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
            self.progress.end(group.group_id, "trained")
        self.queue.mark_trained(step)
        del batch, group, samples
        self.push(step)

    def push(self, step: int) -> None:
        for group_id in self.controller.evict(step):
            del self.running[group_id]
        for group in self.queue.groups(GroupState.ISSUED):
            self.current.pop(group.group_id, None)
        if self.draw(0.5):
            self.begin()  # as another thread may, with the old weights
        self.controller.mark_pushed(step)
        self.queue.clear(step)
        self.progress.steps = step

    def save(self) -> None:
        checkpoints = RunCheckpoints(self.folder)
        checkpoints.begin(self.progress.steps)
        parts = {"queue": self.queue.state_dict(), "admission": self.controller.state_dict()}
        path = checkpoints.publish(self.progress.steps, {"parts": parts})
        self.saved = path, copy.deepcopy(self.progress)

    def crash(self) -> None:
        path, progress = self.saved
        parts = read_checkpoint(path).state["parts"]
        self.progress = copy.deepcopy(progress)
        self.begin_process()
        self.queue.load_state_dict(parts["queue"])
        self.controller.load_state_dict(parts["admission"])
        self.seen["crashes"] += 1

    def run_all(self) -> None:
        while self.progress.steps < self.pacing.num_steps:
            if self.saved is not None and self.draw(0.02):
                for _ in range(int(self.rng.integers(0, 9))):
                    self.advance_all()  # in the middle of a step
                self.crash()
            self.step(self.progress.steps + 1)
            if self.draw(0.1):
                self.save()
        self.check_end()

    def check_end(self) -> None:
        """Check that each group issued has ended once, or is in the buffer."""
        left = {group.group_id for group in self.queue.groups(GroupState.ISSUED, *ACTIVE)}
        assert left.isdisjoint(self.progress.ends)
        assert left | self.progress.ends.keys() == set(range(self.progress.num_prompts))
        ends = list(self.progress.ends.values())
        assert ends.count("trained") == self.needed_until[-1]
        counted, samples = self.queue.groups_total, self.queue.samples_total
        assert counted["issued"] == self.progress.num_prompts
        for reason in ("trained", "dropped"):
            assert counted[reason] == ends.count(reason)
            assert samples[reason] == ends.count(reason) * self.pacing.group_size


SETTINGS = {
    "s0": {"staleness": 0},
    "s0 depth 2": {"staleness": 0, "depth": 2},
    "s1": {"staleness": 1},
    "s1 over-issue": {"staleness": 1, "oversampling": 0.5},
    "s3 over-issue, depth": {"staleness": 3, "oversampling": 0.25, "depth": 6},
    "s3 few samples": {"staleness": 3, "max_samples": 15},
    "s1 replay": {"staleness": 1, "new_per_step": 2},
    "s3 replay, few samples": {"staleness": 3, "new_per_step": 1, "max_samples": 12},
}


def make_run(settings, folder: Path) -> Run:
    return Run(StalenessSettings(4, 3, NUM_STEPS, **settings), folder, seed=0)


@pytest.mark.parametrize(
    "name", all_but(("s0", "s1 over-issue", "s3 replay, few samples"), SETTINGS), ids=str
)
def test_no_token_older_than_staleness_is_trained_in_500_steps_of_delays_and_kills(name, tmp_path):
    settings = SETTINGS[name]
    run = make_run(settings, tmp_path)
    run.run_all()
    assert run.seen["oldest"] == settings["staleness"]  # it reaches the bound
    assert run.seen["lost"] > 100 and run.seen["crashes"] > 2 and run.seen["redone"] > 2
    assert run.seen["late"] > 5
    assert (run.queue.groups_total["abandoned"] > 0) == ("oversampling" in settings)


def make_faults() -> dict[str, Callable[[pytest.MonkeyPatch], None]]:
    """Return patches that plant a fault each, which the simulation has to notice."""
    queue, controller = SampleQueue, StalenessController
    reissue, drop, state_of = queue._reissue, queue.drop, queue.state_dict
    load, too_old = queue.load_state_dict, controller._list_too_old
    num_to_begin, groups = controller.num_to_begin, queue.groups

    def keeps_partition_counter(self, state):
        last = self.last_trained
        load(self, {**state, "last_trained": last})

    def forgets_counts(self, state):
        totals = self.groups_total
        load(self, state)
        self.groups_total = totals

    def forgets_rewarded(self):
        state = state_of(self)
        saved = [g.group_id for g in groups(self, GroupState.ISSUED, GroupState.GENERATING)]
        rows = np.isin(state["group_ids"], saved)
        return {**state, "group_ids": state["group_ids"][rows], "rows": state["rows"][rows]}

    def lost_counts_twice(self, group_ids, reason):
        reissue(self, group_ids, reason)
        first = self._next_id
        self.issue(range(first, first + len(group_ids)), [self._groups[i].row for i in group_ids])

    def counts_drop_as_trained(self, group_ids):
        drop(self, group_ids)
        self.groups_total["trained"] += len(group_ids)

    def evicts_one_late(self, version):
        return too_old(self, version - 1)

    def begins_one_more(self):
        return num_to_begin(self) + 1

    def begins_without_replacement(self):
        # Dropped ones are not replaced.
        pacing = self._settings
        last = min(self.version + pacing.staleness + 1, pacing.num_steps)
        total = last * pacing.groups_per_step + pacing.num_extra
        admitted = self._queue._next_id - self._queue.num_groups(GroupState.ISSUED)
        return max(min(num_to_begin(self), total - admitted), 0)

    def select_short(self, step, num_groups=None):
        ready = self._queue.groups(GroupState.REWARDED)[: self._settings.groups_per_step]
        self._queue.select([group.group_id for group in ready], step)
        return self._queue.groups(GroupState.TRAINING) or None

    return {
        "version not restored": (controller, "load_state_dict", lambda self, state: None),
        "trained steps not restored": (queue, "load_state_dict", keeps_partition_counter),
        "totals not restored": (queue, "load_state_dict", forgets_counts),
        "ready groups not saved": (queue, "state_dict", forgets_rewarded),
        "lost group issued twice": (queue, "_reissue", lost_counts_twice),
        "dropped counted as trained": (queue, "drop", counts_drop_as_trained),
        "eviction one version late": (controller, "_list_too_old", evicts_one_late),
        "no eviction": (controller, "evict", lambda self, version: []),
        "one group too many": (controller, "num_to_begin", begins_one_more),
        "dropped not replaced": (controller, "num_to_begin", begins_without_replacement),
        "short batches": (controller, "select", select_short),
        "partitions not cleared": (queue, "clear", lambda self, partition: None),
    }


FAULTS = make_faults()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, monkeypatch, tmp_path):
    monkeypatch.setattr(*FAULTS[fault])
    run = make_run(SETTINGS["s1 over-issue"], tmp_path)
    with pytest.raises((AssertionError, BufferStateError, KeyError)):
        run.run_all()
