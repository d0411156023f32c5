"""GLM-4.5 and 4.6, mixture of experts (Glm4MoeForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.models.base import Family, HFConfig, register, rope
from mcore_rl.models.moe_parts import (
    has_experts,
    num_mtp_layers,
    shared_expert_config,
    shared_expert_mlp_weights,
)
from mcore_rl.models.parts import (
    LayerPlace,
    attention_weights,
    decoder_config,
    decoder_layers,
    decoder_weights,
    dense_mlp_weights,
)
from mcore_rl.models.vllm_parts import (
    vllm_attention,
    vllm_decoder,
    vllm_norms,
    vllm_shared_expert_mlp,
)
from mcore_rl.reshard.rules import Weight


def config_map(config: HFConfig) -> dict[str, Any]:
    return {
        **decoder_config(config),
        # transformers' default where the config says nothing
        "rotary_percent": float(rope(config).get("partial_rotary_factor") or 0.5),
        "add_qkv_bias": bool(config.get("attention_bias")),
        "qk_layernorm": bool(config.get("use_qk_norm")),
        **shared_expert_config(config),
    }


def _layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    qk_norm, qkv_bias = bool(config.get("use_qk_norm")), bool(config.get("attention_bias"))
    yield from attention_weights(config, at, qk_norm=qk_norm, qkv_bias=qkv_bias)
    if has_experts(config, at.layer):
        yield from shared_expert_mlp_weights(config, at)
    else:
        yield from dense_mlp_weights(config, at)


def weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return decoder_weights(config, padded_vocab, _layer, num_mtp_layers(config))


def _vllm_layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from vllm_norms(config, at)
    qk_norm, qkv_bias = bool(config.get("use_qk_norm")), bool(config.get("attention_bias"))
    yield from vllm_attention(config, at, qk_norm=qk_norm, qkv_bias=qkv_bias)
    yield from vllm_shared_expert_mlp(config, at)


def vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return vllm_decoder(config, _vllm_layer)


FAMILY = register(
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        config_map,
        decoder_layers,
        weights,
        vllm_weights,
        num_mtp_layers,
    )
)
