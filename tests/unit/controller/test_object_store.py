"""How large the object store of a node is."""

from __future__ import annotations

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.object_store import LEAST_BYTES, object_store_bytes, step_bytes

GIB = 1 << 30


def test_without_a_setting_it_has_two_steps_within_what_is_free():
    def size(a_step: int, free: int) -> int:
        return object_store_bytes(0, a_step, setting="object_store_bytes", shm=free)

    assert size(0, 64 * GIB) == size(LEAST_BYTES // 4, 64 * GIB) == LEAST_BYTES == GIB // 2
    assert size(3 * GIB, 64 * GIB) == 6 * GIB
    assert size(100 * GIB, 10 * GIB) == 8 * GIB
    assert size(100 * GIB, 64 << 20) == LEAST_BYTES


def test_what_does_not_fit_is_refused():
    def size(wanted: int) -> int:
        return object_store_bytes(wanted, setting="--object-store-bytes", shm=4 * GIB)

    assert size(4 * GIB) == 4 * GIB
    for wanted in (4 * GIB + 1, LEAST_BYTES - 1, -1):
        with pytest.raises(ConfigError, match=f"--object-store-bytes={wanted}; allowed: 0, or"):
            size(wanted)


def test_a_step_holds_every_sample_at_its_longest():
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 100, 900
    assert step_bytes(config) == 32 * 1000 * 96
