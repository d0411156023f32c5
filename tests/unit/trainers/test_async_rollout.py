"""Generation beside a trainer: samples that are lost or rejected, and servers that are polled.

The servers and their time are modelled; they are polled in a real thread. One step off, what a node
had is named by group and version: samples that are generated again are of a later version.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.checkpoint.run_checkpoints import read_checkpoint
from mcore_rl.config.schema import CorrectionConfig, CurriculumConfig, FilterConfig, ReplayConfig
from mcore_rl.controller.batch_ops import get_sample_columns
from mcore_rl.controller.process_cleanup import RunStopped
from mcore_rl.controller.remote_batch import RemoteBatch, RemoteColumn, RowLocations
from mcore_rl.data.batch import Batch, Jagged, Samples
from mcore_rl.rewards.registry import RewardError
from mcore_rl.rollout.buffer import HELD, GroupState
from mcore_rl.trainers import async_rollout, replay_buffer, step_samples
from tests.unit.trainers import test_one_step_off as one_step_off
from tests.unit.trainers.modelled_servers import Servers
from tests.unit.trainers.test_fully_async import NUM_STEPS, PER_STEP, Policy, Run

Generation = tuple[int, int]  # a group, and the version that has generated it
DEATH = 2  # the step after whose push the node dies
# With replay a step has three new groups and three of earlier steps, but for the first one.
OLDER = [(group, 0) for group in range(9)]
NEXT = [(9, 1)]  # of 9 to 11, which wait then
IN_ROUNDS = {
    "staleness": 0,
    "filter": FilterConfig(replay=ReplayConfig(share=0.5, max_age=2)),
    "correction": CorrectionConfig(level="token"),
}


class Object:
    """An object of the store that holds a column."""


def test_a_short_step_trains_what_it_had_selected_before_a_loss_and_what_has_come_since(
    tmp_path, monkeypatch
):
    """Five groups pass. Two of the four that are selected die, and do not pass again."""
    samples = FilterConfig(group_filter="drop_uniform", if_short="train")
    run, left, lost = Run(tmp_path, filter=samples), {0, 1, 2, 3, 4}, []
    samples_of = run.servers._samples

    def some_pass(group: int, *args: Any) -> Batch:
        batch = samples_of(group, *args)
        rewards = np.ones(len(batch), np.float32)
        rewards[0] = group not in left
        left.discard(group)
        return batch.with_columns(rewards=rewards)

    def two_die(batches: list[Any]) -> list[int]:
        if not lost:
            selected = run.trainer.generation.queue.groups(GroupState.TRAINING)
            lost.extend(group.group_id for group in selected[:2])
            return lost
        return []

    run.servers._samples = some_pass
    monkeypatch.setattr(async_rollout, "find_lost_groups", two_die)
    run.trainer.generation.start()
    batch, metrics = run.trainer.generation.take(1)
    assert len(lost) == 2 and metrics["queue/lost_total"] == 2
    assert {*batch.array("group_ids").tolist()} == {0, 1, 2, 3, 4} - {*lost}
    assert metrics["queue/rewarded"] == 0


class Elsewhere:
    """The answers of servers as they come in a job: each group's tokens are an object."""

    def __init__(self, run: Run) -> None:
        self._collect = run.servers.collect
        run.servers.collect = self.collect
        self._objects: weakref.WeakValueDictionary[int, Object] = weakref.WeakValueDictionary()

    @property
    def groups(self) -> list[int]:
        """The groups whose objects are still alive."""
        return sorted(self._objects)

    def collect(self, *args: Any) -> list[RemoteBatch]:
        batches = self._collect(*args)
        return [self.store(*group) for batch in batches for group in split_groups(batch)]

    def store(self, group: int, batch: Batch) -> RemoteBatch:
        stored = self._objects[group] = Object()
        locations = RowLocations((stored,), np.zeros(len(batch), np.int32), np.arange(len(batch)))
        columns = {n: c for n, c in batch.columns.items() if isinstance(c, Jagged)}
        of_tokens = {n: RemoteColumn(locations, n, c.values[:0]) for n, c in columns.items()}
        return RemoteBatch(get_sample_columns(batch), of_tokens)


def split_groups(batch: Batch) -> list[tuple[int, Batch]]:
    ids = batch.array("group_ids")
    return [(g, batch.take(np.flatnonzero(ids == g).tolist())) for g in np.unique(ids).tolist()]


