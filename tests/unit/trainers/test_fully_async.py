"""Fully asynchronous training with modelled servers: time is a number, and so are the weights.

A server generates a token of each response a second; how many a response has depends on its group
alone, with a long tail. The log-prob of a token depends on the version of the weights, so that
samples of other weights are others.
"""

from __future__ import annotations

import itertools
import time
from itertools import chain

import numpy as np
import pytest

from mcore_rl.checkpoint.run_checkpoints import read_checkpoint
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import (
    AlgorithmConfig,
    AsynchronousConfig,
    CorrectionConfig,
    CurriculumConfig,
    FilterConfig,
    ReplayConfig,
    RLConfig,
    TrainerConfig,
)
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.controller.process_cleanup import RunStopped, StopSignals
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.rollout.buffer import GroupState
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.policy_checks import PolicyMismatchError
from tests.fakes import LocalWorkers, build_trainer
from tests.nightly import all_but
from tests.unit.trainers import test_one_step_off
from tests.unit.trainers.modelled_servers import Servers
from tests.unit.trainers.test_checkpointing import Actor
from tests.unit.trainers.test_one_step_off import log_probs_of

NUM_STEPS, PER_STEP = 6, 4


class Policy(LocalWorkers, Actor):
    """An actor whose weights are a number: how often it was updated."""

    def __init__(self, servers: Servers):
        super().__init__()
        self.servers, self.version = servers, 0
        self.updates: list[Batch] = []

    def compute_log_probs(self, batch, *, temperature):
        responses = batch.jagged("response_ids")
        log_probs = responses.with_values(log_probs_of(responses.values, self.version))
        return batch.with_columns(log_probs=log_probs, entropy=log_probs)

    def update(self, batch, *, sizes, temperature):
        self.version = self.servers.version + 1
        self.updates.append(batch)
        moved = self.servers.train_s
        if self.servers.is_asleep:  # what runs goes on where it was
            running = self.servers.running.items()
            self.servers.running = {g: (began + moved, n) for g, (began, n) in running}
        self.servers.clock_s += moved
        return [[{"loss": float(batch.jagged("rollout_log_probs").values.sum())}] * len(sizes)]

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        self.version = int(path.split("step_")[1].split("/")[0])
        self.servers.pushes.append((self.servers.clock_s, self.version - 1))


class Run:
    """A loop of steps of four prompts, each answered three times."""

    def __init__(self, folder, mode="fully_async", staleness=2, num_steps=NUM_STEPS, **other):
        self.rows: list[dict[str, float]] = []
        config = RLConfig(output_dir=str(folder))
        config.trainer = TrainerConfig(
            mode=mode, staleness=staleness, num_steps=num_steps, prompts_per_step=PER_STEP,
            save_every=other.pop("save_every", 0),
            asynchronous=AsynchronousConfig(**other.pop("asynchronous", {})),
        )  # fmt: skip
        config.timeouts.call_s = 0.2
        config.data.curriculum = other.pop("curriculum", config.data.curriculum)
        config.placement.rollout = other.pop("rollout", "own")
        config.model.path = config.data.train_file = config.data.test_file = "given"
        train_s = other.pop("train_s", 8.0)
        self.servers = other.pop("servers", None) or Servers(train_s)
        self.actor = other.pop("build_policy", Policy)(self.servers)
        config.algorithm = AlgorithmConfig(group_size=3, **other)
        validate_rl(config)
        self.config = config = resolve_for_device_type(config, "cpu")
        devices = DeviceSharing(
            plan_run(config).pool_names, {"actor": self.actor}, self.servers, self.servers, True
        )
        self.stop = StopSignals()
        self.trainer = build_trainer(config, folder, devices, stop=self.stop)

    def train(self, report=None):
        def record(step, metrics):
            self.rows.append(
                {n: v for n, v in metrics.items() if not n.startswith(("time/", "driver/"))}
            )
            self.rows[-1].pop("tokens_per_s")
            (report or (lambda *_: None))(step, metrics)

        self.trainer.run(record)
        return self

    @property
    def trained(self) -> list[list[int]]:
        """The groups of each step."""
        return [np.unique(batch.array("group_ids")).tolist() for batch in self.actor.updates]


