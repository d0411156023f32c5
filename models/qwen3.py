"""Qwen3 dense (Qwen3ForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig, field, register
from mcore_rl.models.parts import (
    attention_weights,
    decoder_config,
    decoder_layers,
    dense_mlp_weights,
    embedding_weights,
    head_weights,
)
from mcore_rl.reshard.rules import Weight


def config_map(config: HFConfig) -> dict[str, Any]:
    if config.get("attention_bias"):
        raise ConfigError(
            "config.json: attention_bias=true is not supported for Qwen3; allowed: false"
        )
    return {**decoder_config(config), "qk_layernorm": True}


def _weights(config: HFConfig, padded_vocab: int) -> Iterator[Weight]:
    yield from embedding_weights(config, padded_vocab)
    for layer in range(field(config, "num_hidden_layers")):
        yield from attention_weights(config, layer, qk_norm=True)
        yield from dense_mlp_weights(config, layer)
    yield from head_weights(config, padded_vocab)


def weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return tuple(_weights(config, padded_vocab))


FAMILY = register(Family("qwen3", "Qwen3ForCausalLM", config_map, decoder_layers, weights))
