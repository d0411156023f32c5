"""How large the object store of a node is."""

from __future__ import annotations

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ReplayConfig, RLConfig
from mcore_rl.controller.object_store import LEAST_BYTES, held_bytes, object_store_bytes

GIB = 1 << 30


def test_without_a_setting_it_has_what_samples_hold_within_what_is_free():
    def size(held: int, free: int) -> int:
        return object_store_bytes(0, held, setting="object_store_bytes", shm=free)

    assert size(0, 64 * GIB) == size(LEAST_BYTES // 4, 64 * GIB) == LEAST_BYTES == GIB // 2
    assert size(3 * GIB, 64 * GIB) == 3 * GIB
    assert size(100 * GIB, 10 * GIB) == 8 * GIB
    assert size(100 * GIB, 64 << 20) == LEAST_BYTES


def test_what_does_not_fit_is_refused():
    def size(wanted: int) -> int:
        return object_store_bytes(wanted, setting="--object-store-bytes", shm=4 * GIB)

    assert size(4 * GIB) == 4 * GIB
    for wanted in (4 * GIB + 1, LEAST_BYTES - 1, -1):
        with pytest.raises(ConfigError, match=f"--object-store-bytes={wanted}; allowed: 0, or"):
            size(wanted)


@pytest.mark.parametrize(
    ("mode", "steps"), [("sync", 2), ("one_step_off", 2), ("fully_async", 2 + 3)]
)
def test_steps_hold_every_sample_at_its_longest(mode: str, steps: int):
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 100, 900
    config.trainer.mode, config.trainer.staleness = mode, 3 if mode == "fully_async" else None
    assert held_bytes(config) == steps * 32 * 1000 * 96
    config.algorithm.filter.replay = ReplayConfig(share=0.1, max_age=6)
    assert held_bytes(config) == (steps + 6) * 32 * 1000 * 96


def test_oversampling_is_held_too():
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.trainer.mode = "fully_async"
    before = held_bytes(config)
    config.trainer.asynchronous.oversampling = 0.3  # two groups of four
    assert held_bytes(config) * (4 * 4) == before * (4 * 4 + 2)


@pytest.mark.parametrize(
    ("mode", "staleness", "groups"),
    [
        ("sync", None, 2 * 24),
        ("one_step_off", None, 2 * 24),
        ("fully_async", 0, 2 * 12),  # in rounds of prompts_per_step
        ("fully_async", 1, 3 * 4),  # rejected groups are let go of as they come
    ],
)
def test_with_a_filter_a_step_holds_what_all_its_rounds_have_generated(
    mode: str, staleness: int | None, groups: int
):
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 100, 900
    config.trainer.mode, config.trainer.staleness = mode, staleness
    policy = config.algorithm.filter
    policy.group_filter, policy.max_rounds = "drop_uniform", 3
    policy.prompts_per_round = 0 if mode == "fully_async" else 8
    assert held_bytes(config) == groups * 8 * 1000 * 96
