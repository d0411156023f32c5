"""Each family's rules cover its checkpoint exactly, at full published sizes, from shapes alone."""

from __future__ import annotations

import pytest

import mcore_rl.models  # noqa: F401
from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import family_of, model_sizes, padded_vocab_size, rope_theta
from mcore_rl.reshard.rules import check_cover, logical_tensors

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip


def parameters(config):
    weights = family_of(config).weights(config, padded_vocab_size(config, 1))
    total = 0
    for tensor in logical_tensors(weights):
        size = 1
        for extent in tensor.shape:
            size *= extent
        total += size
    return total


@pytest.mark.parametrize(
    ("config", "expected"), [(QWEN3_30B_A3B, 30_532_122_624), (QWEN3_0_6B, 596_049_920)]
)
def test_parameter_counts_are_the_published_models(config, expected):
    assert parameters(config) == expected


@pytest.mark.parametrize("config", [QWEN3_30B_A3B, QWEN3_0_6B])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rules_cover_every_logical_tensor_once(config, count):
    small = {**config, "num_hidden_layers": 2}
    check_cover(family_of(small).weights(small, padded_vocab_size(small, count)), count)


def test_dense_layers_of_a_mixed_model_have_dense_rules():
    config = {**QWEN3_30B_A3B, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    names = {w.local_name() for w in family_of(config).weights(config, 151936) if w.layer == 1}
    assert "decoder.layers.1.mlp.linear_fc1.weight" in names
    assert not any("experts" in name for name in names)
    assert family_of(config).config_map(config)["moe_layer_freq"] == [1, 0, 1]
    assert model_sizes(config).ffn_sizes == (6144,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"architectures=\['LlamaForCausalLM'\] is not",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; allowed: 'silu'"),
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"moe_intermediate_size": None}, "has no 'moe_intermediate_size'"),
        ({"rope_theta": None}, "neither rope_theta nor"),
    ],
)
def test_a_config_that_cannot_be_expressed_is_refused_by_name(change, message):
    config = {**QWEN3_30B_A3B, **change}
    with pytest.raises(ConfigError, match=message):
        family_of(config).config_map(config)


def test_rope_theta_is_read_where_either_transformers_keeps_it():
    assert rope_theta({"rope_theta": 5.0}) == 5.0
    assert rope_theta({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}) == 7.0
