"""What a sequence costs the engine: the multiplications of its matrices and of attention."""

from __future__ import annotations

import pytest
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcore_rl.engine.megatron.step import model_cost

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 160}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 40}
PROJECTIONS = 64 * 96 + 96 * 64 + 2 * 64 * 48  # queries, output, keys and values
HEAD = 64 * 100


def config(**settings):
    return TransformerConfig(**SIZES, num_query_groups=2, kv_channels=24, **settings)


def test_a_dense_model():
    cost = model_cost(config(), vocab_size=100)
    assert cost.per_token == 4 * (PROJECTIONS + 3 * 64 * 160) + HEAD
    assert cost.per_token_pair == 4 * 2 * 96


def test_experts_cost_what_a_token_uses_of_them():
    cost = model_cost(config(**EXPERTS), vocab_size=100)
    assert cost.per_token == 4 * (PROJECTIONS + 3 * 64 * 2 * 40) + HEAD
    shared = model_cost(config(**EXPERTS, moe_shared_expert_intermediate_size=24), vocab_size=100)
    assert shared.per_token - cost.per_token == 4 * 3 * 64 * 24


@pytest.mark.parametrize(("every", "num_moe"), [([0, 1, 1, 1], 3), (2, 2)])
def test_dense_layers_among_experts(every, num_moe):
    cost = model_cost(config(**EXPERTS, moe_layer_freq=every), vocab_size=100)
    mlps = num_moe * 3 * 64 * 2 * 40 + (4 - num_moe) * 3 * 64 * 160
    assert cost.per_token == 4 * PROJECTIONS + mlps + HEAD


def test_latent_attention_counts_its_own_head_sizes():
    latent = MLATransformerConfig(
        **SIZES, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=20, kv_lora_rank=32
    )
    assert model_cost(latent, vocab_size=100).per_token_pair == 4 * 4 * (16 + 8 + 20)
