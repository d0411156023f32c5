"""Mixtral mixture of experts (MixtralForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.models.base import Family, HFConfig, check_values, get_field, register
from mcore_rl.models.parts import (
    Layer,
    get_layer_spec,
    map_attention_weights,
    map_decoder_config,
    map_decoder_weights,
    map_expert_weights,
    map_router_weights,
    map_softmax_router_config,
)
from mcore_rl.models.vllm_parts import (
    map_vllm_attention,
    map_vllm_decoder,
    map_vllm_experts,
    map_vllm_norms,
    map_vllm_router,
)
from mcore_rl.reshard.rules import Weight


def map_config(config: HFConfig) -> dict[str, Any]:
    # Without a separate switch, a window that is set is in force.
    check_values(config, {"sliding_window": None, "router_jitter_noise": 0.0})
    return {
        **map_decoder_config(config, default_theta=1e6),
        "num_moe_experts": get_field(config, "num_local_experts"),
        "moe_ffn_hidden_size": get_field(config, "intermediate_size"),
        "moe_layer_freq": [1] * get_field(config, "num_hidden_layers"),
        **map_softmax_router_config(config, renormalised=True),
    }


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    hf, num_experts = "block_sparse_moe", get_field(config, "num_local_experts")
    yield from map_attention_weights(config, layer)
    yield from map_router_weights(config, layer, num_experts, hf)
    ffn = get_field(config, "intermediate_size")
    yield from map_expert_weights(config, layer, num_experts, ffn, hf, names=("w1", "w3", "w2"))


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer)


def _map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_vllm_norms(config, layer)
    yield from map_vllm_attention(config, layer)
    hf, num_experts = "block_sparse_moe", get_field(config, "num_local_experts")
    yield map_vllm_router(config, layer, num_experts, hf)
    ffn = get_field(config, "intermediate_size")
    yield from map_vllm_experts(config, layer, num_experts, ffn, hf, names=("w1", "w3", "w2"))


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer)


FAMILY = register(
    Family(
        "mixtral", "MixtralForCausalLM", map_config, get_layer_spec, map_weights, map_vllm_weights
    )
)
