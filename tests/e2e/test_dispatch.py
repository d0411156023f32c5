"""Every dispatch mode on four processes, and how a group of them fails."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import ray

from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import CallPart, Dispatch, DispatchMode, register
from mcore_rl.controller.pending_call import PendingCall, WorkerError
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.parallel.mesh import Mesh
from tests.e2e.processes import wait_until_gone
from tests.nightly import nightly

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

HOST = socket.gethostname()


def send_to_odd_ranks(mesh: Mesh, args: tuple, kwargs: dict) -> list[CallPart]:
    odd = tuple(range(1, mesh.world_size, 2))
    return [CallPart(odd, odd[-1], args, kwargs)]


def get_last_result(parts: Sequence[CallPart], results: Mapping[int, Any]) -> Any:
    return results[parts[0].output_rank]


class Worker:
    """Says what it was given, and which rank it is."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.seen: list[int] = []

    def close(self) -> None: ...

    def mark_rows(self, batch: Batch) -> Batch:
        self.seen = batch.array("row").tolist()
        return Batch({"writers": batch.array("row") * 10 + self.rank})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, word: str) -> str:
        return f"{word} {self.rank}"

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, batch: Batch, *, scale: int) -> int:
        return len(batch) * scale + self.rank

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, word: str) -> str:
        return f"{word} {self.rank}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, batch: Batch) -> Batch:
        return self.mark_rows(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_WITH_FUNC)
    def with_func(self, function: Callable[[Any], Any], batch: Batch) -> Batch:
        return Batch({"writers": function(batch.array("row")) + self.rank})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def megatron_compute(self, batch: Batch) -> Batch:
        return self.mark_rows(batch)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP)
    def pp_as_dp(self, batch: Batch) -> Batch:
        return self.mark_rows(batch)

    @register(dispatch_mode=DispatchMode(scatter=send_to_odd_ranks, gather=get_last_result))
    def to_the_odd(self, word: str) -> str:
        return f"{word} {self.rank}"

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, execute="rank_zero")
    def wait_later(self, batch: Batch) -> Batch:
        return self.mark_rows(batch)

    @register()
    def last_seen(self) -> list[int]:
        return self.seen

    @register()
    def fail(self, kind: str) -> None:
        if self.rank != 2:
            time.sleep(60)  # hangs, as the peers of a failed rank do
        if kind == "raise":
            raise ArithmeticError("the loss is not finite")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self.loop_for_ever()

    def loop_for_ever(self) -> None:
        while True:
            pass


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with (
        ray_session(num_cpus=1, object_store_bytes=100 << 20, log_to_driver=False),
        ResourcePool(4, {"CPU": 0.1}) as pool,
    ):
        yield pool


def group_of(pool: ResourcePool, layout: Layout, call_s: float = 60) -> WorkerGroup:
    timeouts = TimeoutsConfig(start_s=120, call_s=call_s)
    return WorkerGroup(
        Worker, layout=layout, pool=pool, timeouts=timeouts, name="policy", env={"MARK": "policy"}
    )


def batch_of(lengths: Sequence[int]) -> Batch:
    ids = Jagged.pack([[7] * length for length in lengths], np.int64)
    return Batch({"prompt_ids": ids, "response_ids": ids, "row": np.arange(len(lengths))})


# In two parts [0] and [1, 2, 3, 4], in four [0], [1], [2] and [3, 4].
UNEVEN = batch_of([100, 40, 30, 20, 10])


