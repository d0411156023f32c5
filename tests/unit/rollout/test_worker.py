"""A server's worker, without a server that has started."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.config.schema import AgentConfig, RewardConfig, RolloutConfig
from mcore_rl.controller.pending import Limit, PendingCall, outlived
from mcore_rl.controller.rank_actor import FailureKind, RankActor
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.tasks import last_digit
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.inference.vllm.lifecycle import Call, Lifecycle, State
from mcore_rl.inference.vllm.traffic import Traffic
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.parallel.rendezvous_client import end_waits
from mcore_rl.rollout.worker import RolloutSpec, RolloutWorker
from tests.unit.agents.test_loops import MESSAGES, TOKENIZER, TOOLS, Scripted, call, is_42
from tests.unit.controller.test_pending import Group, Sent, failure

LONG_S = 60.0


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RolloutSpec:
    task = last_digit.prepare(tmp_path_factory.mktemp("task"), 0, 0.35)
    return RolloutSpec(
        model_path=str(task.model_dir),
        chat_date="2024-07-26",
        dtype="float32",
        max_model_tokens=64,
        rollout=RolloutConfig(),
        reward=RewardConfig(),
        agent=AgentConfig(),
        seed=0,
        timeout_s=LONG_S,
    )


def test_a_worker_does_not_wait_for_its_server_for_ever(spec: RolloutSpec):
    worker, cancelled = RolloutWorker(replace(spec, timeout_s=1.0)), []

    async def hang() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def answer() -> int:
        return 7

    with pytest.raises(TimeoutError, match=r"the server has not answered in 1 s"):
        worker._wait(hang())
    assert worker._wait(answer()) == 7
    deadline = time.monotonic() + 10
    while not cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("more", [[5], [5, 6], []])
def test_a_worker_ends_turns_where_the_generation_config_says(spec: RolloutSpec, more, tmp_path):
    shutil.copytree(spec.model_path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    own = json.loads(file.read_text())["eos_token_id"]
    file.write_text(json.dumps({"eos_token_id": [own, *more]}))
    agent = AgentConfig(loop="environment", environment="guessing")
    worker = RolloutWorker(replace(spec, model_path=str(tmp_path), agent=agent))
    assert isinstance(worker._agent, AgentRunner)
    assert worker._agent.codec.stop_ids == {own, *more}


class Server(Scripted):
    """Serves, and takes a version of the weights unless it has a failure to raise."""

    is_dead, death_reason = False, ""

    def __init__(self, *says: str) -> None:
        super().__init__(says)
        lifecycle = Lifecycle()
        lifecycle.state = State.SERVING
        self.traffic = Traffic(lifecycle)
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        self.fails: Exception | None = None

    @property
    def awaits_update(self) -> bool:
        return self.traffic.awaits_update

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        async with self.traffic.request():
            found = await super().submit(prompt_ids, sampling)
        self.asked.set()
        await self.answers.wait()  # what the loop does between two turns takes so long
        return found

    async def go_on(self) -> None:
        self.answers.set()

    async def update(self, version: int, *, in_flight: bool, recompute_cache: bool) -> None:
        if isinstance(self.fails, ConfigError):
            raise self.fails
        async with self.traffic.beside(Call.UPDATE):
            if self.fails is not None:
                raise self.fails


def talking(spec: RolloutSpec, server: Server) -> tuple[RolloutWorker, AgentRunner]:
    """A worker with a trajectory of two turns that is after its first."""
    worker = RolloutWorker(spec)
    runner = AgentRunner(server, TOKENIZER, is_42, TOOLS, 4096, stops_on_error=True)
    worker._server, worker._agent = server, runner
    prompts = Batch(
        {
            "prompt_ids": Jagged.of([[]], np.int64),
            "group_ids": np.array([3]),
            "fields": Jagged.of_texts(["{}"]),
            "rows": np.array([7]),
            "messages": Jagged.of_texts([json.dumps(MESSAGES)]),
        }
    )
    worker.begin(prompts, SamplingParams(n=1, max_tokens=1000), "train")
    worker._wait(server.asked.wait())
    return worker, runner


def ends(runner: AgentRunner) -> list[float | None]:
    """When the time of each trajectory is over; None while it stands still."""
    return [one.limit.timeout.when() for one in runner._open.values()]


def test_a_turn_that_begins_after_a_push_that_failed_waits_until_it_has_been_done_again(spec):
    """Another server has died of the push: this one, and its trajectories, go on without it."""
    server = Server(call("6 * 7"), "42")
    worker, runner = talking(spec, server)
    server.fails = PeerError("a server has died")
    for _ in range(2):
        with pytest.raises(PeerError, match="a server has died"):
            worker.receive_weights(1, in_flight=True)
        worker._wait(server.go_on())
        assert len(worker.collect("train", 0.1)) == 0
        assert len(server.prompts) == 1 and ends(runner) == [None]
    server.fails = None
    worker.receive_weights(1, in_flight=True)
    batch = worker.collect("train", LONG_S / 2)
    assert batch is not None and batch.array("rewards").tolist() == [1.0]
    assert runner.gate.is_open


@pytest.mark.parametrize(("given", "how"), [((), (False, False)), ((True, True), (True, True))])
def test_a_server_is_told_whether_requests_go_on_and_whether_their_cache_is_made_anew(
    spec, monkeypatch, given, how
):
    worker, told = RolloutWorker(spec), list[tuple[object, ...]]()

    async def update(*what: object, in_flight: bool, recompute_cache: bool) -> None:
        told.append((*what, in_flight, recompute_cache))

    for method in ("update", "load_checkpoint"):
        monkeypatch.setattr(worker._server, method, update)
    worker.receive_weights(3, *given)
    worker.load_checkpoint("/weights", 4, *given)
    assert told == [(3, *how), ("/weights", 4, *how)]


def test_after_an_update_that_was_refused_before_anything_changed_time_goes_on(spec):
    server = Server(call("6 * 7"), "42")
    worker, runner = talking(spec, server)
    server.fails = ConfigError("a tensor is missing")
    with pytest.raises(ConfigError):
        worker.receive_weights(1, in_flight=True)
    assert runner.gate.is_open and None not in ends(runner)
    worker._wait(server.go_on())
    assert len(worker.collect("train", LONG_S / 2)) == 1


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[RendezvousServer]:
    """That of rank 0 of a server over two nodes, in the environment of rank 1."""
    with RendezvousServer("127.0.0.1") as server:
        for name, value in (server.endpoint.environment() | {"RANK": "1"}).items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "late"])
@pytest.mark.parametrize(
    ("method", "args"), [("receive_weights", [1]), ("sleep", []), ("wake", ["weights"])]
)
def test_a_server_whose_first_node_dies_in_a_call_dies_alone(
    spec, rendezvous: RendezvousServer, is_dead: bool, method: str, args: list[object]
):
    """Its other nodes blame that one, whether it has gone or does not tell that the call ended."""
    over_two = replace(spec, rollout=RolloutConfig(tp=2, nodes_per_server=2))
    host, group = RankActor("rollout-0", 1), Group("rollout-0")
    host._worker = RolloutWorker(over_two)
    if is_dead:
        rendezvous.close()
    else:
        end_waits(rendezvous.endpoint, "rank 0 is gone", LONG_S)
    answer = host.call((method, True, args, {}, ()))
    assert answer.failure is not None and answer.failure.kind is FailureKind.BLAMED
    assert "the first node of server 0: rank 1" in answer.failure.message
    first, further = Sent(), Sent()
    further.answer.set_result(answer)
    first.answer.set_result(failure(FailureKind.DIED, "killed"))
    limit = Limit(LONG_S, "timeouts.call_s")
    called = PendingCall(group, method, {further: 1, first: 0}, dict, limit)
    assert "rank 0 died. killed" in str(outlived([called], [group])[0])
