"""Frequencies of scaled rotary embeddings: the table of vLLM's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from mcore_rl.engine.megatron.rope import compute_frequencies
from mcore_rl.models.rope import map_rope_config

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3 with other bounds": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    "yarn": YARN,
    "yarn with mscale": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7, "beta_slow": 0.5},
    "yarn with one mscale": {**YARN, "mscale": 1.3},
    "yarn with a factor": {**YARN, "attention_factor": 1.2, "beta_fast": 4.0},
    "yarn without truncation": {**YARN, "truncate": False},
}


@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_angles_and_factor_are_vllms_bit_for_bit(scaling, theta, dim):
    rope = {**SCALINGS[scaling], "rope_type": SCALINGS[scaling]["type"], "rope_theta": theta}
    config = {"rope_scaling": rope, "max_position_embeddings": 256}
    with set_current_vllm_config(VllmConfig()):
        table = get_rope(dim, 256, rope_parameters=rope, dtype=torch.float32).cos_sin_cache
    fields = map_rope_config(config)
    if "rope_parameters" in fields:
        frequencies, factor = compute_frequencies(fields["rope_parameters"], dim)
    else:  # as Megatron has them
        assert scaling == "dynamic"
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        frequencies, factor = 1.0 / (fields["rotary_base"] ** exponents), 1.0
    angles = torch.outer(torch.arange(len(table)).float(), frequencies)
    expected = torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1)
    assert torch.equal(table, expected)
