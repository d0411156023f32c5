"""Servers while the trainer computes, and groups whose server has died, in fully asynchronous runs.

The servers and their time are modelled, and looked after in a real thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import chain

import pytest

from mcore_rl.config.schema import CorrectionConfig, FilterConfig, ReplayConfig
from mcore_rl.data.batch import Batch
from mcore_rl.rewards.base import RewardError
from tests.unit.trainers.modelled_servers import Servers
from tests.unit.trainers.test_fully_async import NUM_STEPS, PER_STEP, Policy, Run


class Going(Servers):
    """A group ends whenever they are tended."""

    def tend(self, stream: str) -> list[Batch]:
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


def run_of(folder, servers: Servers, until: Callable[[], bool] = lambda: True, **settings) -> Run:
    run = Run(folder, **settings)
    run.actor = run.loop.turns.models["actor"] = Waits(servers, until)
    for owner, name in ((run.loop.turns, "servers"), (run.loop.turns, "weight_sync"),
                        (run.loop.rollout, "servers")):  # fmt: skip
        object.__setattr__(owner, name, servers)
    run.servers = servers
    return run


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.trainers.async_rollout.POLL_S", 0.005)


def test_while_the_trainer_computes_groups_are_begun_as_others_end(tmp_path):
    servers = Going(train_s=0.0)

    def begun() -> int:
        return sum(event.startswith("begin") for event in servers.events)

    settings = {"asynchronous": {"max_groups": 1}}
    run = run_of(tmp_path, servers, lambda: begun() == 3 * PER_STEP, **settings).train()
    first_push = servers.events.index("push 1")
    assert servers.events[:first_push] == [f"begin {n}-{n} of 0" for n in range(3 * PER_STEP)]
    assert servers.most_running == 1
    assert sorted(chain(*run.trained)) == list(range(NUM_STEPS * PER_STEP))


@pytest.mark.parametrize(("max_groups", "least"), [(0, {4, 3, 2, 1}), (2, {1})])
def test_servers_bunch_what_a_step_lacks_unless_each_group_makes_room(tmp_path, max_groups, least):
    class Asked(Servers):
        def __init__(self) -> None:
            super().__init__(train_s=0.0)
            self.least: set[int] = set()

        def collect(self, stream: str, wait_s: float, at_least: int = 1) -> list[Batch]:
            self.least.add(at_least)
            return super().collect(stream, wait_s, at_least)

    servers = Asked()
    run_of(tmp_path, servers, staleness=1, asynchronous={"max_groups": max_groups}).train()
    assert servers.least == least


def test_what_goes_wrong_meanwhile_is_raised_when_the_trainer_has_computed(tmp_path):
    failed = threading.Event()

    class Failing(Servers):
        def tend(self, stream: str) -> list[Batch]:
            failed.set()
            raise RewardError("no reward")

    with pytest.raises(RewardError, match="no reward"):
        run_of(tmp_path, Failing(train_s=0.0), failed.is_set).train()


IN_ROUNDS = {
    "staleness": 0,
    "filter": FilterConfig(replay=ReplayConfig(share=0.5, max_age=2)),
    "correction": CorrectionConfig(level="token"),
}


@pytest.mark.parametrize(
    "settings",
    [{"rollout": "shared"}, IN_ROUNDS, {"num_steps": 1, "asynchronous": {"oversampling": 0.5}}],
    ids=["asleep", "rounds", "the last step"],
)
def test_servers_that_sleep_or_generate_in_rounds_or_for_no_later_step_are_let_be(
    tmp_path, settings
):
    class Unasked(Servers):
        takes_turns = "rollout" in settings

        def tend(self, stream: str) -> list[Batch]:
            raise AssertionError("asked")

    servers = Unasked(train_s=0.0)
    pause = time.monotonic() + 0.1
    run = run_of(tmp_path, servers, lambda: time.monotonic() > pause, **settings).train()
    assert len(run.trained) == settings.get("num_steps", NUM_STEPS)
    assert servers.running == {}


def test_what_is_too_old_begins_again_after_the_push_and_not_by_the_weights_of_before(tmp_path):
    servers = Going(train_s=0.0)
    servers.tend = lambda stream: []  # type: ignore[method-assign]
    asked = {"staleness": 1, "num_steps": 20, "asynchronous": {"oversampling": 1.0}}
    run = run_of(tmp_path, servers, **asked)
    run.actor.pause_s = 0.03
    events = run.train().servers.events
    ended = [number for number, event in enumerate(events) if event.startswith("abandon")]
    assert len(ended) > 1
    assert all(events[number + 1].startswith("push") for number in ended)


def test_a_group_that_another_server_has_begun_is_as_new_as_its_weights(tmp_path):
    """It was begun of version 0 and again of version 2: so a later step may train it."""

    class Dying(Servers):
        died: int | None = None

        def rerouted(self, stream: str) -> list[int]:
            is_pushing = self.events[-1].startswith("push")
            if self.died is not None or self.version < 2 or is_pushing or not self.running:
                return []
            self.died = min(self.running)
            self.running[self.died] = (self.now, self.running[self.died][1])
            return [self.died]

    servers = Dying(train_s=8.0)
    run = run_of(tmp_path, servers)
    begun = {}

    def kept(step, metrics):
        queue = run.loop.ahead.queue
        begun.update({group: queue._groups[group].begun_version for group in queue._groups})

    run.train(kept)
    assert servers.died is not None and begun[servers.died] == 2
    assert run.rows[-1]["queue/lost_total"] == 1
    assert sorted(chain(*run.trained)) == list(range(NUM_STEPS * PER_STEP))


def test_a_group_that_was_begun_again_before_a_push_is_told_before_it(tmp_path):
    """The trainer's call that begins others begins it, after all answers of that step."""

    class DyingLate(Servers):
        died: int | None = None

        def tell(self) -> None:
            """When the trainer computes."""
            if self.died is None and self.running:
                self.died = min(self.running)
                self.running[self.died] = (self.now, self.running[self.died][1])
                self.told = [self.died]

        told: list[int] = []  # noqa: RUF012

        def rerouted(self, stream: str) -> list[int]:
            if threading.current_thread() is not threading.main_thread():
                return []
            told, self.told = self.told, []
            return told

    servers = DyingLate(train_s=8.0)
    run = run_of(tmp_path, servers, lambda: servers.tell() is None)
    run.train()
    assert servers.died is not None
    assert sorted(chain(*run.trained)) == list(range(NUM_STEPS * PER_STEP))
