"""Columns that are fetched to this process, and do not come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from ray.exceptions import GetTimeoutError, OwnerDiedError

from mcore_rl.config.schema import ReplayConfig, RLConfig
from mcore_rl.controller import object_columns
from mcore_rl.controller.batch_ops import fetch_batch
from mcore_rl.controller.pending import WorkerError
from mcore_rl.data.batch import Batch
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
    """Of Ray, one that has nothing of what was put into it."""

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
    """As far as anybody knows no node has died."""
    made = Store()
    monkeypatch.setattr(object_columns, "ray", made)
    monkeypatch.setattr(object_columns, "_object_bytes", lambda: 1 << 20)
    for module in (replay_buffer, async_rollout):
        monkeypatch.setattr(module, "find_lost_groups", lambda batches: [])
    return made


def stored() -> Any:
    samples = [Sample([1], [2], [1], [0.0], [0], "stop", group) for group in (0, 1)]
    return object_columns.store(Batch.collate(samples))


def test_samples_that_do_not_come_are_one_error_that_says_which_and_how_long(store: Store):
    with pytest.raises(WorkerError, match=f"^the samples of math: {LATE}"):
        fetch_batch(stored(), "the samples of math", CALL_S)
    store.error = OwnerDiedError("00" * 28, b"", "")
    with pytest.raises(WorkerError, match=r"^the samples of math: columns are lost: "):
        fetch_batch(stored(), "the samples of math", CALL_S)
    assert store.limits == [CALL_S, CALL_S]


def test_a_checkpoint_waits_for_samples_that_are_replayed_no_longer_than_any_call(store: Store):
    buffer = ReplayBuffer(ReplayConfig(share=0.5), 0, CALL_S)
    buffer.add(stored(), 1)
    with pytest.raises(WorkerError, match=f"^a checkpoint needs the samples .* replayed: {LATE}"):
        buffer.state_dict()
    assert store.limits == [CALL_S]


def test_nor_for_prefetched_samples(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StepSampler, "collect", lambda *_: (stored(), {}))
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