def ages(run: Run) -> list[list[int]]:
    """Return the age of each step's tokens, in versions: step k trains version k - 1."""
    versions_by_step = [batch.jagged("weight_versions").values for batch in run.actor.updates]
    return [np.unique(step - versions).tolist() for step, versions in enumerate(versions_by_step)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_mini_batches": 2},
        {"curriculum": CurriculumConfig(name="learnability")},
        {"filter": FilterConfig(group_filter="drop_uniform", max_rounds=4, if_short="train")},
        {
            "filter": FilterConfig(replay=ReplayConfig(share=0.5, max_age=2)),
            "correction": CorrectionConfig(level="token"),
        },
    ],
    ids=["plain", "mini-batches", "curriculum", "filter", "replay"],
)
def test_staleness_0_is_the_synchronous_run(tmp_path, settings):
    """Samples, advantages, losses and metrics of each step, to the digit."""
    actual = Run(tmp_path, staleness=0, **settings).train()
    expected = Run(tmp_path, mode="sync", staleness=0, **settings).train()
    assert actual.servers.events == expected.servers.events
    rows = zip(actual.rows, expected.rows, strict=True)
    assert [{name: row[name] for name in other} for row, other in rows] == expected.rows
    for batch, expected_batch in zip(actual.actor.updates, expected.actor.updates, strict=True):
        assert batch.columns.keys() == expected_batch.columns.keys()
        for name, column in batch.columns.items():
            pair = [
                c.values if isinstance(c, Jagged) else c for c in (column, expected_batch[name])
            ]
            np.testing.assert_array_equal(*pair, err_msg=name)
    assert all(row["max_logprob_gap"] == 0 for row in actual.rows)


@pytest.mark.job
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_token_is_older_than_staleness_over_500_steps(tmp_path, staleness):
    run = Run(tmp_path, staleness=staleness, num_steps=500).train()
    token_ages = ages(run)
    assert max(map(max, token_ages)) == staleness and min(map(min, token_ages)) == 0
    groups = list(chain(*run.trained))
    assert len(groups) == len(set(groups)) == 500 * PER_STEP
    assert sorted(groups) == list(range(500 * PER_STEP))
    assert run.rows[-1]["queue/abandoned_total"] == 0  # it is paced, and nothing is thrown away
    assert run.servers.most_running <= (staleness + 1) * PER_STEP
    mixed = [
        b
        for b in run.actor.updates
        if (b.array("newest_versions") > b.array("oldest_versions")).any()
    ]
    assert len(mixed) > 100
    assert run.servers.running == {}


def test_weights_of_tokens_are_those_of_their_versions(tmp_path):
    """An update lowers each log-prob by 1/64: the log of a weight is 1/64 a version."""
    run = Run(tmp_path, staleness=3).train()
    assert run.config.algorithm.correction.level == "token"
    for step, update in enumerate(run.actor.updates):
        age = step - update.jagged("weight_versions").values
        weights = update.jagged("correction_weights").values
        np.testing.assert_allclose(weights, np.exp(-age / 64), rtol=1e-5)


def test_gaps_are_checked_where_samples_are_of_the_policy(tmp_path):
    run = Run(tmp_path, staleness=1).train()
    for step, (row, update) in enumerate(zip(run.rows, run.actor.updates, strict=True)):
        is_new = update.array("oldest_versions") == step
        assert ("max_logprob_gap" in row) == bool(is_new.any())


def test_a_slow_trainer_lets_no_more_be_begun(tmp_path):
    """Servers that have all that staleness lets in wait; the bound of groups at once is apart."""
    slow = Run(tmp_path, train_s=1e4).train()
    assert slow.servers.most_running <= 3 * PER_STEP
    assert slow.servers.events[:2] == ["begin 0-11 of 0", "push 1"]
    few = Run(tmp_path, asynchronous={"max_groups": 2}).train()
    assert few.servers.most_running == 2
    assert sorted(chain(*few.trained)) == list(range(NUM_STEPS * PER_STEP))


def test_no_more_groups_are_begun_than_may_wait(tmp_path):
    """With servers that are faster than the trainer, which begin 12 groups of 3 ahead."""
    bound = {"max_waiting_samples": 3 * PER_STEP}
    run = Run(tmp_path, train_s=1e4, asynchronous=bound).train()
    assert run.servers.events[:3] == ["begin 0-3 of 0", "push 1", "begin 4-7 of 1"]
    assert {row["queue/waiting_samples"] for row in run.rows} == {3 * PER_STEP}
    assert sorted(chain(*run.trained)) == list(range(NUM_STEPS * PER_STEP))


