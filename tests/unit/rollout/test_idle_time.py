"""Idle seconds of servers, on a simulated clock, against figures worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.agents import single_turn
from mcore_rl.config.schema import RolloutConfig, TimeoutsConfig
from mcore_rl.controller.dispatch import RemoteMethod
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rollout import worker as rollout_worker
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.rollout.server_pool import ServerPool
from mcore_rl.rollout.worker import EventLoopThread, IdleTimer, RolloutWorker, RunningGroups
from tests.fakes import FakeServer

SAMPLING = SamplingParams(n=1, max_tokens=8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(time_s=0.0)
    monkeypatch.setattr(rollout_worker, "time", SimpleNamespace(monotonic=lambda: clock.time_s))
    return clock


class Engine(FakeServer):
    """A server: 3 s to start, 4 for new weights (version 13 fails), 1 to sleep and to wake."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.clock = clock

    async def start(self, *, reads_weights: bool) -> None:
        self.clock.time_s += 3

    async def update(self, version: int, **how: Any) -> None:
        self.clock.time_s += 4
        if version == 13:
            raise RuntimeError("a peer is gone")

    async def load_checkpoint(self, path: str, version: int, **how: Any) -> None:
        await self.update(version)

    async def sleep(self, keep: bool) -> None:
        self.clock.time_s += 1

    async def wake(self, tag: str) -> None:
        self.clock.time_s += 1


class Agent(single_turn.SingleTurnLoop):
    """An agent loop that starts groups by a function."""

    def __init__(self, start: Callable[..., list[single_turn.Group]]) -> None:
        self._start_groups = start

    def start(
        self, prompts: Sequence[single_turn.Prompt], sampling: SamplingParams
    ) -> list[single_turn.Group]:
        return self._start_groups(prompts, sampling)


