"""How long servers have had nothing to do, on a clock of its own, against figures by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import RolloutConfig, TimeoutsConfig
from mcore_rl.controller.pending import WorkerError
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.rollout.protocol import SamplingParams
from mcore_rl.workers import idle_time
from mcore_rl.workers.idle_time import IdleTime
from mcore_rl.workers.loop_thread import LoopThread
from mcore_rl.workers.rollout_pool import RolloutPool
from mcore_rl.workers.rollout_worker import RolloutWorker
from mcore_rl.workers.running_groups import RunningGroups
from mcore_rl.workers.server_pool import ServerPool

SAMPLING = SamplingParams(n=1, max_tokens=8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(idle_time, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


class Engine:
    """Takes 3 s to start, 4 for new weights; version 13 it does not get. Sleep and wake take 1."""

    is_dead = awaits_update = False
    death_reason = ""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock

    async def start(self, *, reads_weights: bool) -> None:
        self.clock.now += 3

    async def update(self, version: int, **how: Any) -> None:
        self.clock.now += 4
        if version == 13:
            raise RuntimeError("a peer is gone")

    async def load_checkpoint(self, path: str, version: int, **how: Any) -> None:
        await self.update(version)

    async def sleep(self, keep: bool) -> None:
        self.clock.now += 1

    async def wake(self, tag: str) -> None:
        self.clock.now += 1


class Worker(RolloutWorker):
    """Has that engine. A group ends when its event is set."""

    _nodes = _headless = None

    def __init__(self, clock: SimpleNamespace) -> None:
        self._spec: Any = SimpleNamespace(experts=None, timeout_s=60.0)
        self._server: Any = Engine(clock)
        self._agent: Any = self
        self.ends: dict[int, asyncio.Event] = {}
        self._idle, self._wait = IdleTime(), LoopThread(60.0).wait
        self._idle.begin("start")
        own = {name: RunningGroups(self._idle) for name in ("train", "evaluation")}
        self._streams = own  # type: ignore[assignment]

    def start_groups(self, *groups: int, stream: Any = "train") -> None:
        ids = Jagged.of([[1] for _ in groups], np.int64)
        texts = Jagged.of_texts(["{}"] * len(groups))
        columns = {"prompt_ids": ids, "group_ids": np.array(groups), "fields": texts}
        columns |= {"rows": np.array(groups), "messages": Jagged.of_texts(["null"] * len(groups))}
        self._agent = SimpleNamespace(start=self._groups)
        self.begin(Batch(columns), SAMPLING, stream)

    def _groups(self, asked: Any, sampling: SamplingParams) -> list[asyncio.Task[list[Sample]]]:
        return [asyncio.create_task(self._run(prompt.group_id)) for prompt in asked]

    async def _run(self, group: int) -> list[Sample]:
        self.ends[group] = asyncio.Event()
        await self.ends[group].wait()
        return [Sample([1], [2], [1], [0.0], [0], "stop", group)]

    def end(self, group: int, stream: Any = "train") -> None:
        async def ended() -> None:
            self.ends[group].set()

        self._wait(ended())
        assert self.collect(stream, 30.0).array("group_ids").tolist() == [group]  # type: ignore[union-attr]


def test_what_goes_on_at_the_same_time_counts_once(clock):
    """Nothing until 1 s, from 4 to 6 s, and from 9 s on."""
    idle = IdleTime()
    for when, call, what in (
        (1, idle.begin, "one"),
        (2, idle.begin, "other"),
        (2.5, idle.begin, "other"),
        (3, idle.end, "one"),
        (3.5, idle.end, "nothing that went on"),
        (4, idle.end, "other"),
        (5, idle.end, "nothing that went on"),
        (6, idle.begin, "one"),
        (9, idle.end, "one"),
    ):
        clock.now = float(when)
        call(what)
    clock.now = 9.5
    assert idle.seconds == 1 + 2 + 0.5


def test_a_server_does_not_idle_while_it_generates_or_takes_weights(clock):
    worker = Worker(clock)
    assert worker.idle_s() == 0
    worker.start()  # to 3 s
    clock.now = 5.0
    worker.start_groups(1)
    assert worker.idle_s() == 2
    clock.now = 9.0
    worker.receive_weights(1, in_flight=True)  # to 13 s, in the middle of group 1
    clock.now = 15.0
    worker.end(1)
    clock.now = 17.0
    assert worker.idle_s() == 2 + 2
    worker.receive_weights(2)  # to 21 s
    worker.load_checkpoint("there", 3)  # to 25 s
    assert worker.idle_s() == 4
    clock.now = 28.0
    worker.start_groups(2, stream="evaluation")
    clock.now = 33.0
    worker.end(2, stream="evaluation")
    assert worker.idle_s() == 4 + 3
    clock.now = 34.0
    with pytest.raises(RuntimeError, match="a peer is gone"):
        worker.receive_weights(13)  # to 38 s
    clock.now = 40.0
    assert worker.idle_s() == 7 + 1 + 2


@pytest.mark.parametrize("keeps", [True, False], ids=["kept requests", "nothing"])
def test_a_server_that_sleeps_does_not_idle(clock, keeps):
    """By turns: asleep from 10 s on, weights at 40, awake at 46; 4 s with nothing after."""
    worker = Worker(clock)
    worker.start()
    worker.start_groups(1)
    clock.now = 10.0
    if not keeps:
        worker.end(1)
    worker.sleep(keep=keeps)
    clock.now = 40.0
    worker.wake("weights")
    worker.receive_weights(1, in_flight=keeps)
    assert worker.idle_s() == 0
    worker.wake("kv_cache")
    if keeps:
        clock.now = 60.0
        worker.end(1)
    clock.now += 4
    assert worker.idle_s() == 4


class Group:
    """The workers of a server: one, which is called here."""

    ended, building, worker_infos = "", (), dict[int, Any]()

    def __init__(self, number: int, clock: SimpleNamespace) -> None:
        self.name, self.worker, self.dies = f"rollout-{number}", Worker(clock), False
        self.prepare = self.start = self.shut_down = SimpleNamespace(submit=self._submit)

    def _submit(self) -> Any:
        raise WorkerError("is not there")

    def close(self) -> None: ...


class Pool(ServerPool):
    def _launch(self, server: Any) -> None: ...

    def _call(self, servers: Any, method: str, *args: Any) -> list[Any]:
        found = []
        for server in servers:
            if server.group.dies:
                self._lost(server, WorkerError("a server has died"))
            else:
                found.append(getattr(server.group.worker, method)(*args))
        return found


@pytest.fixture
def pool(clock) -> RolloutPool:
    """Of three servers, started at 3, 6 and 9 s, and asked at 9 s."""
    servers = Pool(
        lambda number: Group(number, clock),  # type: ignore[arg-type, return-value]
        3, max_restarts=1, takes_turns=False, timeouts=TimeoutsConfig(),
    )  # fmt: skip
    for group in workers(servers):
        group.start()
    servers.started()
    made = RolloutPool(servers, RolloutConfig(), seed=0)
    assert made.idle_s() == (6 + 3 + 0) / 3
    return made


def workers(servers: Any) -> list[Worker]:
    return [group.worker for group in servers.groups]


def test_the_mean_is_of_servers_each_with_its_own_time(pool, clock):
    """In 20 s the first generates all the time, the second for 6 s, the third never.

    The first two take weights for 4 s each, one after the other on this clock. A push of these 8 s,
    taken from what is left of the 20, would count twice for the first.
    """
    first, second, _ = workers(pool.servers)
    first.start_groups(1)
    second.start_groups(2)
    clock.now += 6
    second.end(2)
    clock.now += 6
    first.receive_weights(1, in_flight=True)
    second.receive_weights(1, in_flight=True)
    assert pool.idle_s() == pytest.approx((0 + (6 + 4) + 20) / 3)
    clock.now += 3
    assert pool.idle_s() == pytest.approx((0 + 3 + 3) / 3)


def test_a_server_that_is_removed_does_not_move_what_others_are_said_to_have_idled(pool, clock):
    clock.now += 100
    assert pool.idle_s() == 100
    pool.servers.remove(0)
    clock.now += 5
    assert pool.idle_s() == 5
    pool.servers.add(0)
    clock.now += 5
    assert pool.idle_s() == 5  # it is not up


def test_a_server_that_has_died_counts_again_from_its_start_on(pool, clock):
    clock.now += 10
    pool.servers.groups[1].dies = True
    assert pool.idle_s() == 10  # of the two others
    clock.now += 50
    started = pool.servers.groups[1].worker
    started.start()
    pool.servers._enter(pool.servers._servers[1])
    clock.now += 7
    assert pool.idle_s() == pytest.approx((60 + 7 + 60) / 3)


def test_without_a_server_none_idles(pool):
    for group in pool.servers.groups:
        group.dies = True
    assert pool.idle_s() == pool.idle_s() == 0
