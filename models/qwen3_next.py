"""Qwen3-Next: gated delta nets and gated attention with experts (Qwen3NextForCausalLM).

Gated delta net: arXiv:2412.06464. Norms are zero-centered (scaled by 1 + weight), except that of
the delta net's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import (
    Family,
    HFConfig,
    check_values,
    get_field,
    list_layer_types,
    register,
)
from mcore_rl.models.parts import (
    Layer,
    build_gated_mlp_rules,
    count_experts,
    is_sparse_layer,
    map_attention_weights,
    map_common_config,
    map_decoder_weights,
    map_dense_mlp_weights,
    map_expert_mlp_weights,
    map_gqa_config,
    map_softmax_router_config,
)
from mcore_rl.models.rope import map_rope_config
from mcore_rl.models.vllm_parts import (
    build_vllm_weight,
    map_vllm_attention,
    map_vllm_decoder,
    map_vllm_dense_mlp,
    map_vllm_experts,
    map_vllm_mlp,
    map_vllm_norms,
    map_vllm_router,
)
from mcore_rl.reshard.rules import (
    LogicalTensor,
    Replicated,
    Section,
    Split,
    StackedSections,
    Weight,
)

_LINEAR, _FULL = "linear_attention", "full_attention"
_MTP_PREFIX = "mtp.layers."
# Megatron's names of what stands around a prediction layer, and those of the checkpoint.
_MTP_NORMS = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "final_layernorm": "mtp.norm",
}


def count_mtp_layers(config: HFConfig) -> int:
    """Return num_nextn_predict_layers; 1 where config.json does not say, as in vLLM."""
    return int(config.get("num_nextn_predict_layers", 1))


def map_config(config: HFConfig) -> dict[str, Any]:
    check_values(
        config,
        {
            "attention_bias": False,
            "attn_output_gate": True,
            "output_gate_type": "silu",
            "num_nextn_predict_layers": min(1, count_mtp_layers(config)),
        },
    )
    types = list_layer_types(config)
    num_layers = get_field(config, "num_hidden_layers")
    is_sparse = [int(is_sparse_layer(config, layer)) for layer in range(num_layers)]
    if count_mtp_layers(config) and (types[-1] != _FULL or not is_sparse[-1]):
        raise ConfigError(
            f"config.json: the last layer has {types[-1]!r}, experts={bool(is_sparse[-1])}, and a "
            f"prediction layer is built like it; allowed: {_FULL!r} with experts"
        )
    return {
        **map_common_config(config, (_LINEAR, _FULL)),
        **map_gqa_config(config),
        "rotary_percent": 0.25,  # transformers' default where the config says nothing
        **map_rope_config(config),
        "qk_layernorm": True,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == _LINEAR) for kind in types],
        **{name: get_field(config, name) for name in _LINEAR_FIELDS},
        "num_moe_experts": count_experts(config),
        "moe_ffn_hidden_size": get_field(config, "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": get_field(config, "shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
        "moe_layer_freq": is_sparse,
        **map_softmax_router_config(config, renormalised=config.get("norm_topk_prob", True)),
    }


_LINEAR_FIELDS = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip


def get_layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Return Megatron's spec of hybrid layers, with a plain norm of the delta net's output.

    Raises:
        ConfigError: Neither fla nor engine/megatron/delta_net.py has the delta rule.
    """
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules, common
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    if not common.HAVE_FLA:
        raise ConfigError(
            "modules='te': gated delta nets need fla-core 0.4, which is not installed; allowed: "
            "modules='torch' (actor.modules, ...), which has them in plain torch"
        )

    class PlainNorm:
        """Builds a norm that is not zero-centered."""

        def __new__(cls, *, config: Any, submodules: Any, **arguments: Any) -> Any:
            plain = copy(config)
            plain.layernorm_zero_centered_gamma = False
            return build_module(submodules, config=plain, **arguments)

    spec = get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
    for layer in spec.layer_specs:
        modules = layer.submodules.self_attention.submodules
        if isinstance(modules, GatedDeltaNetSubmodules) and not isinstance(
            modules.out_norm, ModuleSpec
        ):
            modules.out_norm = ModuleSpec(PlainNorm, submodules=modules.out_norm)
    return spec


def _is_linear(config: HFConfig, layer: Layer) -> bool:
    return layer.mtp_index is None and list_layer_types(config)[layer.index] == _LINEAR


def _is_sparse(config: HFConfig, layer: Layer) -> bool:
    return layer.mtp_index is not None or is_sparse_layer(config, layer.index)


class _DeltaNet:
    """Tensors of the delta net of a layer, and the sections that Megatron and vLLM split."""

    def __init__(self, config: HFConfig, layer: Layer) -> None:
        _, key, value, heads, value_heads = (get_field(config, name) for name in _LINEAR_FIELDS)
        hidden, width = (
            get_field(config, "hidden_size"),
            get_field(config, "linear_conv_kernel_dim"),
        )
        group = value_heads // heads  # value heads of a key head
        self.num_heads, self.key, self.value, self.group = heads, key, group * value, group
        keys, values = heads * key, value_heads * value

        def build(name: str, *shape: int) -> LogicalTensor:
            return layer.build_tensor(f"linear_attn.{name}", *shape)

        self.qkvz = build("in_proj_qkvz.weight", 2 * (keys + values), hidden)
        self.ba = build("in_proj_ba.weight", 2 * value_heads, hidden)
        self.conv = build("conv1d.weight", 2 * keys + values, 1, width)
        self.dt_bias, self.a_log = build("dt_bias", value_heads), build("A_log", value_heads)
        self.norm = build("norm.weight", value)
        self.out = build("out_proj.weight", hidden, values)

    def build_in_proj(self) -> StackedSections:
        """Return Megatron's rule: [q; k; v; z; b; a], each of all heads."""
        key, value, group = self.key, self.value, self.group
        stride, starts = 2 * (key + value), (0, key, 2 * key, 2 * key + value)
        sections = [
            Section(0, start, size, stride)
            for start, size in zip(starts, (key, key, value, value), strict=True)
        ]
        sections += [Section(1, start, group, 2 * group) for start in (0, group)]
        return StackedSections((self.qkvz, self.ba), tuple(sections), self.num_heads)

    def build_conv(self) -> StackedSections:
        """Return the rule of the convolution: [q; k; v], each of all heads."""
        keys = self.num_heads * self.key
        sizes = zip((0, keys, 2 * keys), (self.key, self.key, self.value), strict=True)
        sections = tuple(Section(0, start, size, size) for start, size in sizes)
        return StackedSections((self.conv,), sections, self.num_heads)


