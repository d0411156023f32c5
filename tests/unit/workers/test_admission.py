"""What an asynchronous trainer begins, selects and abandons: by hand, and in steps of trouble."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.checkpoint.run_checkpoints import RunCheckpoints, read_checkpoint
from mcore_rl.workers.admission import Admission, Pacing
from mcore_rl.workers.sample_queue import ACTIVE, LedgerError, SampleQueue, State, Taken

NUM_STEPS = 500


def paced(**settings) -> Pacing:
    return Pacing(**{"groups_per_step": 2, "group_size": 3, "num_steps": 9, **settings})


def of(pacing: Pacing) -> tuple[SampleQueue[object], Admission[object]]:
    queue: SampleQueue[object] = SampleQueue(pacing.group_size)
    return queue, Admission(queue, pacing)


def begun(queue, admission) -> list[int]:
    """Ids of what is begun, with new prompts where the queue lacks them."""
    first, num = queue.groups_total["issued"], admission.num_to_draw()
    queue.issue(range(first, first + num), range(first, first + num))
    return [group.group_id for group in admission.begin()]


def rewarded(queue, *group_ids: int, num_bytes: int = 0) -> None:
    for group_id in group_ids:
        queue.finish(group_id, -1, 3, {}, num_bytes)
    queue.mark_rewarded(group_ids)


def selected(admission, step: int) -> list[int] | None:
    groups = admission.select(step)
    return None if groups is None else [group.group_id for group in groups]


def trained(queue, admission, step: int) -> list[int]:
    """The step ends; returns what the servers have to end before the push."""
    queue.mark_trained(step)
    running = admission.evict(step)
    admission.pushed(step)
    queue.clear(step)
    return running


def test_with_staleness_0_a_step_begins_its_own_groups_and_nothing_ahead():
    queue, admission = of(paced(staleness=0))
    for step, wanted in ((1, [0, 1]), (2, [2, 3]), (3, [4, 5])):
        assert begun(queue, admission) == wanted and begun(queue, admission) == []
        rewarded(queue, wanted[1])
        assert selected(admission, step) is None and begun(queue, admission) == []
        rewarded(queue, wanted[0])
        assert selected(admission, step) == wanted and begun(queue, admission) == []
        queue.mark_trained(step)
        assert begun(queue, admission) == [] and admission.evict(step) == []
        admission.pushed(step)
        queue.clear(step)
        assert len(queue) == 0


def test_with_staleness_1_a_step_is_begun_ahead_and_waits_for_what_would_be_too_old_later():
    queue, admission = of(paced(staleness=1))
    assert begun(queue, admission) == [0, 1, 2, 3]  # of steps 1 and 2, version 0
    rewarded(queue, 3, 1, 2)
    assert selected(admission, 1) == [1, 2] and begun(queue, admission) == []
    assert trained(queue, admission, 1) == []  # group 0 may be trained in step 2
    assert begun(queue, admission) == [4, 5]  # version 1
    rewarded(queue, 4, 5)
    assert selected(admission, 2) is None  # 3 and 4 are ready, but 0 is too old for step 3
    rewarded(queue, 0)
    assert selected(admission, 2) == [0, 3]
    assert trained(queue, admission, 2) == []


def test_stragglers_are_begun_again_as_many_as_are_begun_beyond_the_batches():
    queue, admission = of(paced(staleness=1, over_issue=0.5))
    assert begun(queue, admission) == [0, 1, 2, 3, 4]  # one more than steps 1 and 2 need
    rewarded(queue, 4, 1, 2)
    assert selected(admission, 1) == [1, 2] and begun(queue, admission) == []
    assert trained(queue, admission, 1) == []
    assert begun(queue, admission) == [5, 6]  # version 1
    rewarded(queue, 5, 6)
    assert selected(admission, 2) is None  # of 0 and 3 one may be late
    rewarded(queue, 3)
    assert selected(admission, 2) == [3, 4]  # the oldest first
    assert trained(queue, admission, 2) == [0]  # in step 3 it would be 2 versions old
    assert begun(queue, admission) == [0, 7, 8]  # version 2; groups 5 and 6 wait, of version 1
    rewarded(queue, 0, 7)
    assert selected(admission, 3) == [5, 6]
    ages = [(group.group_id, group.age(2)) for group in queue.groups(State.TRAINING)]
    assert ages == [(5, 1), (6, 1)]


def test_what_has_ended_and_would_be_too_old_is_begun_again_but_not_ended_on_servers():
    queue, admission = of(paced(staleness=1, over_issue=0.5))
    assert begun(queue, admission) == [0, 1, 2, 3, 4]
    rewarded(queue, 0, 1, 2, 3, 4)
    for step, wanted in ((1, [0, 1]), (2, [2, 3])):
        assert selected(admission, step) == wanted
        assert trained(queue, admission, step) == []
        assert begun(queue, admission) == ([5, 6] if step == 1 else [4, 7, 8])
    assert queue.groups_total["abandoned"] == 1


def test_tokens_newer_than_the_beginning_of_their_group_keep_it_longer():
    queue, admission = of(paced(staleness=1, groups_per_step=1))
    assert begun(queue, admission) == [0, 1]
    rewarded(queue, 0)
    selected(admission, 1)
    trained(queue, admission, 1)
    queue.finish(1, 1, 3, {})  # it waited, and its first token is of version 1
    assert begun(queue, admission) == [2]
    rewarded(queue, 2)
    assert selected(admission, 2) == [2]
    assert trained(queue, admission, 2) == []
    queue.mark_rewarded([1])
    assert selected(admission, 3) == [1]


def test_dropped_groups_are_replaced_and_lost_ones_are_admitted_once():
    queue, admission = of(paced(staleness=0, groups_per_step=3))
    assert begun(queue, admission) == [0, 1, 2]
    rewarded(queue, 0, 1)
    queue.drop([1])
    queue.lost([0, 2])
    assert admission.num_to_begin() == 3 and admission.num_to_draw() == 1
    assert begun(queue, admission) == [0, 2, 3]
    rewarded(queue, 0, 2, 3)
    assert selected(admission, 1) == [0, 2, 3]
    queue.lost([2])  # while it is trained on: the step is filled up
    assert selected(admission, 1) is None
    assert begun(queue, admission) == [2]
    rewarded(queue, 2)
    assert selected(admission, 1) == [0, 2, 3]


def test_depth_bounds_what_generates_at_once_apart_from_staleness():
    queue, admission = of(paced(staleness=3, depth=3))
    assert begun(queue, admission) == [0, 1, 2] and begun(queue, admission) == []
    rewarded(queue, 1)
    assert begun(queue, admission) == [3]
    rewarded(queue, 0, 2, 3)
    assert begun(queue, admission) == [4, 5, 6]
    rewarded(queue, 4, 5, 6)
    assert begun(queue, admission) == [7] and admission.num_to_begin() == 0


def test_samples_that_wait_hold_back_new_groups_but_not_those_of_the_next_batch():
    queue, admission = of(paced(staleness=3, max_samples=11))  # of 3 a group
    assert begun(queue, admission) == [0, 1, 2]
    rewarded(queue, 0, 1, 2)
    assert begun(queue, admission) == []
    assert selected(admission, 1) == [0, 1]
    assert begun(queue, admission) == [3]  # the next batch has group 2 and lacks one
    trained(queue, admission, 1)
    assert begun(queue, admission) == [4]


def test_bytes_that_wait_hold_back_new_groups_but_not_those_of_the_next_batch():
    queue, admission = of(paced(staleness=3, max_bytes=100, depth=1))
    for group_id in range(3):
        assert begun(queue, admission) == [group_id]
        rewarded(queue, group_id, num_bytes=40)
    assert begun(queue, admission) == []
    selected(admission, 1)
    assert begun(queue, admission) == [3]
    rewarded(queue, 3, num_bytes=40)
    assert begun(queue, admission) == []
    trained(queue, admission, 1)
    assert begun(queue, admission) == [4]


def test_nothing_is_begun_for_steps_that_the_run_does_not_have():
    queue, admission = of(paced(staleness=3, num_steps=2, over_issue=0.5))
    assert begun(queue, admission) == [0, 1, 2, 3, 4]
    for step in (1, 2):
        rewarded(queue, *range(2 * step - 2, 2 * step))
        selected(admission, step)
        trained(queue, admission, step)
        assert begun(queue, admission) == []


def test_a_step_may_need_fewer_groups():
    queue, admission = of(paced(staleness=0))
    begun(queue, admission)
    rewarded(queue, 1)
    assert [group.group_id for group in admission.select(1, 1)] == [1]
    with pytest.raises(LedgerError, match="step 1 cannot select 3 groups; allowed: 0 to 2"):
        admission.select(1, 3)
    assert trained(queue, admission, 1) == [0]  # with staleness 0 it is too old
    assert begun(queue, admission) == [0, 2]


def test_versions_and_steps_come_in_order():
    queue, admission = of(paced(staleness=0))
    begun(queue, admission)
    rewarded(queue, 0, 1)
    with pytest.raises(LedgerError, match="step 2 cannot select: the servers have version 0"):
        admission.select(2)
    selected(admission, 1)
    with pytest.raises(
        LedgerError, match="version 1 cannot be pushed after 0, with step 0 trained"
    ):
        admission.pushed(1)
    queue.mark_trained(1)
    with pytest.raises(
        LedgerError, match="version 2 cannot be pushed after 0, with step 1 trained"
    ):
        admission.pushed(2)
    with pytest.raises(
        LedgerError, match=r"step 1 cannot select: .* step 1 is trained; allowed: step 2"
    ):
        admission.select(1)


def test_a_push_is_refused_until_what_would_be_too_old_is_evicted():
    queue, admission = of(paced(staleness=1, groups_per_step=1))
    for step in (1, 2):
        begun(queue, admission)
        rewarded(queue, step)
        selected(admission, step)
        queue.mark_trained(step)
        if step == 1:
            admission.pushed(1)
    told = r"group 0 \(generating\) has version 0; allowed: from 1, after evict\(2\)"
    with pytest.raises(LedgerError, match=told):
        admission.pushed(2)
    assert admission.evict(2) == [0]
    admission.pushed(2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"groups_per_step": 0}, "groups_per_step=0; allowed: 1 or more"),
        ({"staleness": -1}, "staleness=-1; allowed: 0 or more"),
        ({"depth": 0}, "depth=0; allowed: 1 or more"),
        ({"over_issue": float("nan")}, "over_issue=nan; allowed: 0 or more"),
        ({"max_samples": 5}, "max_samples=5; allowed: 6 or more"),
        ({"max_bytes": 0}, "max_bytes=0; allowed: 1 or more"),
        (
            {"staleness": 0, "over_issue": 0.5},
            "over_issue=0.5 with staleness=0, .*; allowed: 0, or",
        ),
    ],
)
def test_pacing_that_is_not_allowed_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        paced(**{"staleness": 1, **settings})


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_groups_that_end_in_order_are_never_abandoned(staleness):
    queue, admission = of(paced(staleness=staleness, num_steps=50))
    running: list[int] = []
    for step in range(1, 51):
        while selected(admission, step) is None:
            running += begun(queue, admission)
            rewarded(queue, running.pop(0))
        assert trained(queue, admission, step) == []
    assert queue.groups_total["abandoned"] == 0 and queue.groups_total["begun"] == 100


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
        self.queue, self.admission = of(pacing)
        self.done, self.clock = Done(), 0.0
        self.alive: weakref.WeakSet[Samples] = weakref.WeakSet()
        self.saved: tuple[Path, Done] | None = None
        self.forget()
        self.seen = {"lost": 0, "late": 0, "crashes": 0, "redone": 0, "largest": 0, "oldest": 0}

    def forget(self) -> None:
        """What a process has in memory, besides the ledger."""
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
        """Pacing: (v + s + 1) * B groups in all, and those over; memory likewise."""
        pacing, done = self.pacing, self.done
        num_dropped = sum(how == "dropped" for how in done.ends.values())
        batches = min(done.steps + pacing.staleness + 1, pacing.num_steps)
        extra = round(pacing.over_issue * pacing.groups_per_step)
        assert len(done.begun) - num_dropped <= batches * pacing.groups_per_step + extra
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
        self.queue.finish(group_id, oldest, self.pacing.group_size, {"samples": samples})
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
        for _ in range(40 * (self.pacing.staleness + 1) * self.pacing.groups_per_step):
            if (batch := self.admission.select(step)) is None:
                self.moment(is_waiting=True)
                continue
            for _ in range(int(self.rng.integers(0, 2 * self.pacing.groups_per_step))):
                self.moment()
            if all(group.state is State.TRAINING for group in batch):
                break
            self.seen["redone"] += 1
        else:
            raise AssertionError(f"step {step} has no batch")
        assert len(batch) == self.pacing.groups_per_step
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
        for group in self.queue.groups(State.ISSUED):
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
        self.forget()
        self.queue, self.admission = of(self.pacing)
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
        left = {group.group_id for group in self.queue.groups(State.ISSUED, *ACTIVE)}
        assert left.isdisjoint(self.done.ends)
        assert left | self.done.ends.keys() == set(range(self.done.num_prompts))
        ends = list(self.done.ends.values())
        assert ends.count("trained") == self.pacing.num_steps * self.pacing.groups_per_step
        counted, samples = self.queue.groups_total, self.queue.samples_total
        assert counted["issued"] == self.done.num_prompts
        for how in ("trained", "dropped"):
            assert counted[how] == ends.count(how)
            assert samples[how] == ends.count(how) * self.pacing.group_size


SETTINGS = {
    "s0": {"staleness": 0},
    "s0 depth 2": {"staleness": 0, "depth": 2},
    "s1": {"staleness": 1},
    "s1 over-issue": {"staleness": 1, "over_issue": 0.5},
    "s3 over-issue, depth": {"staleness": 3, "over_issue": 0.25, "depth": 6},
    "s3 few samples": {"staleness": 3, "max_samples": 15},
}


def run_of(settings, folder: Path) -> Run:
    return Run(paced(groups_per_step=4, num_steps=NUM_STEPS, **settings), folder, seed=0)


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
        kept = [g.group_id for g in groups(self, State.ISSUED, State.GENERATING)]
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
        admitted = self._queue._next_id - self._queue.num_groups(State.ISSUED)
        return max(min(num_to_begin(self), in_all - admitted), 0)

    def select_short(self, step, num_groups=None):
        ready = self._queue.groups(State.REWARDED)[: self._pacing.groups_per_step]
        self._queue.select([group.group_id for group in ready], step)
        return self._queue.groups(State.TRAINING) or None

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
    run = run_of(SETTINGS["s1 over-issue"], tmp_path)
    with pytest.raises((AssertionError, LedgerError, KeyError)):
        run.all_steps()
