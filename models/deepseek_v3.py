"""Multi-head latent attention: DeepSeek-V3, R1 and V3.1, Kimi K2, Moonlight, GLM-4.7-Flash.

The first four are DeepseekV3ForCausalLM, the last is Glm4MoeLiteForCausalLM: the same tensors and
the same arithmetic, another config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig, check_values, get_field, read_rope, register
from mcore_rl.models.parts import (
    Layer,
    count_mtp_layers,
    get_layer_spec,
    has_experts,
    map_common_config,
    map_decoder_weights,
    map_dense_mlp_weights,
    map_shared_expert_config,
    map_shared_expert_mlp_weights,
)
from mcore_rl.models.rope import read_scaling
from mcore_rl.models.vllm_parts import (
    build_vllm_weight,
    map_vllm_decoder,
    map_vllm_norms,
    map_vllm_shared_expert_mlp,
)
from mcore_rl.reshard.rules import Concat, Replicated, Split, Weight


def _map_latent_config(config: HFConfig) -> dict[str, Any]:
    """Return MLATransformerConfig arguments of the attention.

    The norms of the latents use rms_norm_eps, as in vLLM; transformers always uses 1e-6 there.
    """
    heads = get_field(config, "num_attention_heads")
    check_values(
        config, {"attention_bias": False, "rope_interleave": True, "num_key_value_heads": heads}
    )
    return {
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": get_field(config, "kv_lora_rank"),
        "qk_head_dim": get_field(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": get_field(config, "qk_rope_head_dim"),
        "v_head_dim": get_field(config, "v_head_dim"),
        "qk_layernorm": True,
    }


def _map_rope_config(config: HFConfig) -> dict[str, Any]:
    """Return MLATransformerConfig arguments of rotary embeddings, plain or scaled by YaRN.

    YaRN: arXiv:2309.00071. Cosine and sine are scaled by mscale / mscale_all_dim, attention scores
    by mscale_all_dim. If neither is set, cosine and sine by the factor of mscale=1; if one is,
    transformers and vLLM differ. vLLM takes any other scaling of latent attention for YaRN
    (model_executor/models/deepseek_v2.py:1115).
    """
    rope = read_rope(config)
    check_values(rope, {"partial_rotary_factor": 1.0})
    base = float(rope["rope_theta"])
    if rope["rope_type"] == "default":
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    scaling = read_scaling(config, rope, kinds=("yarn",))
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    allowed: dict[str, Any] = {"attention_factor": None, "truncate": True}
    if all_dim and not mscale:
        allowed["mscale_all_dim"] = 0
    if mscale and not all_dim:
        allowed["mscale"] = 1.0
    check_values({**scaling, "architectures": config.get("architectures")}, allowed)
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": float(scaling["factor"]),
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "mscale": mscale or 1.0,
        "mscale_all_dim": all_dim or 0.0,
    }


def map_config(config: HFConfig) -> dict[str, Any]:
    return {
        **map_common_config(config),
        **_map_latent_config(config),
        **_map_rope_config(config),
        **map_shared_expert_config(config),
    }


def _map_lite_config(config: HFConfig) -> dict[str, Any]:
    """Return the arguments of GLM-4.7-Flash.

    Dense layers are those of mlp_layer_types in transformers, by default the first, and of
    first_k_dense_replace in vLLM and published configs.
    """
    num_layers, dense = (
        get_field(config, name) for name in ("num_hidden_layers", "first_k_dense_replace")
    )
    kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (num_layers - 1)]
    if kinds != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        given = "" if config.get("mlp_layer_types") else " (absent: the first layer is dense)"
        raise ConfigError(
            f"config.json: first_k_dense_replace={dense} and mlp_layer_types{given} name other "
            f"dense layers; allowed: first_k_dense_replace={kinds.count('dense')}, and dense "
            "layers before all others"
        )
    return map_config(config)


def _map_attention(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map latent attention: down-projections are replicated, up-projections split by head.

    Megatron fuses the norm of a latent into the up-projection that follows it.
    """
    hidden, heads = get_field(config, "hidden_size"), get_field(config, "num_attention_heads")
    rank, rotary = get_field(config, "kv_lora_rank"), get_field(config, "qk_rope_head_dim")
    nope, value = get_field(config, "qk_nope_head_dim"), get_field(config, "v_head_dim")
    q_rank, q_size, mcore = config.get("q_lora_rank"), heads * (nope + rotary), "self_attention."

    def replicate(name: str, hf: str, *shape: int) -> Weight:
        return layer.build_weight(name, Replicated(layer.build_tensor(f"{hf}.weight", *shape)))

    def split_heads(name: str, hf: str, rows: int, columns: int, dim: int = 0) -> Weight:
        rule = Split(layer.build_tensor(f"self_attn.{hf}.weight", rows, columns), dim)
        return layer.build_weight(f"{mcore}{name}.weight", rule, "tp")

    def map_up_projection(
        name: str, hf: str, norm: str, rows: int, columns: int
    ) -> Iterator[Weight]:
        yield replicate(f"{mcore}{name}.layer_norm_weight", f"self_attn.{norm}", columns)
        yield split_heads(name, hf, rows, columns)

    yield replicate("input_layernorm.weight", "input_layernorm", hidden)
    if q_rank is None:
        yield split_heads("linear_q_proj", "q_proj", q_size, hidden)
    else:
        yield replicate(mcore + "linear_q_down_proj.weight", "self_attn.q_a_proj", q_rank, hidden)
        yield from map_up_projection(
            "linear_q_up_proj", "q_b_proj", "q_a_layernorm", q_size, q_rank
        )
    down = "self_attn.kv_a_proj_with_mqa"
    yield replicate(mcore + "linear_kv_down_proj.weight", down, rank + rotary, hidden)
    yield from map_up_projection(
        "linear_kv_up_proj", "kv_b_proj", "kv_a_layernorm", heads * (nope + value), rank
    )
    yield split_heads("linear_proj", "o_proj", hidden, heads * value, dim=1)


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from _map_attention(config, layer)
    if has_experts(config, layer.index):
        yield from map_shared_expert_mlp_weights(config, layer)
    else:
        yield from map_dense_mlp_weights(config, layer)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer, count_mtp_layers(config))


