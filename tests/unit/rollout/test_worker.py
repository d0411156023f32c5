"""The worker of a server that has not been started, and its running groups."""

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
from mcore_rl.controller.pending_call import PendingCall, Timeout, wait_for_survivors
from mcore_rl.controller.worker_process import FailureKind, WorkerProcess
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.examples.tasks import last_digit
from mcore_rl.inference.lifecycle import Call
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.parallel.rendezvous import RendezvousServer, end_waits
from mcore_rl.rollout.worker import RolloutSpec, RolloutWorker, RunningGroups
from tests.fakes import FakeServer
from tests.unit.agents.test_loops import MESSAGES, TOKENIZER, TOOLS, Scripted, call, is_42
from tests.unit.controller.test_pending_call import Group, Sent, failure

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


def test_a_worker_raises_when_its_server_does_not_answer_in_time(spec: RolloutSpec):
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
def test_a_worker_ends_turns_at_eos_tokens_of_the_generation_config(
    spec: RolloutSpec, more, tmp_path
):
    shutil.copytree(spec.model_path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    eos_id = json.loads(file.read_text())["eos_token_id"]
    file.write_text(json.dumps({"eos_token_id": [eos_id, *more]}))
    agent = AgentConfig(loop="environment", environment="guessing")
    worker = RolloutWorker(replace(spec, model_path=str(tmp_path), agent=agent))
    assert isinstance(worker._agent, AgentRunner)
    assert worker._agent.codec.stop_ids == {eos_id, *more}


class Server(Scripted, FakeServer):
    """A server that answers, and takes new weights unless it has a failure to raise."""

    def __init__(self, *says: str) -> None:
        Scripted.__init__(self, says)
        FakeServer.__init__(self)
        self.has_answered, self.may_return = asyncio.Event(), asyncio.Event()
        self.failure: Exception | None = None

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        async with self._request_gate.run_request():
            completions = await super().submit(prompt_ids, sampling)
        self.has_answered.set()
        await self.may_return.wait()  # as if the loop worked between two turns
        return completions

    async def let_return(self) -> None:
        self.may_return.set()

    async def update(self, version: int, *, in_flight: bool, recompute_cache: bool) -> None:
        if isinstance(self.failure, ConfigError):
            raise self.failure
        async with self._request_gate.run_beside_requests(Call.UPDATE):
            if self.failure is not None:
                raise self.failure


def start_trajectory(spec: RolloutSpec, server: Server) -> tuple[RolloutWorker, AgentRunner]:
    """Return a worker with a trajectory of two turns, after the first one."""
    worker = RolloutWorker(spec)
    runner = AgentRunner(server, TOKENIZER, is_42, TOOLS, 4096, stops_on_error=True)
    worker._server, worker._agent = server, runner
    prompts = Batch(
        {
            "prompt_ids": Jagged.pack([[]], np.int64),
            "group_ids": np.array([3]),
            "fields": Jagged.pack_texts(["{}"]),
            "rows": np.array([7]),
            "messages": Jagged.pack_texts([json.dumps(MESSAGES)]),
        }
    )
    worker.begin(prompts, SamplingParams(n=1, max_tokens=1000), "train")
    worker._wait(server.has_answered.wait())
    return worker, runner


def get_deadlines(runner: AgentRunner) -> list[float | None]:
    """Return the deadline of each trajectory; None while its time stands still."""
    return [trajectory.timeout.when() for trajectory in runner._running.values()]


def test_a_turn_after_a_push_that_failed_waits_until_the_push_is_repeated(spec):
    # Another server has died in the push: this one, and its trajectories, go on without it.
    server = Server(call("6 * 7"), "42")
    worker, runner = start_trajectory(spec, server)
    server.failure = PeerError("a server has died")
    for _ in range(2):
        with pytest.raises(PeerError, match="a server has died"):
            worker.receive_weights(1, in_flight=True)
        worker._wait(server.let_return())
        assert len(worker.collect("train", 0.1)) == 0
        assert len(server.prompts) == 1 and get_deadlines(runner) == [None]
    server.failure = None
    worker.receive_weights(1, in_flight=True)
    batch = worker.collect("train", LONG_S / 2)
    assert batch is not None and batch.array("rewards").tolist() == [1.0]
    assert runner.gate.is_open


@pytest.mark.parametrize(
    ("arguments", "expected"), [((), (False, False)), ((True, True), (True, True))]
)
def test_updates_pass_on_in_flight_and_recompute_cache(spec, monkeypatch, arguments, expected):
    worker, calls = RolloutWorker(spec), list[tuple[object, ...]]()

    async def update(*args: object, in_flight: bool, recompute_cache: bool) -> None:
        calls.append((*args, in_flight, recompute_cache))

    for method in ("update", "load_checkpoint"):
        monkeypatch.setattr(worker._server, method, update)
    worker.receive_weights(3, *arguments)
    worker.load_checkpoint("/weights", 4, *arguments)
    assert calls == [(3, *expected), ("/weights", 4, *expected)]


def test_time_of_trajectories_goes_on_after_an_update_that_was_refused(spec):
    server = Server(call("6 * 7"), "42")
    worker, runner = start_trajectory(spec, server)
    server.failure = ConfigError("a tensor is missing")
    with pytest.raises(ConfigError):
        worker.receive_weights(1, in_flight=True)
    assert runner.gate.is_open and None not in get_deadlines(runner)
    worker._wait(server.let_return())
    assert len(worker.collect("train", LONG_S / 2)) == 1


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[RendezvousServer]:
    """The rendezvous of rank 0 of a server over two nodes, in the environment of rank 1."""
    with RendezvousServer("127.0.0.1") as server:
        for name, value in (server.endpoint.to_environment() | {"RANK": "1"}).items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "late"])
