"""Each family's rules cover its checkpoint exactly, at full published sizes, from shapes alone.

Long because: it has the published fields of each family, and what is refused of them.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

import mcore_rl.models  # noqa: F401
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import validate_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.models import base
from mcore_rl.models.base import (
    check_fields,
    check_no_unread_field,
    count_kv_elements_per_token,
    drop_mtp_layers,
    get_family,
    get_model_sizes,
    get_vllm_weights,
    list_layer_types,
    pad_vocab_size,
    read_config,
    read_rope,
)
from mcore_rl.models.rope import count_positions
from mcore_rl.models.transformers_model import (
    build_family,
    load_transformers_config,
    map_sharded_weights,
)
from mcore_rl.reshard.rules import Weight, check_cover, list_logical_tensors
from tests.nightly import nightly

# config.json of published models, as far as families read them, and their parameter counts: those
# of transformers' model classes for these configs, with the selection biases of routers and without
# layers for multi-token prediction, which transformers leaves out.
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    **_QWEN3_MOE, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "intermediate_size": 6144, "moe_intermediate_size": 768,
}  # fmt: skip
QWEN3_235B_A22B = {
    **_QWEN3_MOE, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
    "intermediate_size": 12288, "moe_intermediate_size": 1536,
}  # fmt: skip
QWEN3_NEXT_80B_A3B = {
    **_QWEN3, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    "head_dim": 256, "rope_theta": 10000000, "partial_rotary_factor": 0.25, "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "num_experts": 512,
    "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "shared_expert_intermediate_size": 512, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
# As read_config has them: fields of text_config beside the others. transformers' counts are without
# the tower.
_QWEN3_5_TEXT: dict[str, Any] = {
    **{n: v for n, v in QWEN3_NEXT_80B_A3B.items() if n not in ("rope_theta", "intermediate_size")},
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
    "vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
    "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
}  # fmt: skip
QWEN3_5_35B_A3B = {
    **_QWEN3_5_TEXT, "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe", "text_config": _QWEN3_5_TEXT, "vision_config": {},
}  # fmt: skip
_QWEN3_5_DENSE: dict[str, Any] = {
    **{n: v for n, v in _QWEN3_5_TEXT.items() if "expert" not in n and "moe" not in n},
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "linear_num_value_heads": 48,
}  # fmt: skip
QWEN3_5_27B = {
    **_QWEN3_5_DENSE, "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5", "text_config": _QWEN3_5_DENSE, "vision_config": {},
}  # fmt: skip
QWEN3_0_6B = {
    **_QWEN3, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 3584,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "hidden_act": "silu", "use_sliding_window": False, "sliding_window": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "hidden_act": "silu", "sliding_window": None,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
    "hidden_act": "silu", "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM_4_5 = {
    "architectures": ["Glm4MoeForCausalLM"], "vocab_size": 151552, "hidden_size": 5120,
    "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None,
    "partial_rotary_factor": 0.5, "hidden_act": "silu", "attention_bias": True,
    "use_qk_norm": True, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
    "experts_per_token": 4, "rms_norm_eps": 1e-5, "rope_theta": 150000, "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
    "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
    "attention_bias": True, "swiglu_limit": 7.0, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS_120B = {
    **GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip

MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "vocab_size": 200064, "hidden_size": 3072,
    "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8,
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "rotary_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip

_KIMI_K2 = {
    **DEEPSEEK_V3, "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "factor": 64.0},
}  # fmt: skip
KIMI_K25 = {  # as read_config returns it
    **_KIMI_K2, "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "text_config": _KIMI_K2, "vision_config": {},
}  # fmt: skip
GLM_4_7_FLASH = {
    **{name: value for name, value in GLM_4_5.items() if name not in ("use_qk_norm", "head_dim")},
    "architectures": ["Glm4MoeLiteForCausalLM"], "vocab_size": 154880, "hidden_size": 2048,
    "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
    "intermediate_size": 10240, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "topk_method": "noaux_tc",
    "partial_rotary_factor": 1.0, "attention_bias": False, "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
}  # fmt: skip
_INDEXER = {"index_topk": 2048, "index_head_dim": 128}
DEEPSEEK_V3_2 = {
    **DEEPSEEK_V3, **_INDEXER, "architectures": ["DeepseekV32ForCausalLM"], "index_n_heads": 64,
    "model_type": "deepseek_v32",
}  # fmt: skip
GLM_5 = {
    **{name: value for name, value in DEEPSEEK_V3.items() if not name.startswith("rope_")},
    **_INDEXER, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
    "vocab_size": 154880, "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64,
    "num_key_value_heads": 64, "intermediate_size": 12288, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32,
    "rms_norm_eps": 1e-5, "rope_interleave": True, "indexer_rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
}  # fmt: skip
LLAMA_2_7B = {  # without rope_theta
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip

# Nor has this one num_key_value_heads.
LLAMA_7B = {n: value for n, value in LLAMA_2_7B.items() if n != "num_key_value_heads"}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-7B": (QWEN2_5_7B, 7_615_616_512),
    "Qwen3-0.6B": (QWEN3_0_6B, 596_049_920),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen3-235B-A22B": (QWEN3_235B_A22B, 235_093_634_560),
    "Llama-7B": (LLAMA_7B, 6_738_415_616),
    "Llama-2-7B": (LLAMA_2_7B, 6_738_415_616),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT_80B_A3B, 79_674_391_296),
    "Qwen3.5-35B-A3B": (QWEN3_5_35B_A3B, 34_660_610_688),
    "Qwen3.5-35B-A3B, text": (_QWEN3_5_TEXT, 34_660_610_688),
    "Qwen3.5-27B": (QWEN3_5_27B, 26_895_998_464),
    "Qwen3.5-27B, text": (_QWEN3_5_DENSE, 26_895_998_464),
    "Llama-3.1-8B": (LLAMA_3_1_8B, 8_030_261_248),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "MiniMax-M2": (MINIMAX_M2, 228_689_764_864),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_419_200),
    "Kimi-K2.5": (KIMI_K25, 1_026_408_232_448),
    "DeepSeek-V3.2": (DEEPSEEK_V3_2, 671_877_944_064),
    "GLM-5": (GLM_5, 743_911_218_432),
    "GLM-4.5": (GLM_4_5, 352_797_829_024),
    "GLM-4.7-Flash": (GLM_4_7_FLASH, 29_943_393_920),
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
    "gpt-oss-120b": (GPT_OSS_120B, 116_829_156_672),
}

CONFIGS = [pytest.param(config, id=name) for name, (config, _) in PUBLISHED.items()]
COUNTS = [pytest.param(*case, id=name) for name, case in PUBLISHED.items()]
NO_MTP = {"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 0}


def weights_of(config: dict[str, Any], count: int = 1) -> tuple[Weight, ...]:
    return get_family(config).weights(config, pad_vocab_size(config, count))


def elements(config: dict[str, Any], prefix: str = "") -> int:
    tensors = (t for t in list_logical_tensors(weights_of(config)) if t.name.startswith(prefix))
    return sum(math.prod(tensor.shape) for tensor in tensors)


def test_every_family_has_a_published_model_here():
    assert {config["architectures"][0] for config, _ in PUBLISHED.values()} == set(base._FAMILIES)


@pytest.mark.parametrize(("config", "expected"), COUNTS)
def test_parameter_counts_are_the_published_models(config, expected):
    assert elements({**config, **NO_MTP}) == expected


@pytest.mark.parametrize("config", [DEEPSEEK_V3, GLM_4_5, GLM_4_7_FLASH, DEEPSEEK_V3_2, GLM_5])
def test_a_prediction_layer_is_a_decoder_layer_with_what_stands_around_it(config):
    last, hidden = config["num_hidden_layers"], config["hidden_size"]
    copies = 2 * config["vocab_size"] * hidden
    around = 3 * hidden + 2 * hidden**2
    decoder_layer = elements(config, f"model.layers.{last - 1}.")
    assert elements(config, f"model.layers.{last}.") == decoder_layer + around + copies
    assert elements(config) - elements({**config, **NO_MTP}) == decoder_layer + around + copies
    assert get_family(config).num_mtp_layers(config) == 1


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rules_cover_every_logical_tensor_once(config, count):
    small = {**config, "num_hidden_layers": 4}  # dense and expert layers
    tp = min(count, get_model_sizes(config).num_query_groups)
    check_cover(weights_of(small, tp), tp)


@pytest.mark.parametrize(
    ("config", "tp"),
    [
        nightly((DEEPSEEK_V3, 1)), (DEEPSEEK_V3, 2), (GLM_4_5, 1), nightly((GLM_4_5, 2)),
        (GLM_4_7_FLASH, 1), (GLM_4_7_FLASH, 2),
        nightly((QWEN3_NEXT_80B_A3B, 1)), (QWEN3_NEXT_80B_A3B, 2),
    ],
)  # fmt: skip
def test_a_draft_model_has_the_tensors_of_the_prediction_layer(config, tp):
    trained = {
        tensor
        for weight in weights_of(config)
        if weight.stage == "mtp" and not weight.replica
        for tensor in weight.rule.tensors
    }
    served, with_drafts = (get_vllm_weights(config, drafts=drafts) for drafts in (False, True))
    drafts = with_drafts[len(served) :]
    assert {tensor for weight in drafts for tensor in weight.rule.tensors} == trained
    check_cover(drafts, tp)
    without = drop_mtp_layers(config)
    assert get_vllm_weights(without, drafts=True) == get_vllm_weights(without)


def test_dense_layers_of_a_mixed_model_have_dense_rules():
    config = {**QWEN3_30B_A3B, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    names = {w.get_local_name() for w in weights_of(config) if w.layer == 1}
    assert "decoder.layers.1.mlp.linear_fc1.weight" in names
    assert not any("experts" in name for name in names)
    assert get_family(config).config_map(config)["moe_layer_freq"] == [1, 0, 1]
    assert get_model_sizes(config).ffn_sizes == (6144,)


def test_sizes_of_a_model_with_latent_attention_and_shared_experts():
    sizes = get_model_sizes(DEEPSEEK_V3)
    assert (sizes.num_attention_heads, sizes.num_query_groups) == (128, 128)
    assert sizes.ffn_sizes == (18432, 2048)
    assert (sizes.num_experts, sizes.expert_ffn_size, sizes.num_mtp_layers) == (256, 2048, 1)
    assert sizes.is_mla and sizes.has_router_bias and not sizes.is_tied


def test_a_group_limit_that_chooses_every_group_is_none():
    fields = get_family(GLM_4_5).config_map(GLM_4_5)
    assert "moe_router_num_groups" not in fields
    fields = get_family(DEEPSEEK_V3).config_map(DEEPSEEK_V3)
    assert (fields["moe_router_num_groups"], fields["moe_router_group_topk"]) == (8, 4)


def test_kimi_k2_is_deepseek_v3_under_its_own_model_type(tmp_path):
    """transformers does not know kimi_k2, and its code of the checkpoint is not run."""
    import torch
    import transformers

    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 8)
    sizes |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"), 4)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "vocab_size": 16}
    model = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**sizes, **heads, **experts, **layers)
    )
    model.save_pretrained(tmp_path)
    original = read_config(tmp_path)
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    config = {**original, "model_type": "kimi_k2", "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert get_family(config) is get_family(DEEPSEEK_V3)
    assert map_sharded_weights(config) == map_sharded_weights(original)
    assert build_family(config).config_map(config) == build_family(original).config_map(original)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, config=load_transformers_config(tmp_path)
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_sizes_of_a_hybrid_model_have_the_heads_of_its_delta_nets():
    sizes = get_model_sizes(QWEN3_NEXT_80B_A3B)
    assert (sizes.num_linear_heads, sizes.num_query_groups, sizes.num_mtp_layers) == (16, 2, 1)
    assert sizes.ffn_sizes == (512,) and sizes.num_experts == 512
    attention_only = {**QWEN3_NEXT_80B_A3B, "full_attention_interval": 1}
    assert get_model_sizes(attention_only).num_linear_heads == 0
    # Layers of linear attention cache nothing per token.
    assert count_kv_elements_per_token(QWEN3_NEXT_80B_A3B) == 12 * 2 * 2 * 256


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=2, cp=8), ""),
        (Layout(tp=2, cp=16), "layout.tp=2 with layout.cp=16: gated delta .* divides 16"),
        (Layout(cp=3), "layout.tp=1 with layout.cp=3: gated delta nets are split .* divides 16"),
        (Layout(tp=4), "layout.tp=4 .* 2 key/value heads"),
        (Layout(tp=2, dp=2, ep=3), "layout.ep=3 .* 512 experts"),
    ],
)
def test_a_layout_that_does_not_divide_a_hybrid_model_is_refused_by_name(layout, message):
    sizes = get_model_sizes(QWEN3_NEXT_80B_A3B)
    if message:
        with pytest.raises(ConfigError, match=message):
            validate_model_layout("layout", layout, sizes)
    else:
        validate_model_layout("layout", layout, sizes)


def test_gated_delta_nets_without_their_kernels_are_refused_by_name(monkeypatch):
    from megatron.core.ssm.gated_delta_net import common  # slow to import

    monkeypatch.setattr(common, "HAVE_FLA", False)
    with pytest.raises(ConfigError, match=r"need fla-core 0\.4, .* allowed: modules='torch'"):
        get_family(QWEN3_NEXT_80B_A3B).layer_spec(None, None)


def test_layer_types_and_the_interval_name_the_same_layers():
    types = (["linear_attention"] * 3 + ["full_attention"]) * 12
    listed = {**QWEN3_NEXT_80B_A3B, "layer_types": types, "full_attention_interval": 7}
    assert list_layer_types(QWEN3_NEXT_80B_A3B) == list_layer_types(listed) == types


def test_a_prediction_layer_that_config_does_not_declare_counts_until_dropped():
    family = get_family(QWEN3_NEXT_80B_A3B)
    assert family.num_mtp_layers(QWEN3_NEXT_80B_A3B) == 1
    assert family.num_mtp_layers(drop_mtp_layers(QWEN3_NEXT_80B_A3B)) == 0
    assert drop_mtp_layers(QWEN3_0_6B) == QWEN3_0_6B


YARN = DEEPSEEK_V3["rope_scaling"]
LLAMA3 = LLAMA_3_1_8B["rope_scaling"]
REFUSED = [
    (QWEN3_0_6B, {"architectures": ["BertModel"]}, r"\['BertModel'\] is not supported; allowed"),
    (QWEN3_0_6B, {"hidden_act": "gelu"}, "hidden_act='gelu' is not .* allowed: 'silu'"),
    (QWEN3_0_6B, {"attention_bias": True}, "attention_bias=true is not .* allowed: false"),
    (QWEN3_0_6B, {"rope_scaling": {"type": "longrope"}}, "'longrope' is not .*its frequencies dep"),
    (QWEN3_0_6B, {"rope_scaling": {"type": "mrope"}}, "'mrope' is not .*'default', 'linear', 'dyn"),
    (QWEN3_0_6B, {"rope_scaling": {"type": "yarn"}}, "no 'factor', which"),
    (QWEN3_0_6B, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "no 'original_max_pos"),
    (
        QWEN3_0_6B,
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "no 'max_position_embedding",
    ),
    (
        QWEN3_0_6B,
        {"rope_scaling": {"type": "linear", "factor": 2}},
        "factor=2 is not supported: vLLM takes no integer; allowed: 2.0",
    ),
    (
        QWEN3_0_6B,
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}},
        "rope_type='linear' with beta_fast=1 is not supported; allowed: factor",
    ),
    (
        QWEN3_0_6B,
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "mrope_section": [1, 2],
            }
        },
        r"rope_type='yarn' with mrope_section=\[1, 2\] is not supported; allowed: factor, orig",
    ),
    (
        QWEN2_5_7B,
        {"hidden_size": 3585},
        "hidden_size=3585 is no multiple of num_attention_heads=28",
    ),
    (QWEN3_30B_A3B, {"moe_intermediate_size": None}, "has no 'moe_intermediate_size'"),
    (QWEN3_30B_A3B, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with renormalised"),
    (QWEN3_NEXT_80B_A3B, {"attention_bias": True}, "attention_bias=true is not .* allowed: false"),
    (QWEN3_NEXT_80B_A3B, {"attn_output_gate": False}, "attn_output_gate=false .* allowed: true"),
    (QWEN3_NEXT_80B_A3B, {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' .* 'silu'"),
    (QWEN3_NEXT_80B_A3B, {"layer_types": ["full_attention"]}, "1 entries; allowed: .*layers=48"),
    (
        QWEN3_NEXT_80B_A3B,
        {"layer_types": ["sliding_attention"] * 47 + ["full_attention"]},
        "'sliding_attention' is not supported; allowed: 'linear_attention', 'full_attention'",
    ),
    (QWEN3_NEXT_80B_A3B, {"full_attention_interval": 5}, "last layer has 'linear_attention'"),
    (QWEN3_NEXT_80B_A3B, {"mlp_only_layers": [47]}, "last layer has .* experts=False"),
    (QWEN3_NEXT_80B_A3B, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2 .* 1"),
    (QWEN3_NEXT_80B_A3B, {"linear_key_head_dim": None}, "has no 'linear_key_head_dim'"),
    (
        QWEN3_NEXT_80B_A3B,
        {"shared_expert_intermediate_size": None},
        "has no 'shared_expert_intermediate_size'",
    ),
    (
        QWEN3_NEXT_80B_A3B,
        {"shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size=0 is not supported",
    ),
    (QWEN3_5_35B_A3B, {"attention_bias": True}, "attention_bias=true is not .* allowed: false"),
    (QWEN3_5_35B_A3B, {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' .* 'swish'"),
    (QWEN3_5_35B_A3B, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' .* 'float32'"),
    (QWEN3_5_35B_A3B, {"norm_topk_prob": False}, "norm_topk_prob=false is not .* allowed: true"),
    (QWEN3_5_35B_A3B, {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] is not .* allowed: \[\]"),
    (QWEN3_5_35B_A3B, {"layer_scale": True}, "layer_scale=true is not .* allowed: false"),
    (QWEN3_5_35B_A3B, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2 is not .* allowed: 1"),
    (QWEN3_5_35B_A3B, {"mtp_use_dedicated_embeddings": True}, "dedicated_embeddings=true is not"),
    (QWEN3_5_35B_A3B, {"num_experts": None}, "num_experts=None; allowed: experts"),
    (QWEN3_5_27B, {"num_experts": 8}, "num_experts=8; allowed: none"),
    (QWEN3_5_27B, {"text_config": None}, "has no text_config; allowed"),
    (
        QWEN3_5_27B,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type='yarn' is not .* allowed: 'default'",
    ),
    (QWEN2_5_7B, {"use_sliding_window": True}, "use_sliding_window=true is not supported"),
    (QWEN2_5_7B, {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
    (MIXTRAL_8X7B, {"sliding_window": 4096}, "sliding_window=4096 is not .* allowed: null"),
    (LLAMA_3_1_8B, {"attention_bias": True}, "attention_bias=true is not"),
    (LLAMA_3_1_8B, {"mlp_bias": True}, "mlp_bias=true is not"),
    (
        LLAMA_3_1_8B,
        {"rope_scaling": {**LLAMA3, "low_freq_factor": None}},
        r"no 'low_freq_factor', which \['LlamaForCausalLM'\] needs",
    ),
    (
        LLAMA_3_1_8B,
        {"rope_scaling": {**LLAMA3, "factor": None}},
        r"no 'factor', which \['LlamaForCausalLM'\] needs",
    ),
    (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias=true is not"),
    (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=false is not .* allowed: true"),
    (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads=8 is not .* allowed: 128"),
    (DEEPSEEK_V3, {"num_experts_per_tok": 4}, "num_experts_per_tok=4 with .* allowed: .*=8"),
    (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax' is not .* 'sigmoid'"),
    (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy' is not .* 'noaux_tc'"),
    (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob=false is not .* allowed: true"),
    (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not .* allowed: 1"),
    (DEEPSEEK_V3, {"rope_scaling": {**YARN, "type": "linear"}}, "'linear' .* 'default', 'yarn'"),
    (DEEPSEEK_V3, {"rope_scaling": {**YARN, "mscale": None}}, "mscale_all_dim=1.0 .* allowed: 0"),
    (
        DEEPSEEK_V3,
        {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0}},
        "mscale=2.0 is not .*Deepseek.*allowed: 1.0",
    ),
    (DEEPSEEK_V3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not .*: 1.0"),
    (
        GLM_4_7_FLASH,
        {"first_k_dense_replace": 2},
        "first_k_dense_replace=2 and mlp_layer_types .ab",
    ),
    (GLM_4_7_FLASH, {"first_k_dense_replace": None}, "has no 'first_k_dense_replace'"),
    (
        GLM_4_7_FLASH,
        {"mlp_layer_types": ["sparse", "dense", *["sparse"] * 45]},
        "first_k_dense_replace=1 and mlp_layer_types name other dense layers; allowed: first_k_d",
    ),
    (DEEPSEEK_V3_2, {"index_topk": None}, "has no 'index_topk', which"),
    (DEEPSEEK_V3_2, {"index_topk": 0}, "index_topk=0 is not supported; allowed: an integer from 1"),
    (DEEPSEEK_V3_2, {"q_lora_rank": None}, "has no 'q_lora_rank', which"),
    (DEEPSEEK_V3_2, {"index_head_dim": 32}, "index_head_dim=32 is below qk_rope_head_dim=64, .*64"),
    (DEEPSEEK_V3_2, {"indexer_rope_interleave": True}, "=true is not .* allowed: false"),
    (DEEPSEEK_V3_2, {"layer_types": ["full_attention"] * 61}, "allowed: 'indexed_attention'"),
    (DEEPSEEK_V3_2, {"mlp_layer_types": ["dense", *["sparse"] * 60]}, "=3 and mlp_layer_types nam"),
    (GLM_5, {"indexer_rope_interleave": None}, "indexer_rope_interleave=false is .* allowed: true"),
    (GLM_5, {"index_topk_freq": 4}, "index_topk_freq=4 is not .*share the keys .* in each layer"),
    (GLM_5, {"index_topk_pattern": "FS" * 39}, "index_topk_pattern='FSFS.* in each layer"),
    (GLM_5, {"indexer_types": ["full", "shared"] * 39}, "indexer_types=.* an indexer in each lay"),
    (DEEPSEEK_V3, {"rope_scaling": {**YARN, "attention_factor": 2.0}}, "attention_factor=2.0 is"),
    (DEEPSEEK_V3, {"rope_scaling": {**YARN, "truncate": False}}, "truncate=false is not"),
    (KIMI_K25, {"text_config": None}, "no text_config; allowed: the fields of the language model"),
    (KIMI_K25, {"tie_word_embeddings": True}, "tie_word_embeddings=True differs from text_config"),
    (KIMI_K25, {"n_group": 2}, "num_experts_per_tok=8 with topk_group=1 of n_group=2"),
    (GLM_4_5, {"num_experts_per_tok": 1, "norm_topk_prob": None}, "norm_topk_prob=true"),
    (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func='softmax' is not .* 'sigmoid'"),
    (MINIMAX_M2, {"use_routing_bias": False}, "use_routing_bias=false is not .* allowed: true"),
    (MINIMAX_M2, {"use_qk_norm": False}, "use_qk_norm=false is not .* allowed: true"),
    (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type='per_head' is not .* 'per_layer'"),
    (MINIMAX_M2, {"attention_bias": True}, "attention_bias=true is not .* allowed: false"),
    (MINIMAX_M2, {"sliding_window": 4096}, "sliding_window=4096 is not .* allowed: null"),
    (MINIMAX_M2, {"attn_type_list": [0, 1]}, r"attn_type_list=\[0, 1\] is not .* allowed: \[1, 1"),
    (
        MINIMAX_M2,
        {"shared_intermediate_size": 8},
        "shared_intermediate_size=8 is not .* allowed: 0",
    ),
    (
        MINIMAX_M2,
        {"routed_scaling_factor": 2.5},
        "routed_scaling_factor=2.5 is not .* allowed: 1.0",
    ),
    (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not .* allowed: 0.0"),
    (DEEPSEEK_V3_2, {"mlp_bias": True}, "mlp_bias=true is not .* allowed: false"),
    (MINIMAX_M2, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not .* allowed: 0.0"),
    (MINIMAX_M2, {"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta=2.0 is not .* allowed: 1.0"),
    (MINIMAX_M2, {"num_local_experts": None}, "has no 'num_local_experts'"),
    (
        MINIMAX_M2,
        {"partial_rotary_factor": 0.25},
        "rotary_dim=64 and partial_rotary_factor=0.25 of head_dim=128 differ; allowed: one of",
    ),
    (GPT_OSS_20B, {"attention_bias": False}, "attention_bias=false is not .* allowed: true"),
    (GPT_OSS_20B, {"hidden_act": "gelu"}, "hidden_act='gelu' is not .* allowed: 'silu'"),
    (GPT_OSS_20B, {"layer_types": ["full_attention"] * 24}, "layer_types=.* allowed: .'sliding_"),
    (GPT_OSS_20B, {"sliding_window": None}, "has no 'sliding_window', which"),
    (GPT_OSS_20B, {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 is not .* allowed: 1e-05"),
    (GPT_OSS_20B, {"swiglu_limit": 8.0}, "swiglu_limit=8.0 is not .* allowed: 7.0"),
    (GPT_OSS_20B, {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not .* allowed: 1.702"),
    (GPT_OSS_20B, {"experts_per_token": 2}, "experts_per_token=2 is not .* allowed: 4"),
    (GPT_OSS_20B, {"rope_scaling": None}, "rope_type='default' is not .* allowed: 'yarn'"),
    (
        GPT_OSS_20B,
        {"rope_scaling": {**GPT_OSS_20B["rope_scaling"], "attention_factor": 2.0}},
        "attention_factor=2.0 is not",
    ),
]


@pytest.fixture
def own_families() -> None:
    """Know the families of this package alone, whatever another test of the process planned."""
    base.use_family("")


@pytest.mark.usefixtures("own_families")
@pytest.mark.parametrize(("config", "change", "message"), REFUSED)
def test_a_config_that_cannot_be_expressed_is_refused_by_name(config, change, message):
    changed = {name: value for name, value in {**config, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        check_fields(changed)
        get_family(changed).config_map(changed)


@pytest.mark.usefixtures("own_families")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_field_that_the_family_does_not_read_is_refused_by_name(config):
    changed = config | {"final_logit_softcapping": 30.0}
    with pytest.raises(ConfigError, match=r"config.json: final_logit_softcapping=30.0 is not read"):
        check_no_unread_field(changed)


@pytest.mark.usefixtures("own_families")
def test_a_field_of_another_family_is_refused_and_one_without_effect_is_not():
    check_no_unread_field(QWEN3_0_6B | {"use_cache": True, "_name_or_path": "", "index_topk": None})
    with pytest.raises(ConfigError, match=r"index_topk=8 is not read by the family 'qwen3', which"):
        check_no_unread_field(QWEN3_0_6B | {"index_topk": 8})


@pytest.mark.usefixtures("own_families")
def test_a_field_that_only_the_draft_model_reads_is_not_refused(monkeypatch):
    config = DEEPSEEK_V3 | {"draft_scale": 2.0, "num_hidden_layers": 4}
    with pytest.raises(ConfigError, match=r"draft_scale=2\.0 is not read"):
        check_no_unread_field(config)
    drafts = replace(get_family(config), vllm_drafts=lambda config: config["draft_scale"] and ())
    monkeypatch.setitem(base._FAMILIES, drafts.architecture, drafts)
    check_no_unread_field(config)


# Fields of published files that their families do not compute with.
@pytest.mark.usefixtures("own_families")
@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (QWEN2_5_7B, {"use_mrope": False, "max_window_layers": 24}),  # Qwen2.5-0.5B
        (
            QWEN3_30B_A3B,  # Qwen3-Coder-30B-A3B
            {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
        ),
        (
            LLAMA_3_1_8B,  # SmolLM2, Falcon3, Vicuna
            {
                "is_llama_config": True,
                "rope_interleaved": False,
                "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
                "activation": "swiglu",
                "max_sequence_length": 2048,
            },
        ),
    ],
)
def test_a_field_of_published_files_that_switches_nothing_on_passes(config, fields):
    check_fields(config | fields)
    check_no_unread_field(config | fields)


@pytest.mark.usefixtures("own_families")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_without_a_causal_mask_is_refused(config):
    with pytest.raises(ConfigError, match="is_causal=false is not supported"):
        get_family(config).config_map(config | {"is_causal": False})


def test_rope_is_read_where_either_transformers_keeps_it():
    plain = read_rope({"rope_theta": 5.0})
    assert (plain["rope_type"], plain["rope_theta"]) == ("default", 5.0)
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert read_rope(new)["rope_theta"] == 7.0
    old = {"rope_theta": 5, "rope_scaling": {"type": "yarn"}, "partial_rotary_factor": 0.5}
    assert read_rope(old)["rope_type"] == "yarn"
    assert read_rope(old)["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (LLAMA_2_7B, "Llama"), (QWEN2_5_7B, "Qwen2"), (QWEN3_0_6B, "Qwen3"),
        (QWEN3_30B_A3B, "Qwen3Moe"), (MIXTRAL_8X7B, "Mixtral"), (DEEPSEEK_V3, "DeepseekV3"),
        (GLM_4_5, "Glm4Moe"), (GLM_4_7_FLASH, "Glm4MoeLite"), (MINIMAX_M2, "MiniMaxM2"),
        (GLM_5, "GlmMoeDsa"),
    ],
)  # fmt: skip
def test_a_config_without_rope_theta_has_that_of_transformers(config, architecture):
    import transformers  # slow to import

    bare = {name: value for name, value in config.items() if not name.startswith("rope_")}
    expected = getattr(transformers, f"{architecture}Config")(**bare).rope_parameters["rope_theta"]
    assert get_family(bare).config_map(bare)["rotary_base"] == expected


@pytest.mark.parametrize("name", ["rotary_dim", "scoring_func", "use_routing_bias"])
def test_what_a_server_of_minimax_m2_reads_from_config_is_required(name):
    family = get_family(MINIMAX_M2)
    without = {key: value for key, value in MINIMAX_M2.items() if key != name}
    with pytest.raises(ConfigError, match=f"no '{name}', which .'MiniMaxM2ForCausalLM'. needs"):
        family.vllm_weights(without)
    family.config_map(without)


@pytest.mark.parametrize(
    "fields",
    [{}, {"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}],
)
def test_minimax_m2_rotates_half_of_a_head_by_either_field(fields):
    config = {**MINIMAX_M2, **fields}
    if fields:
        del config["rotary_dim"]
    assert get_family(config).config_map(config)["rotary_percent"] == 0.5


def test_the_first_llama_has_as_many_groups_as_heads_in_training_and_on_servers():
    sizes, family = get_model_sizes(LLAMA_7B), get_family(LLAMA_7B)
    assert (sizes.num_attention_heads, sizes.num_query_groups) == (32, 32)
    assert family.vllm_weights(LLAMA_7B) == family.vllm_weights(LLAMA_2_7B)


SCALED = [
    ({"type": "linear", "factor": 4.0}, 16384),
    ({"type": "dynamic", "factor": 4.0}, 4096),  # beyond, it depends on the length of a sequence
    ({**LLAMA3, "original_max_position_embeddings": 1024}, 4096),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 2048),
    ({"type": "longrope", "original_max_position_embeddings": 1024}, 1024),
    ({"rope_type": "default"}, 4096),
    (None, 4096),
]


@pytest.mark.parametrize(("scaling", "positions"), SCALED)
def test_a_model_has_the_positions_that_its_scaling_leaves_or_adds(scaling, positions):
    assert count_positions({**LLAMA_2_7B, "rope_scaling": scaling}) == positions
    assert count_positions({**LLAMA_2_7B, "rope_parameters": scaling}) == positions


def test_the_original_context_is_where_transformers_looks_for_it():
    yarn, fields = {"type": "yarn", "factor": 2.0}, {"max_position_embeddings": 4096}
    for more, inner, expected in ((fields, {}, 4096), (fields, {"original": 64}, 64)):
        scaling = {**yarn, **{f"{n}_max_position_embeddings": v for n, v in inner.items()}}
        config = {**QWEN3_0_6B, **more, "rope_scaling": scaling}
        parameters = get_family(config).config_map(config)["rope_parameters"]
        assert parameters["original_max_position_embeddings"] == expected
        config["original_max_position_embeddings"] = 128  # before both
        parameters = get_family(config).config_map(config)["rope_parameters"]
        assert parameters["original_max_position_embeddings"] == 128


DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
BOTH = [
    ({"rope_scaling": {"type": "default"}, "rope_parameters": DEFAULT, "rope_theta": 5e5}, ""),
    ({"rope_scaling": DEFAULT, "rope_parameters": DEFAULT, "rope_theta": 1e4}, ""),
    ({"rope_scaling": {**LLAMA3, "rope_theta": 5e5},
      "rope_parameters": {**LLAMA3, "rope_type": None, "type": "llama3"}, "rope_theta": 5e5}, ""),
    ({"rope_scaling": {}, "rope_parameters": DEFAULT}, ""),
    ({"rope_scaling": None, "rope_parameters": DEFAULT, "rope_theta": 1e4}, ""),
    ({"rope_scaling": LLAMA3, "rope_parameters": DEFAULT, "rope_theta": 1e4},
     "rope_scaling={.*'llama3'.*} and rope_parameters={'rope_type': 'default', .*} differ; allow"),
    ({"rope_scaling": {"rope_theta": 1e4}, "rope_parameters": DEFAULT}, "differ; allowed: one of"),
    ({"rope_scaling": {"type": "default"}, "rope_parameters": DEFAULT}, "differ; allowed: one of"),
    ({"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}, "rope_scaling": DEFAULT},
     "differ; allowed: one of them, or equal values"),
    ({"rope_scaling": {"type": "linear", "rope_type": "default"}, "rope_theta": 1e4},
     "rope_scaling has rope_type='default' and type='linear'; allowed: one of them, or equal"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BOTH)
def test_rope_in_two_fields_is_what_transformers_reads_or_refused(fields, message):
    """Compare with transformers, which reads rope_scaling first, and so does vLLM."""
    config = {**LLAMA_3_1_8B, "rope_scaling": None, "rope_theta": None, **fields}
    config = {name: value for name, value in config.items() if value is not None}
    if message:
        with pytest.raises(ConfigError, match=f"^config.json: .*{message}"):
            get_family(config).config_map(config)
        return
    from transformers import LlamaConfig  # slow to import

    expected = LlamaConfig(**config).rope_parameters
    assert {name: expected[name] for name in ("rope_type", "rope_theta")} == {
        name: read_rope(config)[name] for name in ("rope_type", "rope_theta")
    }
