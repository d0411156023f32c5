"""Qwen2 and Qwen2.5, dense (Qwen2ForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.models.base import Family, HFConfig, register
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
    vllm_norms,
)
from mcore_rl.reshard.rules import Weight


def config_map(config: HFConfig) -> dict[str, Any]:
    return {**decoder_config(config), "add_qkv_bias": True}


def _layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from attention_weights(config, at, qkv_bias=True)
    yield from dense_mlp_weights(config, at)


def weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return decoder_weights(config, padded_vocab, _layer)


def _vllm_layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from vllm_norms(config, at)
    yield from vllm_attention(config, at, qkv_bias=True)
    yield from vllm_dense_mlp(config, at)


def vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return vllm_decoder(config, _vllm_layer)


FAMILY = register(
    Family("qwen2", "Qwen2ForCausalLM", config_map, decoder_layers, weights, vllm_weights)
)