def build_filtering_run(folder: Path) -> Run:
    """Every fifth group has a response without a reward."""
    samples = FilterConfig(group_filter="drop_uniform", max_rounds=4)
    run = Run(folder, filter=samples, curriculum=CurriculumConfig(name="learnability"))
    run.config.reward.on_error = "drop"
    samples_of = run.servers._samples

    def some_fail(group: int, *args: Any) -> Batch:
        batch = samples_of(group, *args)
        errors = ["late" if group % 5 == 0 else "", *[""] * (len(batch) - 1)]
        return batch.with_columns(reward_errors=np.array(errors))

    run.servers._samples = some_fail
    return run


def train_first_step(run: Run) -> tuple[Samples, list[Any]]:
    """The batch; and its values, metrics and what the curriculum has learned."""
    batch, metrics = run.trainer.generation.take(1)
    values = {name: column.tolist() for name, column in get_sample_columns(batch).columns.items()}
    return batch, [metrics, values, repr(run.trainer.prompts.state_dict())]


def test_rejected_groups_count_with_all_their_tokens_let_go_of(tmp_path, monkeypatch):
    monkeypatch.setattr(async_rollout, "find_lost_groups", lambda batches: [])
    _, expected = train_first_step(build_filtering_run(tmp_path / "here"))
    run = build_filtering_run(tmp_path / "elsewhere")
    elsewhere, generation = Elsewhere(run), run.trainer.generation
    generation._select_groups(1, PER_STEP)
    held = sorted(group.group_id for group in generation.queue.groups(*HELD))
    rejected = generation.queue.groups_total["dropped"]
    assert rejected > 1 and elsewhere.groups == held
    batch, results = train_first_step(run)
    assert results == expected
    assert results[0]["samples/groups"] == PER_STEP + rejected and results[0]["dropped"] > 0
    assert isinstance(batch, RemoteBatch) and batch.remote.keys() >= {"response_ids"}
    assert all((column.locations.objects >= 0).all() for column in batch.remote.values())


def count_generated(rows: list[dict[str, float]]) -> float:
    return sum(row["samples/groups"] for row in rows)


def test_groups_that_are_rejected_between_two_steps_count_in_a_run_that_goes_on(tmp_path):
    """Each group counts once: in metrics, in the curriculum, and for max_rounds."""
    settings = {
        "filter": FilterConfig(group_filter="drop_uniform", max_rounds=8, if_short="train"),
        "curriculum": CurriculumConfig(name="learnability", decay=1.0),
        "num_steps": 5,
    }
    begun = Run(tmp_path / "begun", save_every=1, **settings)
    again = Run(tmp_path / "again", **settings)
    rejected: list[Samples] = []

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step < 2:
            return
        begun.stop.requested, generation = "SIGTERM", begun.trainer.generation
        while not generation._rejected and begun.servers.running:
            generation._take_in(begun.servers.collect("train", 0))
        rejected.extend(generation._rejected)

    with pytest.raises(RunStopped, match="step 2 is saved"):
        begun.train(stop)
    assert rejected
    again.trainer.checkpoints.restore(read_checkpoint(tmp_path / "begun/checkpoints/step_000002"))
    assert len(again.trainer.generation._rejected) == len(rejected)
    again.train()
    num_groups = count_generated(begun.rows) + count_generated(again.rows)
    dropped = again.rows[-1]["queue/dropped_total"]
    assert num_groups == dropped + sum(map(len, begun.trained + again.trained))
    prompts = again.trainer.prompts.state_dict()
    assert prompts["sampler"]["responses"].sum() == 3 * num_groups
    queue = again.trainer.generation.queue
    assert {group for group, _ in prompts["drawn"]} == {
        group.group_id for group in queue.groups(GroupState.ISSUED)
    }


