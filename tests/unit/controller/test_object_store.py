"""The size of the object store of a node."""

from __future__ import annotations

import os

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ReplayConfig, RLConfig
from mcore_rl.controller import object_store
from mcore_rl.controller.object_store import (
    MIN_BYTES,
    choose_object_store_bytes,
    estimate_sample_bytes,
)

GIB = 1 << 30


def test_object_store_has_the_samples_within_the_free_memory_by_default():
    def choose(samples: int, free: int) -> int:
        return choose_object_store_bytes(0, samples, setting="object_store_bytes", free_bytes=free)

    assert choose(0, 64 * GIB) == choose(MIN_BYTES // 4, 64 * GIB) == MIN_BYTES == GIB // 2
    assert choose(3 * GIB, 64 * GIB) == 3 * GIB
    assert choose(100 * GIB, 10 * GIB) == 8 * GIB
    assert choose(100 * GIB, 64 << 20) == MIN_BYTES


def test_a_size_that_does_not_fit_is_refused():
    def choose(requested: int) -> int:
        return choose_object_store_bytes(
            requested, setting="--object-store-bytes", free_bytes=4 * GIB
        )

    assert choose(4 * GIB) == 4 * GIB
    for requested in (4 * GIB + 1, MIN_BYTES - 1, -1):
        with pytest.raises(ConfigError, match=f"--object-store-bytes={requested}; allowed: 0, or"):
            choose(requested)


@pytest.mark.parametrize(
    ("mode", "steps"), [("sync", 2), ("one_step_off", 2), ("fully_async", 2 + 3)]
)
def test_sample_bytes_count_every_sample_at_its_longest(mode: str, steps: int):
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 100, 900
    config.trainer.mode, config.trainer.staleness = mode, 3 if mode == "fully_async" else None
    assert estimate_sample_bytes(config) == steps * 32 * 1000 * 96
    config.algorithm.filter.replay = ReplayConfig(share=0.1, max_age=6)
    assert estimate_sample_bytes(config) == (steps + 6) * 32 * 1000 * 96


def test_sample_bytes_count_groups_beyond_a_step():
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.trainer.mode = "fully_async"
    before = estimate_sample_bytes(config)
    config.trainer.asynchronous.oversampling = 0.3  # two groups of four
    assert estimate_sample_bytes(config) * (4 * 4) == before * (4 * 4 + 2)


@pytest.mark.parametrize(
    ("mode", "staleness", "groups"),
    [
        ("sync", None, 2 * 24),
        ("one_step_off", None, 2 * 24),
        ("fully_async", 0, 2 * 12),  # in rounds of prompts_per_step
        ("fully_async", 1, 3 * 4),  # rejected groups are freed at once
    ],
)
def test_sample_bytes_count_all_rounds_with_a_filter(mode: str, staleness: int | None, groups: int):
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 100, 900
    config.trainer.mode, config.trainer.staleness = mode, staleness
    policy = config.algorithm.filter
    policy.group_filter, policy.max_rounds = "drop_uniform", 3
    policy.prompts_per_round = 0 if mode == "fully_async" else 8
    assert estimate_sample_bytes(config) == groups * 8 * 1000 * 96


def test_object_store_stays_within_the_memory_of_the_job(monkeypatch):
    space = os.statvfs_result((4096, 4096, *[64 * GIB // 4096] * 3, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    monkeypatch.setattr(object_store, "get_free_memory_bytes", lambda: 10 * GIB)
    assert choose_object_store_bytes(0, 100 * GIB, setting="object_store_bytes") == 8 * GIB
    with pytest.raises(ConfigError, match=rf"memory\.max .* leave here, {10 * GIB}"):
        choose_object_store_bytes(11 * GIB, setting="object_store_bytes")
    monkeypatch.setattr(object_store, "get_free_memory_bytes", lambda: 100 * GIB)
    assert choose_object_store_bytes(11 * GIB, setting="object_store_bytes") == 11 * GIB
