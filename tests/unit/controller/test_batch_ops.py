"""Columns that are fetched to this process, and do not arrive."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError, OwnerDiedError

from mcore_rl.config.schema import ReplayConfig, RLConfig
from mcore_rl.controller import object_columns
from mcore_rl.controller.batch_ops import (
    append_released,
    fetch_batch,
    release_columns,
    restore_released,
    save_released,
)
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.controller.remote_batch import RemoteBatch, RemoteColumn, RowLocations
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.sample import Sample
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.trainers import async_rollout, replay_buffer
from mcore_rl.trainers.async_rollout import RolloutPrefetcher
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.step_samples import StepSampler

CALL_S = 5.0
LATE = r"columns of 1 objects have not arrived in 5 s \(timeouts.call_s\)$"


class Store:
    """Ray's object store, which loses all objects."""

    def __init__(self) -> None:
        self.limits: list[float | None] = []
        self.error: Exception = GetTimeoutError()

    def put(self, value: Any) -> str:
        return "reference"

    def get(self, references: list[str], timeout: float | None) -> list[Any]:
        self.limits.append(timeout)
        raise self.error


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Fetch from a store without objects; no node is known to have died."""
    made = Store()
    monkeypatch.setattr(object_columns, "ray", made)
    monkeypatch.setattr(object_columns, "_get_object_bytes", lambda: 1 << 20)
    for module in (replay_buffer, async_rollout):
        monkeypatch.setattr(module, "find_lost_groups", lambda batches: [])
    return made


def store_samples() -> Any:
    samples = [Sample([1], [2], [1], [0.0], [0], "stop", group) for group in (0, 1)]
    return object_columns.store_columns(Batch.collate(samples))


def test_samples_that_do_not_come_are_one_error_that_says_which_and_how_long(store: Store):
    with pytest.raises(WorkerError, match=f"^the samples of math: {LATE}"):
        fetch_batch(store_samples(), "the samples of math", CALL_S)
    store.error = OwnerDiedError("00" * 28, b"", "")
    with pytest.raises(WorkerError, match=r"^the samples of math: columns are lost: "):
        fetch_batch(store_samples(), "the samples of math", CALL_S)
    assert store.limits == [CALL_S, CALL_S]


def test_a_checkpoint_waits_for_samples_that_are_replayed_no_longer_than_any_call(store: Store):
    buffer = ReplayBuffer(ReplayConfig(share=0.5), 0, CALL_S)
    buffer.add(store_samples(), 1)
    with pytest.raises(WorkerError, match=f"^a checkpoint needs the samples .* replayed: {LATE}"):
        buffer.state_dict()
    assert store.limits == [CALL_S]


def test_nor_for_prefetched_samples(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StepSampler, "collect", lambda *_: (store_samples(), {}))
    config = RLConfig()
    config.timeouts.call_s = CALL_S
    prompts = PromptBatches(PromptDataset([PromptRow([1], {})]), 1, 0)
    replay = ReplayBuffer(ReplayConfig(), 0, CALL_S)
    sampler = StepSampler(config, cast(RolloutPool, None), prompts, replay)
    with ThreadPoolExecutor(1) as thread:
        prefetcher = RolloutPrefetcher(sampler, thread)
        prefetcher.begin(3, version=1)
        with pytest.raises(WorkerError, match=f"^a checkpoint needs the samples of step 3: {LATE}"):
            prefetcher.state_dict()
    assert store.limits == [CALL_S]


@pytest.mark.parametrize("is_restored", [False, True], ids=["of this run", "of a checkpoint"])
def test_released_samples_are_joined_with_what_is_one_value_a_sample(
    monkeypatch: pytest.MonkeyPatch, is_restored: bool
):
    """Also where only some have a column of token rewards, and a text that is longer."""
    ids = Jagged.pack([[1, 2], [3]], np.int64)
    local = Batch({"rewards": np.array([1.0, 0.0]), "finish_reasons": np.array(["stop", ""])})
    missing = RowLocations.create_missing(2)
    columns = {n: RemoteColumn(missing, n, ids.values[:0]) for n in ("response_ids", "state_ids")}
    held = RemoteBatch(local, {"response_ids": columns["response_ids"]})
    released: Any = release_columns(RemoteBatch(local, columns))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    if is_restored:
        released = restore_released(save_released(released))
    joined = append_released(held, [released, released.take([0])])
    assert joined.array("rewards").tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert joined.array("finish_reasons").tolist() == ["stop", "", "stop", "", "stop"]
    assert joined.take([0, 1]).remote.keys() == held.remote.keys()