def _map_delta_net(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    net, name = _DeltaNet(config, layer), "self_attention."
    norm = layer.build_tensor("input_layernorm.weight", get_field(config, "hidden_size"))
    yield layer.build_weight(name + "in_proj.layer_norm_weight", Replicated(norm))
    yield layer.build_weight(name + "in_proj.weight", net.build_in_proj(), "tp")
    yield layer.build_weight(name + "conv1d.weight", net.build_conv(), "tp")
    yield layer.build_weight(name + "dt_bias", Split(net.dt_bias, 0), "tp")
    yield layer.build_weight(name + "A_log", Split(net.a_log, 0), "tp")
    yield layer.build_weight(name + "out_norm.weight", Replicated(net.norm))
    yield layer.build_weight(name + "out_proj.weight", Split(net.out, 1), "tp")


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    if _is_linear(config, layer):
        yield from _map_delta_net(config, layer)
    else:
        yield from map_attention_weights(config, layer, qk_norm=True, gated=True)
    if not _is_sparse(config, layer):
        yield from map_dense_mlp_weights(config, layer)
        return
    ffn, num_experts = get_field(config, "moe_intermediate_size"), count_experts(config)
    yield from map_expert_mlp_weights(config, layer, num_experts=num_experts, ffn=ffn)
    size = get_field(config, "shared_expert_intermediate_size")
    fc1, fc2 = build_gated_mlp_rules(config, layer, "mlp.shared_expert", size)
    gate = Replicated(_build_shared_gate(config, layer))
    yield layer.build_weight("mlp.shared_experts.gate_weight", gate)
    yield layer.build_weight("mlp.shared_experts.linear_fc1.weight", fc1, "tp")
    yield layer.build_weight("mlp.shared_experts.linear_fc2.weight", fc2, "tp")


def _build_shared_gate(config: HFConfig, layer: Layer) -> LogicalTensor:
    return layer.build_tensor("mlp.shared_expert_gate.weight", 1, get_field(config, "hidden_size"))


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    weights = map_decoder_weights(config, padded_vocab, _map_layer)
    if not count_mtp_layers(config):
        return weights
    return (*weights, *_map_mtp(config, weights[0]))


def _map_mtp(config: HFConfig, embedding: Weight) -> Iterator[Weight]:
    """Map the prediction layer, which shares embedding and head with the model.

    It projects [embedding; hidden state], as Megatron does (vLLM's qwen3_next_mtp.py, forward).
    """
    hidden, layer = get_field(config, "hidden_size"), Layer(0, 0, _MTP_PREFIX)
    yield embedding._replace(stage="mtp", replica=True)
    for mcore, hf in _MTP_NORMS.items():
        norm = Replicated(LogicalTensor(f"{hf}.weight", (hidden,)))
        yield Weight(f"mtp.layers.0.{mcore}.weight", norm, stage="mtp")
    projection = Split(LogicalTensor("mtp.fc.weight", (hidden, 2 * hidden)), 0)
    yield Weight("mtp.layers.0.eh_proj.weight", projection, axis="tp", stage="mtp")
    yield from _map_layer(config, layer)


def _map_vllm_delta_net(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map the delta net: projections stay interleaved by key head, A_log is float32."""
    net = _DeltaNet(config, layer)

    def split(name: str, tensor: LogicalTensor, dim: int = 0, *, float32: bool = False) -> Weight:
        rule = Split(tensor, dim)
        return build_vllm_weight(layer, f"linear_attn.{name}", rule, "tp", float32=float32)

    yield split("in_proj_qkvz.weight", net.qkvz)
    yield split("in_proj_ba.weight", net.ba)
    yield build_vllm_weight(layer, "linear_attn.conv1d.weight", net.build_conv(), "tp")
    yield split("dt_bias", net.dt_bias)
    yield split("A_log", net.a_log, float32=True)
    yield build_vllm_weight(layer, "linear_attn.norm.weight", Replicated(net.norm))
    yield split("out_proj.weight", net.out, 1)


def _map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_vllm_norms(config, layer)
    if _is_linear(config, layer):
        yield from _map_vllm_delta_net(config, layer)
    else:
        yield from map_vllm_attention(config, layer, qk_norm=True, gated=True)
    if not _is_sparse(config, layer):
        yield from map_vllm_dense_mlp(config, layer)
        return
    yield map_vllm_router(config, layer, count_experts(config))
    size = get_field(config, "shared_expert_intermediate_size")
    yield from map_vllm_mlp(config, layer, "mlp.shared_expert", size, "shared_tp")
    gate = Replicated(_build_shared_gate(config, layer))
    yield build_vllm_weight(layer, "mlp.shared_expert_gate.weight", gate)
    ffn = get_field(config, "moe_intermediate_size")
    yield from map_vllm_experts(config, layer, count_experts(config), ffn)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer)


FAMILY = register(
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        count_mtp_layers,
    )
)
