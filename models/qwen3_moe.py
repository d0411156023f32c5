"""Qwen3 mixture of experts (Qwen3MoeForCausalLM)."""

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
    expert_mlp_weights,
    head_weights,
)
from mcore_rl.reshard.rules import Weight


def _is_moe(config: HFConfig, layer: int) -> bool:
    step = config.get("decoder_sparse_step", 1)
    return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % step == 0


def _num_experts(config: HFConfig) -> int:
    """transformers 5 writes num_local_experts where the published checkpoints have num_experts."""
    return int(config.get("num_local_experts") or field(config, "num_experts"))


def config_map(config: HFConfig) -> dict[str, Any]:
    if config.get("attention_bias"):
        raise ConfigError(
            "config.json: attention_bias=true is not supported for Qwen3; allowed: false"
        )
    num_layers = field(config, "num_hidden_layers")
    return {
        **decoder_config(config),
        "qk_layernorm": True,
        "num_moe_experts": _num_experts(config),
        "moe_router_topk": field(config, "num_experts_per_tok"),
        "moe_ffn_hidden_size": field(config, "moe_intermediate_size"),
        "moe_layer_freq": [int(_is_moe(config, layer)) for layer in range(num_layers)],
        # Softmax over the chosen experts only equals softmax, choice and renormalisation.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


def _weights(config: HFConfig, padded_vocab: int) -> Iterator[Weight]:
    experts, ffn = _num_experts(config), field(config, "moe_intermediate_size")
    yield from embedding_weights(config, padded_vocab)
    for layer in range(field(config, "num_hidden_layers")):
        yield from attention_weights(config, layer, qk_norm=True)
        if _is_moe(config, layer):
            yield from expert_mlp_weights(config, layer, num_experts=experts, ffn=ffn)
        else:
            yield from dense_mlp_weights(config, layer)
    yield from head_weights(config, padded_vocab)


def weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return tuple(_weights(config, padded_vocab))


FAMILY = register(Family("qwen3_moe", "Qwen3MoeForCausalLM", config_map, decoder_layers, weights))
