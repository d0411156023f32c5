"""A model family of one's own: Mistral, dense (MistralForCausalLM, as version 0.2 and later).

    mcore-rl rl model.family=examples/my_family.py:FAMILY model.path=models/Mistral-7B-Instruct ...
    mcore-rl convert hf-to-mcore --family examples/my_family.py:FAMILY --model ... --output ...

Its config is Llama's with a window of attention, which later versions leave out; tensors have
Llama's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig
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
    """Return keyword arguments of Megatron's TransformerConfig and GPTModel."""
    if (window := config.get("sliding_window")) is not None:
        raise ConfigError(f"config.json: sliding_window={window} is not supported; allowed: null")
    return map_decoder_config(config)


def map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Yield the rules of Megatron's parameters of a decoder layer."""
    yield from map_attention_weights(config, layer)
    yield from map_dense_mlp_weights(config, layer)


def map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Yield the rules of vLLM's parameters of a decoder layer."""
    yield from map_vllm_norms(config, layer)
    yield from map_vllm_attention(config, layer)
    yield from map_vllm_dense_mlp(config, layer)


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    config_map=map_config,
    layer_spec=get_layer_spec,
    weights=lambda config, padded_vocab: map_decoder_weights(config, padded_vocab, map_layer),
    vllm_weights=lambda config: map_vllm_decoder(config, map_vllm_layer),
)