@pytest.mark.parametrize(
    ("method", "args"), [("receive_weights", [1]), ("sleep", []), ("wake", ["weights"])]
)
def test_a_server_whose_first_node_dies_in_a_call_dies_alone(
    spec, rendezvous: RendezvousServer, is_dead: bool, method: str, args: list[object]
):
    # Its other nodes blame the first, whether it has died or is late.
    over_two = replace(spec, rollout=RolloutConfig(tp=2, nodes_per_server=2))
    host, group = WorkerProcess("rollout-0", 1), Group("rollout-0")
    host._worker = RolloutWorker(over_two)
    if is_dead:
        rendezvous.close()
    else:
        end_waits(rendezvous.endpoint, "rank 0 is gone", LONG_S)
    answer = host.call((method, True, args, {}))
    assert answer.failure is not None and answer.failure.kind is FailureKind.BLAMED
    assert "the first node of server 0: rank 1" in answer.failure.message
    first, further = Sent(), Sent()
    further.answer.set_result(answer)
    first.answer.set_result(failure(FailureKind.DIED, "killed"))
    limit = Timeout(LONG_S, "timeouts.call_s")
    called = PendingCall(group, method, {further: 1, first: 0}, dict, limit)
    assert "rank 0 died. killed" in str(wait_for_survivors([called], [group])[0])


def make_sample(group_id: int) -> Sample:
    return Sample([1], [2], [1], [-0.5], [0], "stop", group_id)


class EndedGroups:
    """Groups of two samples each, which end by `end`."""

    def __init__(self, *group_ids: int) -> None:
        self.groups = RunningGroups()
        self.ends = {i: asyncio.get_running_loop().create_future() for i in group_ids}
        self.end_reason: list[int] = []
        self.groups.begin({i: asyncio.create_task(self._run(i)) for i in group_ids})

    async def _run(self, group_id: int) -> list[Sample]:
        try:
            await self.ends[group_id]
        finally:
            await asyncio.sleep(0)
            self.end_reason.append(group_id)
        return [make_sample(group_id)] * 2

    def end(self, *group_ids: int) -> None:
        for group_id in group_ids:
            self.ends[group_id].set_result(None)

    async def collect(self, wait_s: float = 0.0) -> list[int]:
        return [sample.group_id for sample in await self.groups.collect(wait_s)]


def test_groups_are_collected_once_and_in_the_order_of_their_ids():
    async def work() -> None:
        started = EndedGroups(5, 3, 4)
        assert await started.collect() == []
        started.end(5, 3)
        assert await started.collect(10.0) == [3, 3, 5, 5]
        assert started.groups.ids == {4}
        assert await started.collect() == []
        started.end(4)
        assert await started.collect(10.0) == [4, 4]

    asyncio.run(work())


def test_collect_waits_for_a_group_that_begins_later_up_to_its_limit():
    async def work() -> None:
        started = EndedGroups()
        assert await started.collect(0.01) == []
        collecting = asyncio.create_task(started.groups.collect(10.0))
        await asyncio.sleep(0)

        async def end_at_once() -> list[Sample]:
            return [make_sample(1)]

        started.groups.begin({1: asyncio.create_task(end_at_once())})
        assert await collecting == [make_sample(1)]

    asyncio.run(work())


def test_the_failure_of_a_group_is_raised_once_and_others_stay():
    async def work() -> None:
        started = EndedGroups(1, 2, 3)
        started.ends[2].set_exception(OSError("no reward"))
        started.end(1)
        await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="no reward"):
            await started.collect()
        assert await started.collect() == [1, 1]
        started.end(3)
        assert await started.collect(10.0) == [3, 3]

    asyncio.run(work())


def test_collect_waits_for_all_groups_unless_one_has_failed():
    async def work() -> None:
        started = EndedGroups(1, 2, 3)
        started.end(1)
        collecting = asyncio.create_task(started.groups.collect(600.0, at_least=9))
        for group_id in (2, 3):
            await asyncio.sleep(0.01)
            assert not collecting.done()
            started.end(group_id)
        async with asyncio.timeout(10):  # none is left that could be the fourth
            assert [sample.group_id for sample in await collecting] == [1, 1, 2, 2, 3, 3]
        started = EndedGroups(4, 5)
        started.end(4)
        await asyncio.sleep(0.01)
        samples = await started.groups.collect(0.05, at_least=9)  # its time is over
        assert [sample.group_id for sample in samples] == [4, 4]
        started = EndedGroups(6, 7)
        started.ends[6].set_exception(OSError("no reward"))
        with pytest.raises(OSError, match="no reward"):
            await started.groups.collect(10.0, at_least=9)

    asyncio.run(work())


def test_an_abandoned_group_has_ended_and_is_not_collected():
    async def work() -> None:
        started = EndedGroups(1, 2, 3)
        started.end(1)
        await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            await started.groups.abandon([1, 2, 7])
        assert started.end_reason == [1, 2]
        started.end(3)
        assert await started.collect(10.0) == [3, 3]
        assert await started.collect() == []

    asyncio.run(work())


def test_a_group_without_samples_is_collected_as_a_failed_sample():
    async def run_empty() -> list[Sample]:
        return []

    async def work() -> list[Sample]:
        groups = RunningGroups()
        groups.begin({7: asyncio.create_task(run_empty())})
        return await groups.collect(10.0)

    [sample] = asyncio.run(work())
    assert (sample.group_id, sample.response_ids, sample.status) == (7, [], "failed")
    assert sample.reward_error == "no trajectory of the group has had a turn"
    assert len(Batch.collate([sample])) == 1
