"""Sizes of KV caches, worked out by hand; states of delta nets as vLLM has them."""

from __future__ import annotations

import math

import pytest
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

from mcore_rl.config.schema import RolloutConfig, SpeculativeConfig
from mcore_rl.inference.kv_cache import count_need, count_token_bytes
from mcore_rl.models.gated_delta_net import count_state_bytes
from tests.published_runs import read_model

TOKEN = 36 * 2 * 8 * 128 * 2  # of Qwen3-8B: keys and values of 8 heads of 128 in 36 layers
BLOCK = 32


@pytest.mark.parametrize(
    ("settings", "num_sequences", "expected"),
    [
        ({}, 9, 9 * 1024 * TOKEN + BLOCK * TOKEN),  # 1,000 tokens are 32 blocks
        ({"tp": 2}, 9, (9 * 1024 + BLOCK) * TOKEN // 2),
        ({"tp": 16}, 9, (9 * 1024 + BLOCK) * TOKEN // 8),  # a worker has one head at least
        ({"dp": 2, "ep": True}, 9, (5 * 1024 + BLOCK) * TOKEN),  # the fullest rank has 5 of them
        ({"max_num_seqs": 3}, 9, (3 * 1024 + BLOCK) * TOKEN),
        ({"max_num_seqs": 3}, None, (3 * 1024 + BLOCK) * TOKEN),
        ({}, None, (1024 * 1024 + BLOCK) * TOKEN),  # as many as vLLM takes on a GPU
        ({"engine": {"block_size": 600}}, 9, (9 * 1200 + 600) * TOKEN),
        ({"engine": {"kv_cache_dtype": "fp8"}}, 9, (9 * 1024 + BLOCK) * TOKEN // 2),
    ],
)
def test_a_cache_holds_the_longest_sequences_in_whole_blocks(settings, num_sequences, expected):
    model, rollout = read_model({"model": "Qwen3-8B"}), RolloutConfig(**settings)
    assert count_need(model, rollout, "bfloat16", 1000, num_sequences).num_bytes == expected


def test_a_default_takes_what_there_is_but_room_for_a_sequence():
    need = count_need(read_model({"model": "Qwen3-8B"}), RolloutConfig(), "bfloat16", 1000, 9)
    least = (1024 + BLOCK) * TOKEN
    assert [need.choose_bytes(most) for most in (None, 5 * least, least - 1, -1)] == [
        need.num_bytes, 5 * least, least, least
    ]  # fmt: skip
    assert need.fill_settings(RolloutConfig(kv_cache_bytes=9)).kv_cache_bytes == 9
    assert need.fill_settings(RolloutConfig(), 5 * least).kv_cache_bytes == 5 * least


def test_prediction_layers_that_draft_cache_their_tokens():
    """DeepSeek-V3 has one beside 61 layers, each with a latent of 512 and 64 of positions."""
    drafts = RolloutConfig(speculative=SpeculativeConfig(2))
    model = read_model({"model": "DeepSeek-V3"})
    assert count_token_bytes(model, RolloutConfig(), "bfloat16") == 61 * 576 * 2
    assert count_token_bytes(model, drafts, "bfloat16") == 62 * 576 * 2
    # 127 tokens and 2 drafts are two blocks of 128.
    need = count_need(model, drafts, "bfloat16", 127, 1)
    assert need.sequence_bytes == 2 * 128 * 62 * 576 * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_a_delta_net_has_the_state_of_vllm_and_a_sequence_two_of_them(tp):
    model = read_model({"model": "Qwen3-Next-80B-A3B"})
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp,
        *(
            model[f"linear_{name}"]
            for name in (
                "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim",
                "conv_kernel_dim",
            )
        ),
    )  # fmt: skip
    state = count_state_bytes(model, tp)
    assert state == 4 * sum(map(math.prod, shapes))
    need = count_need(model, RolloutConfig(tp=tp), "bfloat16", 320, 1)
    token = count_token_bytes(model, RolloutConfig(tp=tp), "bfloat16")
    page = state + BLOCK * token // 12  # of 12 layers of attention; 36 are delta nets
    assert need.sequence_bytes == 320 * token + (12 + 2 * 36) * page


def test_models_without_a_delta_net_have_no_state():
    assert count_state_bytes(read_model({"model": "Qwen3-8B"})) == 0
