"""Qwen3 dense (Qwen3ForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.models.base import Family, HFConfig, check_values, register
from mcore_rl.models.parts import (
    Layer,
    get_layer_spec,
    map_attention_weights,
    map_decoder_config,
    map_decoder_weights,
    map_dense_mlp_weights,
)
from mcore_rl.models.vllm_parts import (
    map_vllm_attention,
    map_vllm_decoder,
    map_vllm_dense_mlp,
    map_vllm_norms,
)
from mcore_rl.reshard.rules import Weight


def map_config(config: HFConfig) -> dict[str, Any]:
    check_values(config, {"attention_bias": False, "use_qk_norm": True})
    return {**map_decoder_config(config), "qk_layernorm": True}


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_attention_weights(config, layer, qk_norm=True)
    yield from map_dense_mlp_weights(config, layer)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer)


def _map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_vllm_norms(config, layer)
    yield from map_vllm_attention(config, layer, qk_norm=True)
    yield from map_vllm_dense_mlp(config, layer)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer)


FAMILY = register(
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        defaults={"head_dim": 128},
    )
)