def _map_vllm_attention(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map latent attention: both down-projections in one replicated parameter."""
    hidden, heads = get_field(config, "hidden_size"), get_field(config, "num_attention_heads")
    rank, rotary = get_field(config, "kv_lora_rank"), get_field(config, "qk_rope_head_dim")
    nope, value = get_field(config, "qk_nope_head_dim"), get_field(config, "v_head_dim")
    q_rank, q_size = config.get("q_lora_rank"), heads * (nope + rotary)

    def replicate(name: str, *shape: int) -> Weight:
        return build_vllm_weight(
            layer,
            f"self_attn.{name}.weight",
            Replicated(layer.build_tensor(f"self_attn.{name}.weight", *shape)),
        )

    def split_heads(name: str, rows: int, columns: int, dim: int = 0) -> Weight:
        name = f"self_attn.{name}.weight"
        return build_vllm_weight(
            layer, name, Split(layer.build_tensor(name, rows, columns), dim), "tp"
        )

    kv_a = "self_attn.kv_a_proj_with_mqa.weight"
    if q_rank is None:
        yield replicate("kv_a_proj_with_mqa", rank + rotary, hidden)
        yield split_heads("q_proj", q_size, hidden)
    else:
        q_a = layer.build_tensor("self_attn.q_a_proj.weight", q_rank, hidden)
        both = Concat((q_a, layer.build_tensor(kv_a, rank + rotary, hidden)))
        yield build_vllm_weight(layer, "self_attn.fused_qkv_a_proj.weight", both)
        yield replicate("q_a_layernorm", q_rank)
        yield split_heads("q_b_proj", q_size, q_rank)
    yield replicate("kv_a_layernorm", rank)
    yield split_heads("kv_b_proj", heads * (nope + value), rank)
    yield split_heads("o_proj", hidden, heads * value, dim=1)


def _map_vllm_layer(
    config: HFConfig, layer: Layer, *, float32_router: bool = False
) -> Iterator[Weight]:
    yield from map_vllm_norms(config, layer)
    yield from _map_vllm_attention(config, layer)
    yield from map_vllm_shared_expert_mlp(config, layer, float32_router=float32_router)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer)


def _map_lite_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, partial(_map_vllm_layer, float32_router=True))


FAMILY = register(
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        count_mtp_layers,
    )
)
GLM_LITE = register(
    replace(
        FAMILY,
        name="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        config_map=_map_lite_config,
        vllm_weights=_map_lite_vllm_weights,
    )
)
