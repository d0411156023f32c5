"""Llama 2 and 3, dense (LlamaForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig, field, register, require, rope
from mcore_rl.models.parts import (
    LayerPlace,
    attention_weights,
    common_config,
    decoder_layers,
    decoder_weights,
    dense_mlp_weights,
    grouped_query_config,
)
from mcore_rl.models.vllm_parts import (
    vllm_attention,
    vllm_decoder,
    vllm_dense_mlp,
    vllm_norms,
)
from mcore_rl.reshard.rules import Weight

# What Megatron's scaling has built in (models/common/embeddings/rotary_pos_embedding.py:85).
_BUILT_IN = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def _rope_config(config: HFConfig) -> dict[str, Any]:
    found = rope(config)
    arguments = {"rotary_base": float(found["rope_theta"])}
    if found["rope_type"] == "default":
        return arguments
    if found["rope_type"] != "llama3":
        raise ConfigError(
            f"config.json: rope_type={found['rope_type']!r} is not supported for "
            f"{config.get('architectures')}; allowed: 'default', 'llama3'"
        )
    for name, built_in in _BUILT_IN.items():
        if found.get(name) != built_in:
            raise ConfigError(
                f"config.json: rope_type='llama3' with {name}={found.get(name)} is not supported; "
                f"allowed: {built_in}"
            )
    return {**arguments, "rope_scaling": True, "rope_scaling_factor": float(field(found, "factor"))}


def config_map(config: HFConfig) -> dict[str, Any]:
    require(config, {"attention_bias": False, "mlp_bias": False})
    return {**common_config(config), **grouped_query_config(config), **_rope_config(config)}


def _layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from attention_weights(config, at)
    yield from dense_mlp_weights(config, at)


def weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return decoder_weights(config, padded_vocab, _layer)


def _vllm_layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from vllm_norms(config, at)
    yield from vllm_attention(config, at)
    yield from vllm_dense_mlp(config, at)


def vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return vllm_decoder(config, _vllm_layer)


FAMILY = register(
    Family("llama", "LlamaForCausalLM", config_map, decoder_layers, weights, vllm_weights)
)
