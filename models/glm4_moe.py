"""GLM-4.5, 4.6 and 4.7, mixture of experts (Glm4MoeForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.models.base import Family, HFConfig, read_rope, register
from mcore_rl.models.parts import (
    Layer,
    count_mtp_layers,
    get_layer_spec,
    map_attention_weights,
    map_decoder_config,
    map_decoder_weights,
    map_shared_expert_config,
    map_shared_expert_mlp_weights,
)
from mcore_rl.models.vllm_parts import (
    map_vllm_attention,
    map_vllm_decoder,
    map_vllm_drafts,
    map_vllm_norms,
    map_vllm_shared_expert_mlp,
)
from mcore_rl.reshard.rules import Weight


def map_config(config: HFConfig) -> dict[str, Any]:
    return {
        **map_decoder_config(config),
        # transformers' default where the config says nothing
        "rotary_percent": float(read_rope(config).get("partial_rotary_factor") or 0.5),
        "add_qkv_bias": bool(config.get("attention_bias")),
        "qk_layernorm": bool(config.get("use_qk_norm")),
        **map_shared_expert_config(config),
    }


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    qk_norm, qkv_bias = bool(config.get("use_qk_norm")), bool(config.get("attention_bias"))
    yield from map_attention_weights(config, layer, qk_norm=qk_norm, qkv_bias=qkv_bias)
    yield from map_shared_expert_mlp_weights(config, layer)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer, count_mtp_layers(config))


def _map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_vllm_norms(config, layer)
    qk_norm, qkv_bias = bool(config.get("use_qk_norm")), bool(config.get("attention_bias"))
    yield from map_vllm_attention(config, layer, qk_norm=qk_norm, qkv_bias=qkv_bias)
    yield from map_vllm_shared_expert_mlp(config, layer, float32_router=True)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer)


def map_drafts(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_drafts(config, _map_vllm_layer)


FAMILY = register(
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        count_mtp_layers,
        map_drafts,
        defaults={"first_k_dense_replace": 1},
    )
)
