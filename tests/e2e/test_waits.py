"""Ranks that do not answer, and pushes of weights in which one side fails: on a real Ray."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import ray
import torch

from mcore_rl.config.schema import Layout, RolloutConfig, TimeoutsConfig, WeightSyncConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.pending_call import Timeout, WorkerError
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.parallel import rendezvous
from mcore_rl.reshard.executor import Bucket
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.rollout.server_pool import ServerPool
from mcore_rl.rollout.weight_updater import TransportSync
from mcore_rl.weight_sync.shared_memory import (
    ShardEndpoint,
    ShardSender,
    SharedBuckets,
    create_shared_buckets,
    receive_shards,
)
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import WeightUpdate
from tests.nightly import nightly

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

HOST = socket.gethostname()
LATER_S = 0.7  # the other side learns of a failure first, by wire, and the driver so much later


class Worker:
    """Rank 1 does not answer; rank 0 has answered, or waits."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])

    @register(is_start=True)
    def stop(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    @register()
    def loop(self) -> None:
        if self.rank == 0:
            time.sleep(600)
        self.loop_for_ever()

    def loop_for_ever(self) -> None:
        while True:
            pass


class Trainer:
    """Hands over two buckets, and fails between them."""

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weights(
        self,
        layout: GenerationLayout,
        settings: WeightSyncConfig,
        weight_format: str,
        worker_lists: object,
    ) -> tuple[ShardEndpoint, TransferSpec]:
        self.sender = ShardSender(generation_rank=0, timeout_s=60)
        return self.sender.endpoint, TransferSpec(Layout(), 0, layout, "bfloat16", settings)

    @register()
    def connect_weights(self, endpoint: ShardEndpoint, spec: TransferSpec) -> None: ...

    @register()
    def send_weights(self, version: int) -> None:
        memory = create_shared_buckets(torch.device("cpu"))
        try:
            self.sender.send(self.buckets(memory, version), memory, WeightUpdate(version))
        except ValueError:
            time.sleep(LATER_S)
            raise

    def buckets(self, memory: SharedBuckets, version: int) -> Iterator[Bucket]:
        both = [memory.allocate(64) for _ in range(2)]
        yield Bucket(0, both[0], (), torch.float32, bool, {})
        if version == 1:
            raise ValueError("the embedding holds NaN")
        if version == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield Bucket(1, both[1], (), torch.float32, bool, {})


class Server:
    """Takes them, and fails at the second."""

    @register()
    def list_parameters(self) -> list[object]:
        return []

    @register()
    def connect_weights(self, endpoint: ShardEndpoint, spec: TransferSpec, first_rank: int) -> None:
        self.endpoint = endpoint

    @register()
    def receive_weights(self, version: int, in_flight: bool, recompute_cache: bool) -> None:
        arriving = receive_shards(self.endpoint, WeightUpdate(version), torch.device("cpu"))
        try:
            with contextlib.closing(arriving):
                for index, _ in enumerate(arriving):
                    if version == 3 and index == 1:
                        raise ValueError("vLLM has no such module")
                    if version == 4 and index == 1:
                        os.kill(os.getpid(), signal.SIGSTOP)
        except ValueError:
            time.sleep(LATER_S)
            raise


@pytest.fixture(scope="module")
def pools() -> Iterator[list[ResourcePool]]:
    """Create a pool of two bundles, and one of one."""
    with (
        ray_session(num_cpus=1, object_store_bytes=100 << 20, log_to_driver=False),
        ResourcePool(2, {"CPU": 0.1}) as two,
        ResourcePool(1, {"CPU": 0.1}) as small,
    ):
        yield [two, small]


def group_of(worker: type, pool: ResourcePool, name: str, call_s: float = 60) -> WorkerGroup:
    timeouts = TimeoutsConfig(start_s=120, call_s=call_s)
    layout = Layout(dp=pool.num_ranks)
    return WorkerGroup(worker, layout=layout, pool=pool, timeouts=timeouts, name=name)


def assert_end(pids: set[int]) -> None:
    deadline = time.monotonic() + 30  # Ray gives a stopped process 5 s
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("method", "setting", "doing"),
    [
        ("stop", "start_s", r"stopped by a signal, in Worker\.stop \(\w+\.py:\d+\)$"),
        nightly(
            (  # test_dispatch.py has such a loop
                "loop",
                "call_s",
                r"running, in Worker\.loop_for_ever \(\w+\.py:\d+\)\. Nor has "
                rf"rank 0 \(host {HOST}, pid \d+\): waiting, in Worker\.loop \(\w+\.py:\d+\)$",
            )
        ),
    ],
    ids=["stopped", "in a loop"],
)
def test_silent_rank_ends_its_group_with_its_stack(
    pools: list[ResourcePool], method: str, setting: str, doing: str
):
    # Neither a group's start nor a method of it has the limit of calls.
    group = group_of(Worker, pools[0], "policy", call_s=5 if setting == "call_s" else 0.001)
    group._start_timeout = replace(group._start_timeout, seconds=5)  # for which they had 120 s
    pids = {info.pid for info in group.worker_infos.values()}
    start = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        group.call(getattr(Worker, method))
    assert time.monotonic() - start < 5 + 60  # the limit, and that of the look at the rank
    line, *stacks = str(raised.value).split("\n")
    who = rf"rank 1 \(host {HOST}, pid {group.worker_infos[1].pid}\)"
    message = rf"policy\.{method}: {who} has not answered in 5 s \(timeouts\.{setting}\): {doing}"
    assert re.match(message, line)
    assert "died" not in str(raised.value)
    assert any("WorkerProcess.call (" in frame for frame in stacks)  # the stack is whole
    with pytest.raises(RuntimeError, match=rf"but the group has ended: policy\.{method}: rank 1"):
        group.call(Worker.stop)
    assert_end(pids)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        nightly((1, "actor.send_weights: rank 0 raised ValueError: the embedding holds NaN")),
        (2, f"actor.send_weights: rank 0 (host {HOST}, pid PID) died."),
        (3, "rollout.receive_weights: rank 0 raised ValueError: vLLM has no such module"),
        nightly(
            (  # the test above has a rank that is stopped
                4,
                f"server 0 on host {HOST} is lost: rollout.receive_weights: rank 0 (host {HOST}, "
                "pid PID) has not answered in 3 s (weight_sync.timeout_s): stopped by a signal, in "
                "Server.receive_weights (",
            )
        ),
    ],
    ids=["trainer raises", "trainer dies", "server raises", "server stops"],
)
def test_failed_side_of_a_push_is_blamed(
    pools: list[ResourcePool], version: int, message: str, monkeypatch: pytest.MonkeyPatch
):
    # These ranks meet at a socket of the sender's, and not at a rendezvous.
    monkeypatch.setattr(rendezvous, "end_waits", lambda *_: None)
    with (
        ResourcePool(1, {"CPU": 0.1}) as pool,
        group_of(Trainer, pool, "actor") as actor,
        group_of(Server, pools[1], "rollout") as servers,
        ServerPool(
            lambda _: servers, 1, max_restarts=0, takes_turns=False, timeouts=TimeoutsConfig()
        ) as served,
    ):
        served.mark_started()
        pid = (servers if version == 4 else actor).worker_infos[0].pid
        settings = RolloutConfig(), WeightSyncConfig()
        sync = TransportSync(actor, served, Timeout(60, "weight_sync.timeout_s"), *settings)
        for good in (5, 6):
            sync.push(good)
        assert not actor.end_reason and not servers.end_reason
        sync.timeout = Timeout(3 if version == 4 else 60, "weight_sync.timeout_s")
        with pytest.raises(WorkerError) as raised:
            sync.push(version)
        assert str(raised.value).startswith(message.replace("PID", str(pid)))
        assert (servers if "rollout" in message else actor).end_reason
