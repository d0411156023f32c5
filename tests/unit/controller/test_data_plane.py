"""Batches by reference between real processes: modes, views, what is freed, what is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from mcore_rl.benchmarks.data_plane import read_settled_store_bytes
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.batch_ops import fetch_batch
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.object_columns import LostColumnsError, fetch_columns, store_columns
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch, Jagged
from tests.nightly import nightly

pytestmark = pytest.mark.job
READS, WRITES = ("prompt_ids", "response_ids"), ("marked_ids", "ranks")


def mark_tokens(batch: Batch, add: int) -> Batch:
    """Add ten times the rank to each token; write the rank of each sample."""
    rank, ids = int(os.environ["RANK"]), batch.jagged("response_ids")
    marked = ids.with_values(ids.values + 10 * rank + add)
    return batch.with_columns(marked_ids=marked, ranks=np.full(len(batch), rank))


class Worker:
    @register(makes=True)
    def make(self, lengths: Sequence[int]) -> Batch:
        return batch_of(lengths)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, reads=READS, writes=WRITES)
    def all_to_all(self, batch: Batch, add: int) -> Batch:
        return mark_tokens(batch, add)

    @register(dispatch_mode=Dispatch.RANK_ZERO, reads=READS, writes=WRITES)
    def rank_zero(self, batch: Batch, add: int) -> Batch:
        return mark_tokens(batch, add)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, reads=READS, writes=WRITES)
    def one_to_all(self, batch: Batch, add: int) -> Batch:
        return mark_tokens(batch, add)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, reads=READS, writes=WRITES)
    def dp_compute(self, batch: Batch, add: int) -> Batch:
        return mark_tokens(batch, add)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=READS, writes=WRITES)
    def megatron_compute(self, batch: Batch, add: int) -> Batch:
        return mark_tokens(batch, add)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP, reads=READS, writes=WRITES)
    def megatron_pp_as_dp(self, batch: Batch, add: int) -> Batch:
        return mark_tokens(batch, add)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_WITH_FUNC, reads=READS, writes=WRITES)
    def with_func(self, function: Callable[[Batch, int], Batch], batch: Batch, add: int) -> Batch:
        return function(batch, add)

    @register(dispatch_mode=Dispatch.RANK_ZERO, reads=("response_ids",))
    def inspect_columns(self, batch: Batch) -> dict[str, Any]:
        values = batch.jagged("response_ids").values
        tensor = torch.from_numpy(values)
        return {
            "columns": sorted(batch.columns),
            "is_writeable": values.flags.writeable,
            "owns_data": values.flags.owndata,
            "is_same_memory": tensor.data_ptr() == values.ctypes.data,
            "sum": int(tensor.sum()),
        }

    @register(dispatch_mode=Dispatch.RANK_ZERO, reads=("response_ids",), writes=())
    def undeclared(self, batch: Batch) -> Batch:
        return batch.with_columns(entropy=batch["response_ids"])

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=("marked_ids",))
    def count_marked(self, batch: Batch) -> int:
        return len(batch.jagged("marked_ids").values)


def batch_of(lengths: Sequence[int]) -> Batch:
    prompts = Jagged.pack([[7] * length for length in lengths], np.int64)
    responses = Jagged.pack([list(range(length)) for length in lengths], np.int64)
    columns = {"prompt_ids": prompts, "response_ids": responses}
    return Batch({**columns, "rewards": np.arange(len(lengths), dtype=np.float32)})


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with (
        ray_session(num_cpus=1, object_store_bytes=200 << 20, log_to_driver=False),
        ResourcePool(4, {"CPU": 0.1}) as pool,
    ):
        yield pool


def group_of(pool: ResourcePool, layout: Layout, name: str = "policy") -> WorkerGroup:
    timeouts = TimeoutsConfig(start_s=120, call_s=60)
    return WorkerGroup(Worker, layout=layout, pool=pool, timeouts=timeouts, name=name)


@pytest.fixture(scope="module")
def worker(pool: ResourcePool) -> Iterator[WorkerGroup]:
    """Start one rank for the tests that leave it as it was: starting one takes seconds."""
    with (
        ResourcePool(1, {"CPU": 0.1}) as single_pool,
        group_of(single_pool, Layout(), "alive") as group,
    ):
        yield group


# In two parts [0] and [1, 2, 3, 4], in four [0], [1], [2] and [3, 4].
UNEVEN = batch_of([100, 40, 30, 20, 10])


def assert_marked(batch: RemoteBatch, ranks: Sequence[int], lengths: Sequence[int]) -> None:
    """Check that these ranks marked the rows, which are in the order of the caller."""
    assert {"prompt_ids", "response_ids", "rewards", "marked_ids", "ranks"} <= {*batch.names}
    assert batch.array("ranks").tolist() == list(ranks)
    assert batch.array("rewards").tolist() == list(range(len(lengths)))
    fetched = fetch_columns(batch)
    for row, (rank, length) in enumerate(zip(ranks, lengths, strict=True)):
        expected = [token + 10 * rank + 3 for token in range(length)]
        assert fetched.jagged("marked_ids")[row].tolist() == expected


def test_each_mode_splits_rows_over_four_processes_as_worked_out_by_hand(pool: ResourcePool):
    lengths = [100, 40, 30, 20, 10]
    with group_of(pool, Layout(tp=2, dp=2)) as group:
        batch = store_columns(UNEVEN)
        assert_marked(group.call(Worker.rank_zero, batch, 3), [0] * 5, lengths)
        assert_marked(group.call(Worker.dp_compute, batch, 3), [0, 1, 2, 3, 3], lengths)
        assert_marked(group.call(Worker.with_func, mark_tokens, batch, 3), [0, 1, 2, 3, 3], lengths)
        assert_marked(group.call(Worker.megatron_compute, batch, 3), [0, 2, 2, 2, 2], lengths)
        for rank, result in enumerate(group.call(Worker.one_to_all, batch, 3)):
            assert_marked(batch.union(result), [rank] * 5, lengths)
        each = [batch.take(rows) for rows in ([0, 1], [], [2], [3, 4])]
        answers = group.call(Worker.all_to_all, each, [3] * 4)
        assert [answer.array("ranks").tolist() for answer in answers] == [[0, 0], [], [2], [3, 3]]
        few = batch.take([2, 0])  # fewer rows than ranks: two get an empty part
        assert group.call(Worker.dp_compute, few, 3).array("ranks").tolist() == [0, 1]
        assert len(group.call(Worker.dp_compute, batch.take([]), 3)) == 0
        made = RemoteBatch.concat(group.call(Worker.make, [2, 0, 5]))
        assert_marked(
            group.call(Worker.megatron_compute, made.take([0, 1, 2]), 3), [0, 0, 2], [2, 0, 5]
        )
        group.rebuild("pipeline", Layout(pp=2, dp=2))
        assert_marked(group.call(Worker.megatron_pp_as_dp, batch, 3), [0, 2, 1, 3, 3], lengths)


def test_a_worker_has_views_of_the_columns_that_it_reads(worker: WorkerGroup):
    (made,) = worker.call(Worker.make, [3, 4, 5])
    assert worker.call(Worker.inspect_columns, made) == {
        "columns": ["response_ids"],
        "is_writeable": False,
        "owns_data": False,
        "is_same_memory": True,
        "sum": 3 + 6 + 10,
    }
    once, again = fetch_columns(made), fetch_columns(made.take([1, 2]))
    values = once.jagged("response_ids").values
    assert np.shares_memory(values, again.jagged("response_ids").values)
    assert not values.flags.writeable
    scattered = fetch_columns(made.take([2, 0])).jagged("response_ids")
    assert not np.shares_memory(values, scattered.values)
    assert scattered.values.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_a_column_that_is_not_declared_ends_the_call(pool: ResourcePool):
    with group_of(pool, Layout()) as group, pytest.raises(WorkerError) as caught:
        group.call(Worker.undeclared, store_columns(UNEVEN))
    assert "undeclared returned the column 'entropy'; it writes none" in str(caught.value)


def test_objects_are_freed_when_no_batch_refers_to_them(worker: WorkerGroup):
    before = read_settled_store_bytes()
    (made,) = worker.call(Worker.make, [200_000] * 5)
    part = worker.call(Worker.megatron_compute, made.select("response_ids", "prompt_ids"), 3)
    full = read_settled_store_bytes() - before
    assert full > 20e6  # three columns of eight bytes a token
    del made
    part = part.select("marked_ids")
    assert read_settled_store_bytes() - before < 10e6
    del part
    assert read_settled_store_bytes() - before < 1e6


@pytest.mark.parametrize("steps", [100, nightly(5000)])
def test_memory_stays_as_it_is_over_many_small_steps(worker: WorkerGroup, steps: int):
    processes = [psutil.Process(), psutil.Process(worker.worker_infos[0].pid)]

    def step() -> None:
        (made,) = worker.call(Worker.make, [16] * 64)
        done = worker.call(Worker.megatron_compute, made.take(range(0, 64, 2)), 3)
        assert len(done) == 32

    for _ in range(100):
        step()
    before = [process.memory_info().rss for process in processes]
    stored = read_settled_store_bytes()
    for _ in range(steps):
        step()
    assert read_settled_store_bytes() <= stored + (1 << 20)
    for process, start in zip(processes, before, strict=True):
        assert process.memory_info().rss < start + (24 << 20)


def test_columns_of_a_process_that_was_killed_are_one_error(worker: WorkerGroup):
    (made,) = worker.call(Worker.make, [50_000] * 4)
    with ResourcePool(1, {"CPU": 0.1}) as other, group_of(other, Layout(), "dying") as group:
        check_error_of_lost_columns(worker, group, made)


def check_error_of_lost_columns(worker: WorkerGroup, group: WorkerGroup, made: RemoteBatch) -> None:
    """The rank that has stored the columns dies unnoticed, as no call is on its way there."""
    scored = group.call(Worker.megatron_compute, made, 3)
    died = group.worker_infos[0]
    os.kill(died.pid, signal.SIGKILL)
    samples = fetch_columns(scored.drop_columns("marked_ids"))  # they belong to the driver
    assert samples.lengths("response_ids").tolist() == [50_000] * 4
    wait_until_lost(scored)
    with pytest.raises(WorkerError) as caught:
        worker.call(Worker.count_marked, scored)
    message = str(caught.value)
    assert "alive.count_marked" in message
    assert "rank 0" in message
    assert "columns are lost: the process that had stored them has died" in message
    assert f"; dead: dying, rank 0 ({died})" in message.splitlines()[0]
    with pytest.raises(WorkerError, match=rf"the samples.*; dead: dying, rank 0.*{died.pid}"):
        fetch_batch(scored, "the samples", 60)


def wait_until_lost(batch: RemoteBatch) -> None:
    """Wait until Ray knows: 30 s at most."""
    for _ in range(300):
        try:
            fetch_columns(batch, 10)
        except LostColumnsError:
            return
        time.sleep(0.1)
    raise AssertionError("the columns of a process that is gone are still there after 30 s")
