"""Qwen3 mixture of experts (Qwen3MoeForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.models.base import Family, HFConfig, field, register, require
from mcore_rl.models.moe_parts import expert_mlp_weights, softmax_router_config
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
    vllm_dense_mlp,
    vllm_experts,
    vllm_norms,
    vllm_router,
)
from mcore_rl.reshard.rules import Weight


def _is_moe(config: HFConfig, layer: int) -> bool:
    step = config.get("decoder_sparse_step") or 1
    return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % step == 0


def _num_experts(config: HFConfig) -> int:
    """transformers 5 writes num_local_experts where the published checkpoints have num_experts."""
    return int(config.get("num_local_experts") or field(config, "num_experts"))


def config_map(config: HFConfig) -> dict[str, Any]:
    require(config, {"attention_bias": False})
    num_layers = field(config, "num_hidden_layers")
    return {
        **decoder_config(config),
        "qk_layernorm": True,
        "num_moe_experts": _num_experts(config),
        "moe_ffn_hidden_size": field(config, "moe_intermediate_size"),
        "moe_layer_freq": [int(_is_moe(config, layer)) for layer in range(num_layers)],
        **softmax_router_config(config, renormalised=config.get("norm_topk_prob", False)),
    }


def _layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from attention_weights(config, at, qk_norm=True)
    if _is_moe(config, at.layer):
        ffn = field(config, "moe_intermediate_size")
        yield from expert_mlp_weights(config, at, num_experts=_num_experts(config), ffn=ffn)
    else:
        yield from dense_mlp_weights(config, at)


def weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return decoder_weights(config, padded_vocab, _layer)


def _vllm_layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from vllm_norms(config, at)
    yield from vllm_attention(config, at, qk_norm=True)
    if _is_moe(config, at.layer):
        yield vllm_router(config, at, _num_experts(config))
        ffn = field(config, "moe_intermediate_size")
        yield from vllm_experts(config, at, _num_experts(config), ffn)
    else:
        yield from vllm_dense_mlp(config, at)


def vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return vllm_decoder(config, _vllm_layer)


FAMILY = register(
    Family("qwen3_moe", "Qwen3MoeForCausalLM", config_map, decoder_layers, weights, vllm_weights)
)