def test_each_mode_on_four_processes_as_worked_out_by_hand(pool: ResourcePool):
    # The same four, as tp 2 dp 2, as dp 2 pp 2 and as cp 2 pp 2.

    def get_marks(result: Batch) -> list[int]:
        values: list[int] = result.array("writers").tolist()
        return values

    with group_of(pool, Layout(tp=2, dp=2)) as group:
        assert group.call(Worker.one_to_all, "rank") == ["rank 0", "rank 1", "rank 2", "rank 3"]
        assert group.call(Worker.rank_zero, "rank") == "rank 0"
        assert group.call(Worker.to_the_odd, "rank") == "rank 3"
        batches = [batch_of(lengths) for lengths in ([3, 1], [], [2], [1, 1, 1])]
        assert group.call(Worker.all_to_all, batches, scale=[10, 20, 30, 40]) == [20, 1, 32, 123]
        assert get_marks(group.call(Worker.dp_compute, UNEVEN)) == [0, 11, 22, 33, 43]
        marked = group.call(Worker.with_func, lambda row: row * 100, UNEVEN)
        assert get_marks(marked) == [0, 101, 202, 303, 403]
        assert get_marks(group.call(Worker.megatron_compute, UNEVEN)) == [0, 12, 22, 32, 42]
        assert group.call(Worker.last_seen) == [[0], [0], [1, 2, 3, 4], [1, 2, 3, 4]]
        marked = group.call(Worker.dp_compute, batch_of([5, 9]))  # two ranks have no rows
        assert get_marks(marked) == [0, 11]
        assert group.call(Worker.last_seen) == [[0], [1], [], []]
        pending = group.submit(Worker.wait_later, UNEVEN)
        assert isinstance(pending, PendingCall)
        assert get_marks(pending.result()) == [0, 10, 20, 30, 40]

        group.rebuild("policy", Layout(dp=2, pp=2))
        assert get_marks(group.call(Worker.dp_compute, UNEVEN)) == [0, 11, 22, 33, 43]
        assert get_marks(group.call(Worker.megatron_compute, UNEVEN)) == [2, 13, 23, 33, 43]
        assert group.call(Worker.last_seen) == [[0], [1, 2, 3, 4], [0], [1, 2, 3, 4]]
        assert get_marks(group.call(Worker.pp_as_dp, UNEVEN)) == [0, 12, 21, 33, 43]
        assert group.call(Worker.last_seen) == [[0], [2], [1], [3, 4]]

        group.rebuild("policy", Layout(cp=2, pp=2))
        assert get_marks(group.call(Worker.megatron_compute, UNEVEN)) == [2, 12, 22, 32, 42]
        assert get_marks(group.call(Worker.pp_as_dp, UNEVEN)) == [0, 12, 22, 32, 42]
        assert group.call(Worker.last_seen) == [[0], [0], [1, 2, 3, 4], [1, 2, 3, 4]]
    wait_until_gone("MARK", "policy")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # test_controller.py has these of two ranks:
        nightly(("raise", r"policy\.fail: rank 2 raised ArithmeticError: the loss is not finite$")),
        nightly(("kill", rf"policy\.fail: rank 2 \(host {HOST}, pid \d+\) died\. .*$")),
        (
            "hang",
            rf"policy\.fail: rank 2 \(host {HOST}, pid \d+\) has not answered in 4 s "
            r"\(timeouts\.call_s\): running, in Worker\.loop_for_ever \(\w+\.py:\d+\)\. "
            rf"Nor has rank 0 \(host {HOST}, pid \d+\): waiting, in Worker\.fail .*$",
        ),
    ],
    ids=["raise", "kill", "hang"],
)
def test_a_rank_of_four_that_fails_ends_in_one_error_and_no_process(
    pool: ResourcePool, kind: str, expected: str
):
    group = group_of(pool, Layout(tp=2, dp=2), call_s=4 if kind == "hang" else 60)
    start = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        group.call(Worker.fail, kind)
    assert time.monotonic() - start < 50  # the others would have slept for a minute
    message = str(raised.value)
    assert re.match(expected, message.splitlines()[0])
    if kind == "hang":
        stack = message.partition("\n\npolicy.fail, rank 2 ")[2].partition("\n\npolicy.fail, ")[0]
        assert stack.index("loop_for_ever") < stack.index("fail (")  # the innermost first
    wait_until_gone("MARK", "policy")
