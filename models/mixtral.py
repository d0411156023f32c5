"""Mixtral mixture of experts (MixtralForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.models.base import Family, HFConfig, field, register, require
from mcore_rl.models.moe_parts import expert_weights, router_weights, softmax_router_config
from mcore_rl.models.parts import (
    LayerPlace,
    attention_weights,
    decoder_config,
    decoder_layers,
    decoder_weights,
)
from mcore_rl.models.vllm_parts import (
    vllm_attention,
    vllm_decoder,
    vllm_experts,
    vllm_norms,
    vllm_router,
)
from mcore_rl.reshard.rules import Weight


def config_map(config: HFConfig) -> dict[str, Any]:
    # Without a separate switch, a window that is set is in force.
    require(config, {"sliding_window": None})
    return {
        **decoder_config(config),
        "num_moe_experts": field(config, "num_local_experts"),
        "moe_ffn_hidden_size": field(config, "intermediate_size"),
        "moe_layer_freq": [1] * field(config, "num_hidden_layers"),
        **softmax_router_config(config, renormalised=True),
    }


def _layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    hf, num_experts = "block_sparse_moe", field(config, "num_local_experts")
    yield from attention_weights(config, at)
    yield from router_weights(config, at, num_experts, hf)
    ffn = field(config, "intermediate_size")
    yield from expert_weights(config, at, num_experts, ffn, hf, names=("w1", "w3", "w2"))


def weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return decoder_weights(config, padded_vocab, _layer)


def _vllm_layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from vllm_norms(config, at)
    yield from vllm_attention(config, at)
    hf, num_experts = "block_sparse_moe", field(config, "num_local_experts")
    yield vllm_router(config, at, num_experts, hf)
    ffn = field(config, "intermediate_size")
    yield from vllm_experts(config, at, num_experts, ffn, hf, names=("w1", "w3", "w2"))


def vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return vllm_decoder(config, _vllm_layer)


FAMILY = register(
    Family("mixtral", "MixtralForCausalLM", config_map, decoder_layers, weights, vllm_weights)
)