def test_groups_that_would_be_too_old_are_ended_before_the_push_and_begun_after_it(tmp_path):
    run = Run(tmp_path, staleness=1, num_steps=40, asynchronous={"oversampling": 0.5}).train()
    events = run.servers.events
    ended = [number for number, event in enumerate(events) if event.startswith("abandon")]
    assert ended
    for number in ended[:-1]:
        assert events[number + 1].startswith("push")
        first = int(events[number].partition("[")[2].partition("]")[0].split(",")[0])
        assert events[number + 2].startswith(f"begin {first}-")
    assert max(map(max, ages(run))) == 1


def test_a_run_that_goes_on_trains_each_prompt_once(tmp_path):
    """Prompts begun and not trained on begin again; the bound holds from the first step on."""
    begun = Run(tmp_path / "begun", save_every=1)

    def stop(step, metrics):
        begun.stop.requested = "SIGTERM" if step == 3 else ""

    with pytest.raises(RunStopped, match="SIGTERM: step 3 is saved"):
        begun.train(stop)
    pending = set(range(6 * PER_STEP)) - set(chain(*begun.trained))
    again = Run(tmp_path / "again")
    again.trainer.checkpoints.restore(read_checkpoint(tmp_path / "begun/checkpoints/step_000003"))
    again.servers.events.clear()
    again.train()
    assert again.servers.events[0] == f"begin {min(pending)}-{max(pending)} of 3"
    assert pending == set(chain(*again.trained)) and len(again.trained) == 3
    versions = [update.jagged("weight_versions").values for update in again.actor.updates]
    assert all(v.min() >= 3 and k + 3 - v.min() <= 2 for k, v in enumerate(versions))
    assert again.rows[-1]["queue/trained_total"] + PER_STEP == 6 * PER_STEP


def test_staleness_0_goes_on_bit_for_bit(tmp_path):
    uninterrupted = Run(tmp_path / "whole", staleness=0, save_every=2).train()
    again = Run(tmp_path / "again", staleness=0)
    again.trainer.checkpoints.restore(read_checkpoint(tmp_path / "whole/checkpoints/step_000004"))
    actual, expected = again.train().rows, uninterrupted.rows[4:]
    names = [name for name in expected[0] if not name.startswith("queue/")]  # begun twice
    assert [[row[n] for n in names] for row in actual] == [
        [row[n] for n in names] for row in expected
    ]


def test_the_run_that_has_ended_leaves_nothing_that_generates(tmp_path):
    run = Run(tmp_path, asynchronous={"oversampling": 0.5}).train()
    assert run.servers.running == {}
    assert run.trainer.generation.queue.num_groups(GroupState.GENERATING) == 0


def test_groups_that_the_filter_rejects_are_replaced(tmp_path):
    samples = FilterConfig(group_filter="drop_uniform", max_rounds=4)
    run = Run(tmp_path, filter=samples).train()
    assert [len(groups) for groups in run.trained] == [PER_STEP] * NUM_STEPS
    for update in run.actor.updates:
        ids, rewards = update.array("group_ids"), update.array("rewards")
        assert all(0 < rewards[ids == group].mean() < 1 for group in np.unique(ids))
    share = sum(row["samples/groups"] * row["samples/passed"] for row in run.rows)
    assert share == pytest.approx(NUM_STEPS * PER_STEP)
    assert min(row["samples/passed"] for row in run.rows) < 1
    assert max(map(max, ages(run))) <= 2


@pytest.mark.parametrize(("if_short", "message"), [("train", None), ("stop", "max_rounds")])
def test_a_filter_that_rejects_all_ends_the_wait(tmp_path, if_short, message):
    """After as many groups as max_rounds says, a step is short or stops the run."""
    samples = FilterConfig(group_filter="drop_uniform", if_short=if_short)
    run = Run(tmp_path, filter=samples, num_steps=2)
    samples_of = run.servers._samples

    def uniform(*arguments):
        batch = samples_of(*arguments)
        return batch.with_columns(rewards=np.ones(len(batch), np.float32))

    run.servers._samples = uniform
    if message:
        with pytest.raises(ConfigError, match=message):
            run.train()
    else:
        run.train()
        assert [row["samples/passed"] for row in run.rows] == [0, 0]
        assert run.trained == []


