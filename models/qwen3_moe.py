"""Qwen3 mixture of experts (Qwen3MoeForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.models.base import Family, HFConfig, check_values, get_field, register
from mcore_rl.models.parts import (
    Layer,
    count_experts,
    get_layer_spec,
    is_sparse_layer,
    map_attention_weights,
    map_decoder_config,
    map_decoder_weights,
    map_dense_mlp_weights,
    map_expert_mlp_weights,
    map_softmax_router_config,
)
from mcore_rl.models.vllm_parts import (
    map_vllm_attention,
    map_vllm_decoder,
    map_vllm_dense_mlp,
    map_vllm_experts,
    map_vllm_norms,
    map_vllm_router,
)
from mcore_rl.reshard.rules import Weight


def map_config(config: HFConfig) -> dict[str, Any]:
    check_values(config, {"attention_bias": False, "use_qk_norm": True})
    num_layers = get_field(config, "num_hidden_layers")
    return {
        **map_decoder_config(config),
        "qk_layernorm": True,
        "num_moe_experts": count_experts(config),
        "moe_ffn_hidden_size": get_field(config, "moe_intermediate_size"),
        "moe_layer_freq": [int(is_sparse_layer(config, layer)) for layer in range(num_layers)],
        **map_softmax_router_config(config, renormalised=config.get("norm_topk_prob", False)),
    }


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_attention_weights(config, layer, qk_norm=True)
    if is_sparse_layer(config, layer.index):
        ffn = get_field(config, "moe_intermediate_size")
        yield from map_expert_mlp_weights(config, layer, num_experts=count_experts(config), ffn=ffn)
    else:
        yield from map_dense_mlp_weights(config, layer)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer)


def _map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_vllm_norms(config, layer)
    yield from map_vllm_attention(config, layer, qk_norm=True)
    if is_sparse_layer(config, layer.index):
        yield map_vllm_router(config, layer, count_experts(config))
        ffn = get_field(config, "moe_intermediate_size")
        yield from map_vllm_experts(config, layer, count_experts(config), ffn)
    else:
        yield from map_vllm_dense_mlp(config, layer)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer)


FAMILY = register(
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
    )
)
