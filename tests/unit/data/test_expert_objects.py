"""Recorded experts between real processes: what a rank reads, and that a server may die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.batch_ops import select_small_columns, select_token_columns
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.object_columns import fetch_columns
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch
from mcore_rl.data.routed_experts import EXPERTS, ExpertLayers, add_experts
from mcore_rl.data.sample import RoutedExperts, Sample
from mcore_rl.engine.worker import ModelWorker, apply_on_rank_zero
from tests.unit.controller.test_data_plane import wait_until_lost

pytestmark = pytest.mark.job
LAYERS = ExpertLayers(stages=((0,), (1, 2)), topk=2)
NUM_SAMPLES, TIMEOUTS = 4, TimeoutsConfig(start_s=120, call_s=60)


class Server:
    @register(makes=True)
    def collect(self) -> Batch:
        samples = [sample(group) for group in range(NUM_SAMPLES)]
        return add_experts(Batch.collate(samples), samples, LAYERS)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=("response_ids",), writes=("said",))
    def say(self, batch: Batch) -> Batch:
        return batch.with_columns(said=batch["response_ids"])


def sample(group: int) -> Sample:
    """Build a sample whose tokens have an expert of their group, another in each layer."""
    ids = np.full((3, 3, 2), group, np.uint8)
    ids[:, :, 1] = [100, 101, 102]
    experts = (RoutedExperts(0, ids),)
    return Sample([1, 2], [3, 4], [1, 1], [0.0] * 2, [0] * 2, "stop", group, routed_experts=experts)


class Engine:
    """Keeps what it reads."""

    def __init__(self, rank: int) -> None:
        self.rank, self.expert_layers = rank, LAYERS.stages[rank]
        self.read: list[tuple[list[str], Any]] = []

    def infer_batch(self, batch: Batch, **_: Any) -> Batch | None:
        self.read.append((sorted(batch.names), [ids.tolist() for ids in batch.jagged(EXPERTS)]))
        unit = batch.jagged("response_ids").with_values(np.ones(2 * len(batch), np.float32))
        return batch.with_columns(log_probs=unit) if self.rank == 1 else None

    def train_batch(self, batch: Batch, *_: object, **__: Any) -> dict[str, float]:
        self.infer_batch(batch)
        return {}


class Rank(ModelWorker):
    _replays_rollout = True

    def __init__(self) -> None:
        self._engine: Any = Engine(int(os.environ["RANK"]))
        self._loss_function: Any = len
        self._is_offloaded = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self) -> list[tuple[list[str], Any]]:
        result, self._engine.read = self._engine.read, []
        return result


def names_of(batch: Batch) -> list[str]:
    return sorted(batch.names)


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with (
        ray_session(num_cpus=1, object_store_bytes=200 << 20, log_to_driver=False),
        ResourcePool(2, {"CPU": 0.1}) as pool,
    ):
        yield pool


@pytest.fixture(scope="module")
def actor(pool: ResourcePool) -> Iterator[WorkerGroup]:
    with WorkerGroup(Rank, layout=Layout(pp=2), pool=pool, timeouts=TIMEOUTS) as group:
        yield group


@pytest.fixture(scope="module")
def made(pool: ResourcePool) -> RemoteBatch:
    """Return the answer of a server that was killed afterwards, with the objects that it stored."""
    with (
        ResourcePool(1, {"CPU": 0.1}) as other,
        WorkerGroup(Server, layout=Layout(), pool=other, timeouts=TIMEOUTS, num_parts=2) as server,
    ):
        (batch,) = server.call(Server.collect)
        message = server.call(Server.say, batch)
        os.kill(server.worker_infos[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="died"):
            server.call(Server.collect)
    wait_until_lost(message)
    return batch


def test_ranks_read_the_experts_of_their_layers_when_the_server_has_died(actor, made):
    rows = [3, 0, 2]
    batch = made.take(rows)
    scored = actor.call(Rank.compute_log_probs, batch, temperature=1.0)
    assert {*scored.names} == {*made.names, "log_probs"}
    actor.call(Rank.update, select_token_columns(scored), temperature=1.0)
    for stage, of_both in zip(LAYERS.stages, actor.call(Rank.read), strict=True):
        layers = ",".join(map(str, stage))
        other = {"0": "1,2", "1,2": "0"}[layers]
        ids = [[[[row, 100 + layer] for layer in stage]] * 4 for row in rows]
        for names, experts in of_both:
            assert experts == ids
            assert f"{EXPERTS}/{layers}" in names and f"{EXPERTS}/{other}" not in names
        assert len(of_both) == 2


def test_the_driver_has_a_reference_for_a_stage_and_not_for_a_sample(made):
    columns = [made.remote[f"{EXPERTS}/{part}"] for part in ("0", "1,2")]
    assert [len(column.locations.references) for column in columns] == [1, 1]
    assert len({column.locations.references for column in columns}) == 2
    assert not [name for name in made.local.columns if name.startswith(EXPERTS)]


def test_nobody_else_reads_them(actor, made):
    small = apply_on_rank_zero(actor, names_of, select_small_columns(made))
    assert small and not [name for name in small if name.startswith(EXPERTS)]
    names = apply_on_rank_zero(actor, names_of, made)
    assert [name for name in names if name.startswith(EXPERTS)] == [f"{EXPERTS}/0"]


def test_they_are_saved_with_the_samples(made):
    saved = Batch.load_arrays(fetch_columns(made).to_arrays())
    for part, stage in (("0", (0,)), ("1,2", (1, 2))):
        ids = saved.jagged(f"{EXPERTS}/{part}")
        assert ids.values.dtype == np.uint8
        assert [row[0].tolist() for row in ids] == [
            [[group, 100 + layer] for layer in stage] for group in range(NUM_SAMPLES)
        ]
