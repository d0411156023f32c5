"""gpt-oss: attention sinks, sliding windows, experts with biases (GptOssForCausalLM).

A checkpoint stacks the experts of a layer. The rows of gate and up alternate, here and in Megatron
(moe_mlp_glu_interleave_size=1) and vLLM, so an expert is one tensor everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig, check_values, get_field, read_rope, register
from mcore_rl.models.parts import (
    Layer,
    get_layer_spec,
    map_attention_weights,
    map_decoder_config,
    map_decoder_weights,
    map_softmax_router_config,
)
from mcore_rl.models.vllm_parts import (
    build_vllm_weight,
    map_vllm_attention,
    map_vllm_decoder,
    map_vllm_norms,
)
from mcore_rl.reshard.rules import (
    FirstShard,
    InterleavedGateUp,
    LogicalTensor,
    Replicated,
    Rule,
    Split,
    Weight,
)

_THETA = 150000.0  # of transformers where config.json has none


def map_config(config: HFConfig) -> dict[str, Any]:
    # vLLM takes no other scaling (model_executor/models/gpt_oss.py).
    names = ("rope_type", "mscale", "mscale_all_dim", "attention_factor")
    check_values(read_rope(config), dict(zip(names, ("yarn", None, None, None), strict=True)))
    num_layers, window = (
        get_field(config, name) for name in ("num_hidden_layers", "sliding_window")
    )
    if not window:
        raise ConfigError("config.json: sliding_window=0 is not supported; allowed: at least 1")
    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]
    # vLLM has these values as constants (model_executor/models/gpt_oss.py).
    check_values(
        config,
        {
            "attention_bias": True,
            "experts_per_token": get_field(config, "num_experts_per_tok"),
            "layer_types": kinds,
            "rms_norm_eps": 1e-5,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    )
    return {
        **map_decoder_config(config | {"layer_types": None}, _THETA),
        **map_softmax_router_config(config, renormalised=True),
        "activation": "quick_gelu",  # x sigmoid(1.702 x)
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "moe_mlp_glu_interleave_size": 1,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
        "num_moe_experts": get_field(config, "num_local_experts"),
        "moe_ffn_hidden_size": get_field(config, "intermediate_size"),
        "moe_layer_freq": [1] * num_layers,
    }


def _list_expert_rules(
    config: HFConfig, layer: Layer, expert: int
) -> Iterator[tuple[str, str, Rule]]:
    """Yield module ("fc1", "fc2"), kind ("weight", "bias") and rule of an expert's parameters.

    Shards along "etp" are those of vLLM's tensor parallelism: Megatron has biases of experts on
    unsplit experts only.
    """
    hidden, ffn = get_field(config, "hidden_size"), get_field(config, "intermediate_size")

    def build_tensor(name: str, *shape: int) -> LogicalTensor:
        suffix = f"[{expert}].T" if len(shape) > 1 else f"[{expert}]"
        return layer.build_tensor(f"mlp.experts.{name}{suffix}", *shape)

    yield "fc1", "weight", InterleavedGateUp(build_tensor("gate_up_proj", 2 * ffn, hidden))
    yield "fc1", "bias", InterleavedGateUp(build_tensor("gate_up_proj_bias", 2 * ffn))
    yield "fc2", "weight", Split(build_tensor("down_proj", hidden, ffn), 1)
    yield "fc2", "bias", FirstShard(build_tensor("down_proj_bias", hidden))


def _map_router(config: HFConfig, layer: Layer) -> Iterator[tuple[str, Rule]]:
    num_experts, hidden = get_field(config, "num_local_experts"), get_field(config, "hidden_size")
    for kind, *shape in (("weight", num_experts, hidden), ("bias", num_experts)):
        yield kind, Replicated(layer.build_tensor(f"mlp.router.{kind}", *shape))


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_attention_weights(config, layer, qkv_bias=True, out_bias=True, sinks=True)
    norm = layer.build_tensor("post_attention_layernorm.weight", get_field(config, "hidden_size"))
    yield layer.build_weight("pre_mlp_layernorm.weight", Replicated(norm))
    for kind, rule in _map_router(config, layer):
        yield layer.build_weight(f"mlp.router.{kind}", rule)
    for expert in range(get_field(config, "num_local_experts")):
        for module, kind, rule in _list_expert_rules(config, layer, expert):
            name = f"mlp.experts.linear_{module}.{kind}{{expert}}"
            yield layer.build_weight(name, rule, "etp", expert=expert)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer)


def _map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    hidden, heads = get_field(config, "hidden_size"), get_field(config, "num_attention_heads")
    yield from map_vllm_norms(config, layer)
    yield from map_vllm_attention(config, layer, qkv_bias=True, module="attn")
    bias = Replicated(layer.build_tensor("self_attn.o_proj.bias", hidden))
    yield build_vllm_weight(layer, "attn.o_proj.bias", bias)
    sinks = Split(layer.build_tensor("self_attn.sinks", heads), 0)
    yield build_vllm_weight(layer, "attn.sinks", sinks, "tp")
    for kind, rule in _map_router(config, layer):
        yield build_vllm_weight(layer, f"mlp.router.{kind}", rule)
    for expert in range(get_field(config, "num_local_experts")):
        for module, kind, rule in _list_expert_rules(config, layer, expert):
            stack = {"fc1": "w13", "fc2": "w2"}[module]
            name = f"mlp.experts.routed_experts.{stack}_{kind}[{{expert}}]"
            yield build_vllm_weight(layer, name, rule, "etp", expert=expert)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer, embedding="embedding")


FAMILY = register(
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        defaults={"head_dim": 64},
    )
)
