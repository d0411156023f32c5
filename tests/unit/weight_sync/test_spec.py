"""Where the ranks of both sides run, as all of them tell."""

from typing import Any

import pytest

from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import Sites, generation_side, sites_of, training_side
from tests.operations import growth


def test_a_node_has_the_training_ranks_of_its_host():
    """Four training ranks on two hosts; the generation ranks behind them count for neither."""
    found = [("s0", "h0"), ("s0", "h0"), ("s1", "h1"), ("s1", "h1"), ("s1", "h1"), ("s0", "h0")]
    assert sites_of(found, 4) == Sites(("s0", "s0", "s1", "s1"), ("s1", "s0"), ranks_per_node=2)
    assert sites_of(found[:3], 1) == Sites(("s0",), ("s0", "s1"), ranks_per_node=1)


def config_of(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64,
        "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16,
        "num_hidden_layers": num_layers, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": False, "max_position_embeddings": 64, "attention_bias": False,
        "hidden_act": "silu",
    }  # fmt: skip


def find_trained(num_ranks: int) -> None:
    layout = Layout(pp=num_ranks // 8, dp=8, ep=8)
    ranks, weights = training_side(config_of(layout.pp), layout, 0)
    assert len({ranks.holders(weight) for weight in weights}) >= num_ranks


def find_served(num_ranks: int) -> None:
    layout = GenerationLayout(pp=num_ranks // 8, tp=1, dp=8, ep=8)
    ranks, (_, weights) = generation_side(config_of(layout.pp), layout)
    assert len({ranks.holders(weight) for weight in weights}) >= num_ranks


@pytest.mark.parametrize("find", [find_trained, find_served])
def test_who_holds_which_weight_takes_work_linear_in_the_ranks(find):
    assert growth(find, 32, 256) < 1.3
