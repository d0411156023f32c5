"""MiniMax-M2: experts in every layer (MiniMaxM2ForCausalLM).

Queries and keys are normed over all heads of a token, and rotated in their first dimensions. The
prediction layers that config.json declares are not in published files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import (
    Family,
    HFConfig,
    check_values,
    get_field,
    get_head_dim,
    read_rope,
    register,
)
from mcore_rl.models.parts import (
    Layer,
    get_layer_spec,
    map_attention_weights,
    map_decoder_config,
    map_decoder_weights,
    map_expert_weights,
    map_router_weights,
    map_sigmoid_router_config,
)
from mcore_rl.models.vllm_parts import (
    build_vllm_weight,
    map_vllm_attention,
    map_vllm_decoder,
    map_vllm_experts,
    map_vllm_norms,
    map_vllm_router,
)
from mcore_rl.reshard.rules import LogicalTensor, Replicated, SharedHeads, Split, Weight

_THETA = 5e6  # of transformers where config.json has none
_MOE, _EXPERT_NAMES = "block_sparse_moe", ("w1", "w3", "w2")
_BIAS = f"{_MOE}.e_score_correction_bias"
# Fields that MiniMax's earlier models had, with the values that transformers and vLLM assume.
_CONSTANT = {
    "attention_bias": False, "sliding_window": None, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "use_routing_bias": True, "router_jitter_noise": 0.0,
    "shared_intermediate_size": 0, "routed_scaling_factor": 1.0,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
}  # fmt: skip


def _read_rotary_factor(config: HFConfig) -> float:
    """Return the rotated share of a head, from rotary_dim or partial_rotary_factor."""
    factor, head_dim = read_rope(config, _THETA).get("partial_rotary_factor"), get_head_dim(config)
    rotary_dim = config.get("rotary_dim")
    if rotary_dim is None:
        return float(factor or 1.0)
    if factor is not None and factor * head_dim != rotary_dim:
        raise ConfigError(
            f"config.json: rotary_dim={rotary_dim} and partial_rotary_factor={factor} of "
            f"head_dim={head_dim} differ; allowed: one of them, or equal values"
        )
    return float(rotary_dim / head_dim)


def map_config(config: HFConfig) -> dict[str, Any]:
    num_layers = get_field(config, "num_hidden_layers")
    check_values(config, {**_CONSTANT, "attn_type_list": [1] * num_layers})
    return {
        **map_decoder_config(config, _THETA),
        "rotary_percent": _read_rotary_factor(config),
        "qk_layernorm": True,
        "qk_norm_over_all_heads": True,
        "num_moe_experts": get_field(config, "num_local_experts"),
        "moe_ffn_hidden_size": get_field(config, "intermediate_size"),
        "moe_layer_freq": [1] * num_layers,
        **map_sigmoid_router_config(config | {"routed_scaling_factor": 1.0}),
    }


def _build_norms(config: HFConfig, layer: Layer) -> dict[str, LogicalTensor]:
    """Return the norms of queries and keys, one value for each dimension of each head."""
    heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
    return {
        kind: layer.build_tensor(
            f"self_attn.{kind}_norm.weight", get_field(config, field) * get_head_dim(config)
        )
        for kind, field in heads.items()
    }


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    num_experts = get_field(config, "num_local_experts")
    yield from map_attention_weights(config, layer)
    for kind, norm in _build_norms(config, layer).items():
        yield layer.build_weight(f"self_attention.{kind}_layernorm.weight", Replicated(norm))
    yield from map_router_weights(config, layer, num_experts, _MOE)
    bias = Replicated(layer.build_tensor(_BIAS, num_experts))
    yield layer.build_weight("mlp.router.expert_bias", bias, float32=True)
    ffn = get_field(config, "intermediate_size")
    yield from map_expert_weights(config, layer, num_experts, ffn, _MOE, _EXPERT_NAMES)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer)


def _map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map a layer; routers are float32 on servers."""
    num_experts, groups = (
        get_field(config, name) for name in ("num_local_experts", "num_key_value_heads")
    )
    yield from map_vllm_norms(config, layer)
    yield from map_vllm_attention(config, layer)
    norms = _build_norms(config, layer)
    for kind, rule in (("q", Split(norms["q"], 0)), ("k", SharedHeads(norms["k"], groups))):
        yield build_vllm_weight(layer, f"self_attn.{kind}_norm.weight", rule, "tp")
    yield map_vllm_router(config, layer, num_experts, _MOE, float32=True)
    bias = Replicated(layer.build_tensor(_BIAS, num_experts))
    yield build_vllm_weight(layer, _BIAS, bias, float32=True)
    ffn = get_field(config, "intermediate_size")
    yield from map_vllm_experts(config, layer, num_experts, ffn, _MOE, _EXPERT_NAMES)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    for name in ("rotary_dim", "scoring_func", "use_routing_bias"):  # vLLM has no defaults
        get_field(config, name)
    return map_vllm_decoder(config, _map_vllm_layer)


FAMILY = register(
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        defaults={"head_dim": 128},
    )
)