def test_a_step_begins_as_many_groups_for_a_filter_as_max_rounds_says(tmp_path):
    """Groups come one after the other, and none passes."""
    samples = FilterConfig(group_filter="drop_uniform", if_short="train", max_rounds=2)
    run = Run(tmp_path, filter=samples, num_steps=1, asynchronous={"max_groups": 1})
    samples_of = run.servers._samples

    def uniform(*arguments):
        batch = samples_of(*arguments)
        return batch.with_columns(rewards=np.ones(len(batch), np.float32))

    run.servers._samples = uniform
    assert [row["samples/groups"] for row in run.train().rows] == [2 * PER_STEP]


def test_replayed_groups_take_the_place_of_new_ones(tmp_path):
    replay = ReplayConfig(share=0.5, max_age=4, priority="uniform")
    run = Run(tmp_path, filter=FilterConfig(replay=replay), num_steps=20).train()
    assert [row["samples/replayed"] for row in run.rows[1:]] == [2.0] * 19
    for update in run.actor.updates[1:]:
        assert len(np.unique(update.array("group_ids")[update.array("replayed") == 1])) == 2
        assert len(np.unique(update.array("group_ids"))) == PER_STEP
    assert run.servers.events[:2] == ["begin 0-7 of 0", "push 1"]  # 4 for step 1, 2 for others


@pytest.mark.parametrize(
    ("share", "staleness", "train_s"),
    all_but(
        [(0.25, 1, 8.0), (0.25, 4, 1e4), (0.5, 2, 8.0), (1.0, 1, 1e4), (1.0, 4, 8.0)],
        itertools.product([0.25, 0.5, 1.0], [1, 2, 4], [8.0, 1e4]),
    ),
)
def test_all_that_is_begun_is_trained_where_steps_replay(tmp_path, share, staleness, train_s):
    """Also where the buffer has too few groups of priority, and servers are ahead."""
    samples = FilterConfig(replay=ReplayConfig(share=share, max_age=5))
    settings = {"staleness": staleness, "train_s": train_s, "num_steps": 20}
    run = Run(tmp_path, filter=samples, **settings).train()
    new = [batch.take(np.flatnonzero(batch["replayed"] == 0)) for batch in run.actor.updates]
    groups = [group for batch in new for group in np.unique(batch.array("group_ids")).tolist()]
    assert run.rows[-1]["queue/abandoned_total"] == 0
    assert run.rows[-1]["queue/begun_total"] == len(groups) == len(set(groups)) < 20 * PER_STEP
    assert {len(np.unique(batch.array("group_ids"))) for batch in run.actor.updates} == {PER_STEP}


def test_on_shared_devices_servers_sleep_with_what_they_do_and_go_on(tmp_path):
    run = Run(tmp_path, rollout="shared").train()
    events = run.servers.events
    assert events[1].startswith("sleep with") and events[1] != "sleep with 0"
    slept = [number for number, event in enumerate(events) if event.startswith("sleep")]
    assert all(events[number + 1].startswith("push") for number in slept)
    assert len(slept) == NUM_STEPS
    assert max(map(max, ages(run))) <= 2
    assert sorted(chain(*run.trained)) == list(range(NUM_STEPS * PER_STEP))


def test_servers_that_say_nothing_end_the_run(tmp_path, monkeypatch):
    """After timeouts.call_s, which the first samples have not used up."""
    run, clock, calls = Run(tmp_path), [0.0], []
    run.config.timeouts.call_s = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    collect = run.servers.collect

    def three_seconds(*arguments):
        clock[0] += 3.0
        calls.append(clock[0])
        run.servers.is_silent = len(calls) > 1
        return collect(*arguments)

    run.servers.collect = three_seconds
    with pytest.raises(WorkerError, match=r"no group of samples has come for timeouts.call_s=10 s"):
        run.train()
    assert calls == [3.0, 6.0, 9.0, 12.0, 15.0]


@pytest.mark.parametrize("loop", [Run, test_one_step_off.Run])
def test_the_speed_of_a_step_is_that_of_the_tokens_that_have_come(tmp_path, monkeypatch, loop):
    monkeypatch.setattr(Stopwatch, "total_s", 2.0)
    rows = []
    run = loop(tmp_path).train(lambda step, metrics: rows.append(metrics))
    tokens = [int(update.num_tokens.sum()) for update in run.actor.updates]
    assert [row["tokens_per_s"] for row in rows] == [num / 2.0 for num in tokens]


def test_a_token_of_older_weights_than_its_group_was_begun_with_stops_the_run(tmp_path):
    run = Run(tmp_path, staleness=0)
    run.servers.lies = True
    with pytest.raises((PolicyMismatchError, RuntimeError), match="version"):
        run.train()
