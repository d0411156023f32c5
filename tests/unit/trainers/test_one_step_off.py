"""The order of calls, and the versions, of training one step off.

Servers and actor count versions up. The log-prob of a token depends on the version, so that samples
of other weights are others.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest

from mcore_rl.checkpoint.run_checkpoints import read_checkpoint
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import (
    AlgorithmConfig,
    FilterConfig,
    ReplayConfig,
    RLConfig,
    TrainerConfig,
)
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.controller.process_cleanup import RunStopped, StopSignals
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.rollout.server_pool import NoServersError
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.policy_checks import PolicyMismatchError
from tests.fakes import LocalWorkers, build_trainer
from tests.unit.rollout.answering import Answering
from tests.unit.trainers.test_checkpointing import Actor

LIMIT_S = 20.0  # of every wait: a loop that does not overlap fails, and does not hang
NUM_STEPS = 5


class Policy(LocalWorkers, Actor):
    """An actor whose weights are a number: how often it was updated. Writes it as its engine does.

    An update waits until the servers have been asked for the next samples, if they wait for it.
    """

    def __init__(self, servers: Servers):
        super().__init__()
        self.servers, self.version = servers, 0
        self.updates: list[Batch] = []

    def to(self, place, **parts):
        raise AssertionError("the actor has its devices to itself")

    def compute_log_probs(self, batch, *, temperature):
        responses = batch.jagged("response_ids")
        log_probs = log_probs_of(responses.values, self.version)
        return batch.with_columns(
            log_probs=responses.with_values(log_probs), entropy=responses.with_values(log_probs)
        )

    def update(self, batch, *, sizes, temperature):
        step = self.version + 1
        if step < NUM_STEPS:
            self.servers.wait_for(lambda: self.servers.num_requests > step)
        self.servers.events.append(f"update {step}")
        self.updates.append(batch)
        self.version += 1
        self.servers.set_and_notify(num_updates=step)
        return [[{"loss": float(batch.jagged("rollout_log_probs").values.sum())}] * len(sizes)]

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        self.version = self.servers.version = int(path.split("step_")[1].split("/")[0])


class Servers(Answering):
    """Servers of a run, and what pushes weights into them; `events` are in the order of calls."""

    def __init__(self):
        self.events: list[str] = []
        self.version, self.fails_at, self.lies = 0, 0, False
        self.num_requests, self.num_updates, self.is_answering = 0, 0, False
        self.waits = False  # samples k + 1 for the end of update k
        self.resend, self.could_resend = None, list[bool]()  # while it has generated
        self.changed = threading.Condition()

    def follow_desired(self): ...

    def wait_for(self, what):
        with self.changed:
            assert not self.waits or self.changed.wait_for(what, LIMIT_S), self.events

    def set_and_notify(self, **values):
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def answers(self, prompts: Batch, sampling) -> list[Batch]:
        groups = prompts.array("group_ids").tolist()
        self.events.append(f"generate {groups[0]}-{groups[-1]} of {self.version}")
        self.could_resend.append(self.resend is not None)
        self.set_and_notify(num_requests=self.num_requests + 1, is_answering=True)
        self.wait_for(lambda: self.num_updates >= self.num_requests - 1)
        if self.num_requests == self.fails_at:
            raise WorkerError("rollout.generate: rank 0 raised")
        self.is_answering = False
        return [self._answers(np.repeat(groups, sampling.n))]

    def _answers(self, groups) -> Batch:
        ids = Jagged.pack([[group, group + 1] for group in groups], np.int64)
        version = self.version - int(self.lies)
        return Batch(
            dict(
                group_ids=groups,
                prompt_ids=ids,
                response_ids=ids,
                response_mask=ids.with_values(np.ones(len(ids.values), np.int8)),
                rollout_log_probs=ids.with_values(log_probs_of(ids.values, self.version)),
                weight_versions=ids.with_values(np.full(len(ids.values), version)),
                rewards=(np.arange(len(groups)) % 3 == 0).astype(np.float32),
                reward_errors=np.array([""] * len(groups)),
                finish_reasons=np.array(["stop"] * len(groups)),
            )
        )

    def push(self, version):
        assert not self.is_answering, "a server takes no weights while it answers"
        self.events.append(f"push {version}")
        self.version = version

    def sleep(self, keep):
        raise AssertionError("the servers have their devices to themselves")


def log_probs_of(ids, version):
    return (-1.0 - (ids % 7) / 8 - version / 64).astype(np.float32)


class Run:
    """A loop of five steps, by default of two prompts, each answered twice."""

    def __init__(self, folder, mode="one_step_off", staleness=None, num_steps=NUM_STEPS, **other):
        self.rows: list[dict[str, float]] = []
        config = RLConfig(output_dir=str(folder))
        defaults = {"save_every": 0, "prompts_per_step": 2}
        defaults = {name: other.pop(name, value) for name, value in defaults.items()}
        config.trainer = TrainerConfig(
            mode=mode, staleness=staleness, num_steps=num_steps, **defaults
        )
        config.placement.rollout = "own"
        config.model.path = config.data.train_file = config.data.test_file = "given"
        config.algorithm = AlgorithmConfig(group_size=2, **other)
        validate_rl(config)
        self.config = config = resolve_for_device_type(config, "cpu")
        self.servers = Servers()
        self.actor = Policy(self.servers)
        pools = plan_run(config).pool_names
        devices = DeviceSharing(pools, {"actor": self.actor}, self.servers, self.servers)
        self.thread, self.stop = ThreadPoolExecutor(1), StopSignals()
        self.trainer = build_trainer(config, folder, devices, thread=self.thread, stop=self.stop)

    def train(self, report=None):
        def record(step, metrics):
            self.rows.append(
                {n: v for n, v in metrics.items() if not n.startswith(("time/", "driver/"))}
            )
            self.rows[-1].pop("tokens_per_s")
            (report or (lambda *_: None))(step, metrics)

        self.trainer.run(record)
        return self


def same(left: Run, right: Run) -> None:
    assert left.rows == right.rows
    for a, b in zip(left.actor.updates, right.actor.updates, strict=True):
        assert a.columns.keys() == b.columns.keys()
        for name, column in a.columns.items():
            expected = b.columns[name]
            pairs = (column, expected) if not isinstance(column, Jagged) else ()
            np.testing.assert_array_equal(*pairs or (column.values, expected.values), err_msg=name)


def test_the_next_samples_are_generated_while_these_are_trained_on(tmp_path):
    """Each update waits until they have been asked for, and their answer until its end."""
    run = Run(tmp_path)
    run.servers.waits = True
    assert run.train().servers.events == [
        "generate 0-1 of 0",
        "generate 2-3 of 0", "update 1", "push 1",
        "generate 4-5 of 1", "update 2", "push 2",
        "generate 6-7 of 2", "update 3", "push 3",
        "generate 8-9 of 3", "update 4", "push 4",
        "update 5", "push 5",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_servers_can_have_the_first_weights_again_in_any_mode(tmp_path, mode):
    run = Run(tmp_path, mode=mode)
    assert run.servers.resend == run.trainer.devices.resend_weights


@pytest.mark.parametrize(
    ("settings", "could"),
    [
        ({"mode": "sync"}, [True] * NUM_STEPS),
        ({"staleness": 0}, [True] * NUM_STEPS),
        # The trainer waits for the first.
        ({"staleness": 1}, [True] + [False] * (NUM_STEPS - 1)),
    ],
    ids=["sync", "no staleness", "beside the trainer"],
)  # fmt: skip
def test_servers_can_have_their_weights_again_unless_the_trainer_is_at_its_own(
    tmp_path, settings, could
):
    """While the next samples are generated, and in an evaluation, which comes before the report."""
    run, at_reports = Run(tmp_path, **settings), list[bool]()
    run.train(lambda *_: at_reports.append(run.servers.resend is not None))
    assert run.servers.could_resend == could
    assert at_reports == [True] * NUM_STEPS


def test_a_token_is_one_version_older_than_the_policy_and_no_token_is_older(tmp_path):
    run = Run(tmp_path).train()
    versions = [set(u.jagged("weight_versions").values.tolist()) for u in run.actor.updates]
    assert versions == [{0}, {0}, {1}, {2}, {3}]
    assert [row["samples/age"] for row in run.rows] == [0, 1, 1, 1, 1]


def test_gaps_are_checked_where_the_samples_are_of_the_policy_and_others_are_weighted(tmp_path):
    """An update lowers each log-prob by 1/64: that is the log of the importance weight."""
    run = Run(tmp_path).train()
    assert run.config.algorithm.correction.level == "token"
    assert [row.get("max_logprob_gap") for row in run.rows] == [0.0] + [None] * 4
    for index, update in enumerate(run.actor.updates):
        weights = update.jagged("correction_weights").values
        np.testing.assert_allclose(weights, np.exp(-1 / 64) if index else 1.0, rtol=1e-5)
    run = Run(tmp_path, correction=RLConfig().algorithm.correction, loss="decoupled_ppo")
    assert run.config.algorithm.correction.level == "off"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "filter": FilterConfig(
                group_filter="drop_uniform", max_rounds=4,
                replay=ReplayConfig(share=0.5, max_age=3, priority="uniform"),
            ),
            "loss": "decoupled_ppo",
        },
    ],
    ids=["plain", "rounds and replay"],
)  # fmt: skip
def test_staleness_0_is_the_synchronous_run(tmp_path, settings):
    actual = Run(tmp_path, staleness=0, **settings).train()
    expected = Run(tmp_path, mode="sync", **settings).train()
    assert actual.servers.events == expected.servers.events
    same(actual, expected)
    assert all(row["max_logprob_gap"] == 0 for row in actual.rows)


def test_a_run_that_goes_on_trains_on_the_samples_that_it_had(tmp_path):
    """With rounds and replay: prompts, buffer and samples are as they were."""
    replay = ReplayConfig(share=0.5, max_age=3, priority="uniform")
    samples = FilterConfig(group_filter="drop_uniform", max_rounds=4, replay=replay)
    uninterrupted = Run(tmp_path / "whole", filter=samples, save_every=1).train()
    begun = Run(tmp_path / "begun", filter=samples, save_every=1)

    def stop(step, metrics):
        begun.stop.requested = "SIGTERM" if step == 2 else ""

    with pytest.raises(RunStopped, match="SIGTERM: step 2 is saved"):
        begun.train(stop)
    assert begun.servers.events[-1] == "push 2"  # nothing is generated that nobody trains on
    again = Run(tmp_path / "again", filter=samples)
    again.trainer.checkpoints.restore(read_checkpoint(tmp_path / "begun/checkpoints/step_000002"))
    again.train()
    begun.rows += again.rows
    begun.actor.updates += again.actor.updates
    same(begun, uninterrupted)


def test_the_run_that_has_ended_generates_nothing_for_a_step_that_it_does_not_have(tmp_path):
    run = Run(tmp_path, save_every=NUM_STEPS).train()
    assert run.servers.num_requests == NUM_STEPS
    state = read_checkpoint(tmp_path / f"checkpoints/step_00000{NUM_STEPS}").state
    assert state["parts"]["ahead"] == {"step": 0, "metrics": {}, "samples": None}


def test_what_fails_in_the_background_is_raised_when_the_step_has_been_trained(tmp_path):
    run = Run(tmp_path)
    run.servers.waits, run.servers.fails_at = True, 3
    with pytest.raises(WorkerError, match=r"^rollout.generate: rank 0 raised$"):
        run.train()
    assert run.servers.events[-1] == "update 2" and len(run.rows) == 1


def test_a_trainer_that_fails_leaves_the_background_to_the_end_of_the_servers(tmp_path):
    """Its own error is the one that is raised; it waits for no samples."""
    run = Run(tmp_path)
    run.servers.waits = True

    def fails(batch, **_):
        run.servers.wait_for(lambda: run.servers.num_requests == 2)
        raise WorkerError("actor.update: rank 0 died")

    run.actor.update = fails
    run.servers.fails_at = 2
    with pytest.raises(WorkerError, match=r"actor.update: rank 0 died"):
        run.train()
    assert run.servers.is_answering
    run.servers.set_and_notify(num_updates=1)
    run.thread.shutdown()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"filter": FilterConfig(replay=ReplayConfig(share=0.5, max_age=3, priority="uniform"))},
        {"save_every": 1},
    ],
    ids=["plain", "replay", "checkpoints"],
)
@pytest.mark.parametrize("fails_at", [2, 3, NUM_STEPS])
def test_a_step_whose_last_server_has_died_is_generated_after_the_push(
    tmp_path, settings, fails_at
):
    """The trainer is at its next weights, and nobody has those that the step was begun with."""
    run = Run(tmp_path, **settings)
    collect = run.servers.collect

    def collect_or_die(*args, **options):
        if run.servers.num_requests == fails_at and not run.servers.abandoned:
            raise NoServersError("rollout: no server is left")
        return collect(*args, **options)

    run.servers.collect = collect_or_die
    run.train()
    assert run.servers.abandoned == ["train"]
    drawn = [event for event in run.servers.events if event.startswith("generate")]
    first = drawn[fails_at - 1].partition(" of ")[0]
    assert drawn[fails_at - 1 : fails_at + 1] == [
        f"{first} of {fails_at - 2}",
        f"{first} of {fails_at - 1}",  # the same prompts
    ]
    ages = [0 if step in (1, fails_at) else 1 for step in range(1, NUM_STEPS + 1)]
    assert [row["samples/age"] for row in run.rows] == ages
    groups = [np.unique(u.array("group_ids")).tolist() for u in run.actor.updates]
    if not settings:
        assert sorted(chain(*groups)) == list(range(2 * NUM_STEPS))


def test_servers_with_other_weights_than_they_were_given_stop_the_run(tmp_path):
    run = Run(tmp_path)
    run.servers.lies = True
    with pytest.raises(PolicyMismatchError, match=r"version \[-1\]; expected 0"):
        run.train()


def test_samples_of_another_step_are_neither_taken_nor_replaced(tmp_path):
    ahead = Run(tmp_path).trainer.prefetcher
    ahead.begin(2, version=0)
    with pytest.raises(RuntimeError, match="step 3 was asked for; begun was step 2"):
        ahead.take(3, version=2)
    with pytest.raises(RuntimeError, match="step 3 was begun before step 2 was taken"):
        ahead.begin(3, version=1)
    assert len(ahead.take(2, version=0)[0]) == 4


def test_an_empty_batch_is_a_state_too(tmp_path):
    """No group has passed the filter."""
    ahead = Run(tmp_path).trainer.prefetcher
    ahead.begin(1, version=0)
    batch, metrics = ahead._pending.result()
    state = {"step": 1, "metrics": metrics, "samples": batch.take([]).to_arrays()}
    ahead.load_state_dict(state)
    batch_taken, metrics_taken = ahead.take(1, version=0)
    assert (
        len(batch_taken) == 0
        and metrics_taken == metrics
        and batch_taken.columns.keys() == batch.columns.keys()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(mode="async"), "trainer.mode='async'; allowed: 'sync', 'one_step_off'"),
        (dict(mode="sync", staleness=1), r"trainer.staleness=1: .*allowed: 0, or trainer.mode="),
        (dict(staleness=2), r"trainer.staleness=2; allowed: .*0 .*1"),
        (
            dict(correction={"level": "off"}),
            r"trainer.staleness=1: old samples would count .* allowed: algorithm.correction.level=",
        ),
        (
            dict(filter=FilterConfig(replay=ReplayConfig(share=0.5, max_age=1))),
            r"algorithm.filter.replay.max_age=1; allowed: at least 2",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, message):
    if correction := settings.pop("correction", None):
        settings["correction"] = type(RLConfig().algorithm.correction)(**correction)
    with pytest.raises(ConfigError, match=message):
        Run(tmp_path, **settings)


@pytest.mark.parametrize(("rollout", "mates"), [("shared", "actor, critic, .*"), ("a", "teacher")])
def test_servers_on_devices_of_other_roles_are_refused(rollout, mates):
    config = RLConfig()
    config.model.path = config.data.train_file = config.data.test_file = "given"
    config.trainer.mode, config.placement.rollout = "one_step_off", rollout
    config.placement.teacher = "a"
    message = f"placement.rollout='{rollout}' has the servers on the pool of {mates}; .*; allowed:"
    with pytest.raises(ConfigError, match=message):
        validate_rl(config)
    config.placement.rollout = "auto"
    validate_rl(config)
    assert resolve_for_device_type(config, "cpu").placement.rollout == "own"