class Worker(RolloutWorker):
    """A worker with that server. A group ends when its event is set."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self._spec: Any = SimpleNamespace(experts=None, timeout_s=60.0)
        self._server: Any = Engine(clock)
        self._agent = Agent(self._start_groups)
        self.ends: dict[int, asyncio.Event] = {}
        self._idle, self._wait = IdleTimer(), EventLoopThread(60.0).run
        self._idle.begin("start")
        streams = {name: RunningGroups(self._idle) for name in ("train", "evaluation")}
        self._streams = streams  # type: ignore[assignment]

    def start_groups(self, *groups: int, stream: Any = "train") -> None:
        ids = Jagged.pack([[1] for _ in groups], np.int64)
        texts = Jagged.pack_texts(["{}"] * len(groups))
        columns = {"prompt_ids": ids, "group_ids": np.array(groups), "fields": texts}
        columns |= {"rows": np.array(groups), "messages": Jagged.pack_texts(["null"] * len(groups))}
        self.begin(Batch(columns), SAMPLING, stream)

    def _start_groups(self, prompts: Any, _: SamplingParams) -> list[asyncio.Task[list[Sample]]]:
        return [asyncio.create_task(self._run(prompt.group_id)) for prompt in prompts]

    async def _run(self, group: int) -> list[Sample]:
        self.ends[group] = asyncio.Event()
        await self.ends[group].wait()
        return [Sample([1], [2], [1], [0.0], [0], "stop", group)]

    def end(self, group: int, stream: Any = "train") -> None:
        async def set_event() -> None:
            self.ends[group].set()

        self._wait(set_event())
        assert self.collect(stream, 30.0).array("group_ids").tolist() == [group]  # type: ignore[union-attr]


def test_activities_at_the_same_time_count_once(clock):
    # Idle until 1 s, from 4 to 6 s, and from 9 s on.
    idle = IdleTimer()
    for time_s, call, activity in (
        (1, idle.begin, "first"),
        (2, idle.begin, "second"),
        (2.5, idle.begin, "second"),
        (3, idle.end, "first"),
        (3.5, idle.end, "not running"),
        (4, idle.end, "second"),
        (5, idle.end, "not running"),
        (6, idle.begin, "first"),
        (9, idle.end, "first"),
    ):
        clock.time_s = float(time_s)
        call(activity)
    clock.time_s = 9.5
    assert idle.seconds == 1 + 2 + 0.5


def test_a_server_does_not_idle_while_it_generates_or_takes_weights(clock):
    worker = Worker(clock)
    assert worker.idle_s() == 0
    worker.start()  # to 3 s
    clock.time_s = 5.0
    worker.start_groups(1)
    assert worker.idle_s() == 2
    clock.time_s = 9.0
    worker.receive_weights(1, in_flight=True)  # to 13 s, in the middle of group 1
    clock.time_s = 15.0
    worker.end(1)
    clock.time_s = 17.0
    assert worker.idle_s() == 2 + 2
    worker.receive_weights(2)  # to 21 s
    worker.load_checkpoint("there", 3)  # to 25 s
    assert worker.idle_s() == 4
    clock.time_s = 28.0
    worker.start_groups(2, stream="evaluation")
    clock.time_s = 33.0
    worker.end(2, stream="evaluation")
    assert worker.idle_s() == 4 + 3
    clock.time_s = 34.0
    with pytest.raises(RuntimeError, match="a peer is gone"):
        worker.receive_weights(13)  # to 38 s
    clock.time_s = 40.0
    assert worker.idle_s() == 7 + 1 + 2


@pytest.mark.parametrize("keeps", [True, False], ids=["kept requests", "nothing"])
def test_a_server_that_sleeps_does_not_idle(clock, keeps):
    # Asleep from 10 s on, weights at 40, awake at 46; 4 s idle after that.
    worker = Worker(clock)
    worker.start()
    worker.start_groups(1)
    clock.time_s = 10.0
    if not keeps:
        worker.end(1)
    worker.sleep(keep=keeps)
    clock.time_s = 40.0
    worker.wake("weights")
    worker.receive_weights(1, in_flight=keeps)
    assert worker.idle_s() == 0
    worker.wake("kv_cache")
    if keeps:
        clock.time_s = 60.0
        worker.end(1)
    clock.time_s += 4
    assert worker.idle_s() == 4


class Group:
    """The worker group of a server, with one worker in this process."""

    end_reason, build_calls, worker_infos = "", (), dict[int, Any]()

    def __init__(self, number: int, clock: SimpleNamespace) -> None:
        self.name, self.worker, self.dies = f"rollout-{number}", Worker(clock), False

    def submit(self, *_: Any) -> Any:
        raise WorkerError("is not there")

    def close(self) -> None: ...


class Pool(ServerPool):
    def _launch(self, server: Any) -> None: ...

    def _call_servers(
        self, servers: Any, method: RemoteMethod[..., Any], *args: Any, **_: Any
    ) -> list[Any]:
        results = []
        for server in servers:
            if server.group.dies:
                self._restart(server, WorkerError("a server has died"))
            else:
                results.append(getattr(server.group.worker, method.name)(*args))
        return results


@pytest.fixture
def pool(clock) -> RolloutPool:
    """A pool of three servers, started at 3, 6 and 9 s, whose idle time was read at 9 s."""
    servers = Pool(
        lambda number: Group(number, clock),  # type: ignore[arg-type, return-value]
        3, max_restarts=1, takes_turns=False, timeouts=TimeoutsConfig(),
    )  # fmt: skip
    for worker in list_workers(servers):
        worker.start()
    servers.mark_started()
    pool = RolloutPool(servers, RolloutConfig(), seed=0)
    assert pool.idle_s() == (6 + 3 + 0) / 3
    return pool


def list_workers(servers: Any) -> list[Worker]:
    return [group.worker for group in servers.groups]


def test_idle_time_is_the_mean_over_servers(pool, clock):
    # In 20 s the first generates all the time, the second for 6 s, the third never. The first two
    # take weights for 4 s each, one after the other on this clock. If these 8 s of a push were
    # subtracted from the rest of the 20 s, they would count twice for the first.
    first, second, _ = list_workers(pool.servers)
    first.start_groups(1)
    second.start_groups(2)
    clock.time_s += 6
    second.end(2)
    clock.time_s += 6
    first.receive_weights(1, in_flight=True)
    second.receive_weights(1, in_flight=True)
    assert pool.idle_s() == pytest.approx((0 + (6 + 4) + 20) / 3)
    clock.time_s += 3
    assert pool.idle_s() == pytest.approx((0 + 3 + 3) / 3)


def test_a_server_that_is_removed_does_not_change_the_idle_time_of_others(pool, clock):
    clock.time_s += 100
    assert pool.idle_s() == 100
    pool.servers.remove(0)
    clock.time_s += 5
    assert pool.idle_s() == 5
    pool.servers.add(0)
    clock.time_s += 5
    assert pool.idle_s() == 5  # it is not up


def test_a_server_that_has_died_counts_from_its_next_start(pool, clock):
    clock.time_s += 10
    pool.servers.groups[1].dies = True
    assert pool.idle_s() == 10  # of the two others
    clock.time_s += 50
    worker = pool.servers.groups[1].worker
    worker.start()
    pool.servers._mark_up([pool.servers._servers[1]])
    clock.time_s += 7
    assert pool.idle_s() == pytest.approx((60 + 7 + 60) / 3)


def test_idle_time_is_0_without_servers(pool):
    for group in pool.servers.groups:
        group.dies = True
    assert pool.idle_s() == pool.idle_s() == 0