class Node:
    """Its death loses nothing but `had`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost = set[Generation]()
        for module in (replay_buffer, step_samples, async_rollout):
            monkeypatch.setattr(module, "find_lost_groups", self.find_lost_groups)

    def find_lost_groups(self, batches: Sequence[Batch]) -> list[int]:
        return sorted(
            {group for batch in batches for group, _ in self.lost & list_generations(batch)}
        )

    def dies(
        self, run: one_step_off.Run, had: Sequence[Generation], signal: str = ""
    ) -> one_step_off.Run:
        def report(step, metrics):
            if step == DEATH:
                self.lost |= set(had)
                run.stop.requested = signal

        return run.train(report)


def build_replaying_run(folder: Path, save_every: int = 0) -> one_step_off.Run:
    policy = FilterConfig(replay=ReplayConfig(share=0.5, max_age=4, priority="uniform"))
    return one_step_off.Run(folder, filter=policy, save_every=save_every, prompts_per_step=6)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def list_generations(batch: Batch) -> set[Generation]:
    versions = [int(row[0]) for row in batch.jagged("weight_versions")]
    return set(zip(batch.array("group_ids").tolist(), versions, strict=True))


def list_trained(run: one_step_off.Run) -> list[list[tuple[int, int]]]:
    """Return group id and replay flag of the samples of each step."""
    pairs = [
        (u.array("group_ids").tolist(), u.array("replayed").tolist()) for u in run.actor.updates
    ]
    return [sorted(zip(*pair, strict=True)) for pair in pairs]


def test_what_is_lost_when_it_is_to_be_saved_is_generated_by_the_weights_that_servers_have(
    node: Node, tmp_path: Path
):
    """A checkpoint is saved after the push."""
    run = node.dies(one_step_off.Run(tmp_path, save_every=1), [(5, 1)])
    events = run.servers.events
    assert events[events.index("push 2") + 1] == "generate 4-5 of 2"
    versions = [
        {version for _, version in list_generations(update)} for update in run.actor.updates
    ]
    assert versions == [{0}, {0}, {2}, {2}, {3}]


@pytest.mark.parametrize("save_every", [0, 1], ids=["when it is taken", "when it is saved"])
def test_a_step_that_is_generated_again_replays_what_it_would_have(node, tmp_path, save_every):
    """None of its own: those that were generated first are not in the buffer any more."""
    uninterrupted = build_replaying_run(tmp_path / "whole").train()
    run = node.dies(build_replaying_run(tmp_path / "lost", save_every), NEXT)
    assert "generate 9-11 of 2" in run.servers.events
    assert list_trained(run) == list_trained(uninterrupted)
    assert not {(9, 1), (10, 1), (11, 1)} & set().union(*map(list_generations, run.actor.updates))


def test_groups_that_are_lost_with_it_are_not_replayed_for_it(node: Node, tmp_path: Path):
    """All that is older is lost, too: the step is new, and later ones replay what came again."""
    run = node.dies(build_replaying_run(tmp_path), [*OLDER, *NEXT])
    assert list_generations(run.actor.updates[DEATH]) == {(group, 2) for group in range(9, 15)}
    for update in run.actor.updates[DEATH + 1 :]:
        assert len(list_generations(update)) == 6 and min(list_generations(update)) >= (9, 2)


def test_a_run_goes_on_from_prompts_and_buffer_after_what_was_generated_again(
    node: Node, tmp_path: Path
):
    """Six prompts are drawn for it, where it had three: what is older is lost, too."""
    had = [*OLDER, *NEXT]
    uninterrupted = node.dies(build_replaying_run(tmp_path / "whole", 1), had)
    node.lost.clear()
    begun = build_replaying_run(tmp_path / "begun", 1)
    with pytest.raises(RunStopped, match="step 2 is saved"):
        node.dies(begun, had, "SIGTERM")
    again = build_replaying_run(tmp_path / "again")
    again.trainer.checkpoints.restore(read_checkpoint(tmp_path / "begun/checkpoints/step_000002"))
    again.train()
    begun.rows += again.rows
    begun.actor.updates += again.actor.updates
    one_step_off.same(begun, uninterrupted)


class Going(Servers):
    """A group ends whenever they are tended."""

    def poll(self, stream: str, at_least: int) -> list[Batch]:
        assert threading.current_thread() is not threading.main_thread()
        return self.collect(stream, 0)


class Waits(Policy):
    """Computes until something has happened in its first update."""

    def __init__(self, servers: Servers, until: Callable[[], bool]) -> None:
        super().__init__(servers)
        self._until, self.pause_s = until, 0.0

    def update(self, batch, **how):
        deadline = time.monotonic() + 30
        while not self.updates and not self._until():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(self.pause_s)
        return super().update(batch, **how)


def build_run(
    folder: Path, servers: Servers, until: Callable[[], bool] = lambda: True, **settings: Any
) -> Run:
    return Run(folder, servers=servers, build_policy=lambda _: Waits(servers, until), **settings)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.trainers.async_rollout.POLL_S", 0.005)


def test_while_the_trainer_computes_groups_are_begun_as_others_end(tmp_path):
    servers = Going(train_s=0.0)

    def begun() -> int:
        return sum(event.startswith("begin") for event in servers.events)

    settings = {"asynchronous": {"max_groups": 1}}
    run = build_run(tmp_path, servers, lambda: begun() == 3 * PER_STEP, **settings).train()
    first_push = servers.events.index("push 1")
    assert servers.events[:first_push] == [f"begin {n}-{n} of 0" for n in range(3 * PER_STEP)]
    assert servers.most_running == 1
    assert sorted(chain(*run.trained)) == list(range(NUM_STEPS * PER_STEP))


@pytest.mark.parametrize(("max_groups", "least"), [(0, {4, 3, 2, 1}), (2, {1})])
def test_servers_bunch_what_a_step_lacks_unless_each_group_makes_room(tmp_path, max_groups, least):
    class Counting(Servers):
        def __init__(self) -> None:
            super().__init__(train_s=0.0)
            self.least: set[int] = set()

        def collect(self, stream: str, wait_s: float, at_least: int = 1) -> list[Batch]:
            self.least.add(at_least)
            return super().collect(stream, wait_s, at_least)

    servers = Counting()
    build_run(tmp_path, servers, staleness=1, asynchronous={"max_groups": max_groups}).train()
    assert servers.least == least


def test_what_goes_wrong_meanwhile_is_raised_when_the_trainer_has_computed(tmp_path):
    failed = threading.Event()

    class Failing(Servers):
        def poll(self, stream: str, at_least: int) -> list[Batch]:
            failed.set()
            raise RewardError("no reward")

    with pytest.raises(RewardError, match="no reward"):
        build_run(tmp_path, Failing(train_s=0.0), failed.is_set).train()


@pytest.mark.parametrize(
    "settings",
    [{"rollout": "shared"}, IN_ROUNDS, {"num_steps": 1, "asynchronous": {"oversampling": 0.5}}],
    ids=["asleep", "rounds", "the last step"],
)
def test_servers_that_sleep_or_generate_in_rounds_or_for_no_later_step_are_let_be(
    tmp_path, settings
):
    class Unpolled(Servers):
        takes_turns = "rollout" in settings

        def poll(self, stream: str, at_least: int) -> list[Batch]:
            raise AssertionError("polled")

    servers = Unpolled(train_s=0.0)
    pause = time.monotonic() + 0.1
    run = build_run(tmp_path, servers, lambda: time.monotonic() > pause, **settings).train()
    assert len(run.trained) == settings.get("num_steps", NUM_STEPS)
    assert servers.running == {}


def test_what_is_too_old_begins_again_after_the_push_and_not_by_the_weights_of_before(tmp_path):
    servers = Going(train_s=0.0)
    servers.tend = lambda stream: []  # type: ignore[method-assign]
    settings = {"staleness": 1, "num_steps": 20, "asynchronous": {"oversampling": 1.0}}
    run = build_run(tmp_path, servers, **settings)
    run.actor.pause_s = 0.03
    events = run.train().servers.events
    ended = [number for number, event in enumerate(events) if event.startswith("abandon")]
    assert len(ended) > 1
    assert all(events[number + 1].startswith("push") for number in ended)


def test_a_group_that_another_server_has_begun_is_as_new_as_its_weights(tmp_path):
    """It was begun of version 0 and again of version 2: so a later step may train it."""

    class Dying(Servers):
        died: int | None = None

        def pop_rerouted(self, stream: str) -> list[int]:
            is_pushing = self.events[-1].startswith("push")
            if self.died is not None or self.version < 2 or is_pushing or not self.running:
                return []
            self.died = min(self.running)
            self.running[self.died] = (self.clock_s, self.running[self.died][1])
            return [self.died]

    servers = Dying(train_s=8.0)
    run = build_run(tmp_path, servers)
    begun = {}

    def record(step, metrics):
        queue = run.trainer.generation.queue
        begun.update({group: queue._groups[group].begun_version for group in queue._groups})

    run.train(record)
    assert servers.died is not None and begun[servers.died] == 2
    assert run.rows[-1]["queue/lost_total"] == 1
    assert sorted(chain(*run.trained)) == list(range(NUM_STEPS * PER_STEP))


def test_a_group_that_was_begun_again_before_a_push_is_reported_before_it(tmp_path):
    """The trainer's call that begins others begins it, after all answers of that step."""

    class DyingLate(Servers):
        died: int | None = None

        def die(self) -> None:
            """Die while the trainer computes."""
            if self.died is None and self.running:
                self.died = min(self.running)
                self.running[self.died] = (self.clock_s, self.running[self.died][1])
                self.pending = [self.died]

        pending: list[int] = []  # noqa: RUF012

        def pop_rerouted(self, stream: str) -> list[int]:
            if threading.current_thread() is not threading.main_thread():
                return []
            pending, self.pending = self.pending, []
            return pending

    servers = DyingLate(train_s=8.0)
    run = build_run(tmp_path, servers, lambda: servers.die() is None)
    run.train()
    assert servers.died is not None
    assert sorted(chain(*run.trained)) == list(range(NUM_STEPS * PER_STEP))
