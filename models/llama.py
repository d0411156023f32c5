"""Llama 2 and 3, dense (LlamaForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig, check_values, get_field, read_rope, register
from mcore_rl.models.parts import (
    Layer,
    get_layer_spec,
    map_attention_weights,
    map_common_config,
    map_decoder_weights,
    map_dense_mlp_weights,
    map_gqa_config,
)
from mcore_rl.models.vllm_parts import (
    map_vllm_attention,
    map_vllm_decoder,
    map_vllm_dense_mlp,
    map_vllm_norms,
)
from mcore_rl.reshard.rules import Weight

# Constants of Megatron's scaling (models/common/embeddings/rotary_pos_embedding.py:85).
_BUILT_IN = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def _map_rope_config(config: HFConfig) -> dict[str, Any]:
    rope = read_rope(config)
    arguments = {"rotary_base": float(rope["rope_theta"])}
    if rope["rope_type"] == "default":
        return arguments
    if rope["rope_type"] != "llama3":
        raise ConfigError(
            f"config.json: rope_type={rope['rope_type']!r} is not supported for "
            f"{config.get('architectures')}; allowed: 'default', 'llama3'"
        )
    for name, built_in in _BUILT_IN.items():
        if rope.get(name) != built_in:
            raise ConfigError(
                f"config.json: rope_type='llama3' with {name}={rope.get(name)} is not supported; "
                f"allowed: {built_in}"
            )
    return {
        **arguments,
        "rope_scaling": True,
        "rope_scaling_factor": float(get_field(rope, "factor")),
    }


def map_config(config: HFConfig) -> dict[str, Any]:
    check_values(config, {"attention_bias": False, "mlp_bias": False})
    return {**map_common_config(config), **map_gqa_config(config), **_map_rope_config(config)}


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_attention_weights(config, layer)
    yield from map_dense_mlp_weights(config, layer)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer)


def _map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_vllm_norms(config, layer)
    yield from map_vllm_attention(config, layer)
    yield from map_vllm_dense_mlp(config, layer)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer)


FAMILY = register(
    Family("llama", "LlamaForCausalLM", map_config, get_layer_spec, map_weights, map_vllm_weights)
)
