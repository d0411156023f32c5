"""Hybrid models of gated delta nets and gated attention: all that Qwen3-Next and Qwen3.5 share.

Gated delta net: arXiv:2412.06464. Norms are zero-centered (scaled by 1 + weight), except that of
the delta net's output. The families differ in the projections of the delta net (DeltaNet).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import HFConfig, get_field, list_layer_types
from mcore_rl.models.parts import (
    Layer,
    LayerRules,
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
    DRAFT,
    build_vllm_weight,
    map_vllm_attention,
    map_vllm_decoder,
    map_vllm_dense_mlp,
    map_vllm_draft_layer,
    map_vllm_experts,
    map_vllm_mlp,
    map_vllm_norms,
    map_vllm_router,
)
from mcore_rl.reshard.rules import (
    LogicalTensor,
    Replicated,
    Rule,
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


def is_mixture_of_experts(config: HFConfig) -> bool:
    """Return whether a model is a mixture of experts."""
    return bool(config.get("num_local_experts") or config.get("num_experts"))


def count_state_bytes(config: HFConfig, tp: int = 1) -> int:
    """Count the bytes of a sequence in a delta net on one of `tp` workers; 0 of another model.

    The last inputs of the convolution and a [key, value] state of each head, in float32 as vLLM has
    the state (model_executor/layers/mamba/mamba_utils.py:141).
    """
    if not config.get("linear_num_key_heads"):
        return 0
    width, key, value, heads, value_heads = (get_field(config, name) for name in _LINEAR_FIELDS)
    inputs = (2 * heads * key + value_heads * value) * (width - 1)
    return int(4 * (inputs + value_heads * key * value) // tp)


def map_hybrid_config(config: HFConfig, num_mtp_layers: int) -> dict[str, Any]:
    """Return arguments of Megatron's TransformerConfig and of the rotary embedding.

    Raises:
        ConfigError: A prediction layer would differ from the last layer, like which Megatron
            builds it.
    """
    types = list_layer_types(config)
    is_sparse = [int(_is_sparse(config, Layer(index))) for index in range(len(types))]
    if num_mtp_layers and (types[-1] != _FULL or is_sparse[-1] != is_mixture_of_experts(config)):
        with_experts = " with experts" if is_mixture_of_experts(config) else ""
        raise ConfigError(
            f"config.json: the last layer has {types[-1]!r}, experts={bool(is_sparse[-1])}, and a "
            f"prediction layer is built like it; allowed: {_FULL!r}{with_experts}"
        )
    fields = {
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
    }
    if not is_mixture_of_experts(config):
        return fields
    shared_size = get_field(config, "shared_expert_intermediate_size")
    if not shared_size:
        raise ConfigError(
            "config.json: shared_expert_intermediate_size=0 is not supported for "
            f"{config.get('architectures')}; allowed: at least 1"
        )
    return {
        **fields,
        "num_moe_experts": count_experts(config),
        "moe_ffn_hidden_size": get_field(config, "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": shared_size,
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
    import torch
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
            norm = build_module(submodules, config=plain, **arguments)
            if type(norm).__module__.startswith("transformer_engine"):
                # Megatron compiles what calls it (ssm/gated_delta_net/common.py:369), and the
                # compiler would trace as far as its kernels, again for each layer and size.
                norm.forward = torch.compiler.disable(norm.forward)
            return norm

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
    is_sparse = layer.mtp_index is not None or is_sparse_layer(config, layer.index)
    return is_mixture_of_experts(config) and is_sparse


class DeltaNet(ABC):
    """Tensors of the delta net of a layer, and the sections that Megatron and vLLM split.

    Attributes:
        num_heads: Key heads.
        key: Rows of a key head, of q and of k.
        value: Rows of the value heads of a key head, of v and of z.
        group: Value heads of a key head.
    """

    def __init__(self, config: HFConfig, layer: Layer) -> None:
        _, key, value, heads, value_heads = (get_field(config, name) for name in _LINEAR_FIELDS)
        self._layer, self.hidden = layer, get_field(config, "hidden_size")
        self.group = value_heads // heads
        self.num_heads, self.key, self.value = heads, key, self.group * value
        keys, values = heads * key, value_heads * value
        width = get_field(config, "linear_conv_kernel_dim")
        self.conv = self.build_tensor("conv1d.weight", 2 * keys + values, 1, width)
        self.dt_bias = self.build_tensor("dt_bias", value_heads)
        self.a_log = self.build_tensor("A_log", value_heads)
        self.norm = self.build_tensor("norm.weight", value)
        self.out = self.build_tensor("out_proj.weight", self.hidden, values)

    def build_tensor(self, name: str, *shape: int) -> LogicalTensor:
        return self._layer.build_tensor(f"linear_attn.{name}", *shape)

    @abstractmethod
    def build_in_proj(self) -> StackedSections:
        """Return Megatron's rule: [q; k; v; z; b; a], each of all heads."""

    @abstractmethod
    def build_vllm_projections(self) -> tuple[Rule, Rule]:
        """Return the rules of vLLM's in_proj_qkvz and in_proj_ba."""

    def build_conv(self) -> StackedSections:
        """Return the rule of the convolution: [q; k; v], each of all heads."""
        return StackedSections((self.conv,), self.list_qkv_sections(), self.num_heads)

    def list_qkv_sections(self) -> tuple[Section, ...]:
        """Return the sections of a tensor of [q; k; v], each of all heads."""
        keys = self.num_heads * self.key
        sizes = zip((0, keys, 2 * keys), (self.key, self.key, self.value), strict=True)
        return tuple(Section(0, start, size, size) for start, size in sizes)


BuildDeltaNet = Callable[[HFConfig, Layer], DeltaNet]


def _map_delta_net(config: HFConfig, layer: Layer, net: DeltaNet) -> Iterator[Weight]:
    name = "self_attention."
    norm = layer.build_tensor("input_layernorm.weight", get_field(config, "hidden_size"))
    yield layer.build_weight(name + "in_proj.layer_norm_weight", Replicated(norm))
    yield layer.build_weight(name + "in_proj.weight", net.build_in_proj(), "tp")
    yield layer.build_weight(name + "conv1d.weight", net.build_conv(), "tp")
    yield layer.build_weight(name + "dt_bias", Split(net.dt_bias, 0), "tp")
    yield layer.build_weight(name + "A_log", Split(net.a_log, 0), "tp")
    yield layer.build_weight(name + "out_norm.weight", Replicated(net.norm))
    yield layer.build_weight(name + "out_proj.weight", Split(net.out, 1), "tp")


def _map_layer(config: HFConfig, layer: Layer, build_net: BuildDeltaNet) -> Iterator[Weight]:
    if _is_linear(config, layer):
        yield from _map_delta_net(config, layer, build_net(config, layer))
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


def map_hybrid_weights(
    config: HFConfig, padded_vocab: int, build_net: BuildDeltaNet, num_mtp_layers: int
) -> tuple[Weight, ...]:
    """Return the rules of Megatron's parameters."""
    map_layer = partial(_map_layer, build_net=build_net)
    weights = map_decoder_weights(config, padded_vocab, map_layer)
    if not num_mtp_layers:
        return weights
    return (*weights, *_map_mtp(config, weights[0], map_layer))


def _map_mtp(config: HFConfig, embedding: Weight, map_layer: LayerRules) -> Iterator[Weight]:
    """Map the prediction layer, which shares embedding and head with the model.

    It projects [embedding; hidden state], as Megatron does (vLLM's qwen3_next_mtp.py, forward).
    """
    norms, projection = _build_mtp_rules(config)
    yield embedding._replace(stage="mtp", replica=True)
    for mcore, norm in norms.items():
        yield Weight(f"mtp.layers.0.{mcore}.weight", norm, stage="mtp")
    yield Weight("mtp.layers.0.eh_proj.weight", projection, axis="tp", stage="mtp")
    yield from map_layer(config, Layer(0, 0, _MTP_PREFIX))


def _build_mtp_rules(config: HFConfig) -> tuple[dict[str, Replicated], Split]:
    """Return the norms around a prediction layer, by Megatron's name, and its projection."""
    hidden = get_field(config, "hidden_size")
    norms = {
        mcore: Replicated(LogicalTensor(f"{hf}.weight", (hidden,)))
        for mcore, hf in _MTP_NORMS.items()
    }
    return norms, Split(LogicalTensor("mtp.fc.weight", (hidden, 2 * hidden)), 0)


def _map_vllm_delta_net(layer: Layer, net: DeltaNet) -> Iterator[Weight]:
    """Map the delta net; A_log is float32."""

    def split(name: str, tensor: LogicalTensor, dim: int = 0, *, float32: bool = False) -> Weight:
        rule = Split(tensor, dim)
        return build_vllm_weight(layer, f"linear_attn.{name}", rule, "tp", float32=float32)

    for name, rule in zip(("qkvz", "ba"), net.build_vllm_projections(), strict=True):
        yield build_vllm_weight(layer, f"linear_attn.in_proj_{name}.weight", rule, "tp")
    yield build_vllm_weight(layer, "linear_attn.conv1d.weight", net.build_conv(), "tp")
    yield split("dt_bias", net.dt_bias)
    yield split("A_log", net.a_log, float32=True)
    yield build_vllm_weight(layer, "linear_attn.norm.weight", Replicated(net.norm))
    yield split("out_proj.weight", net.out, 1)


def _map_vllm_layer(config: HFConfig, layer: Layer, build_net: BuildDeltaNet) -> Iterator[Weight]:
    yield from map_vllm_norms(config, layer)
    if _is_linear(config, layer):
        yield from _map_vllm_delta_net(layer, build_net(config, layer))
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


def map_hybrid_vllm_weights(config: HFConfig, build_net: BuildDeltaNet) -> tuple[Weight, ...]:
    """Return the rules of vLLM's parameters."""
    return map_vllm_decoder(config, partial(_map_vllm_layer, build_net=build_net))


def map_hybrid_drafts(config: HFConfig, build_net: BuildDeltaNet) -> tuple[Weight, ...]:
    """Return the rules of vLLM's prediction layer (model_executor/models/qwen3_next_mtp.py:60)."""
    norms, projection = _build_mtp_rules(config)
    layer, map_layer = Layer(0, 0, _MTP_PREFIX), partial(_map_vllm_layer, build_net=build_net)
    return (
        Weight(f"{DRAFT}model.fc.weight", projection, axis="tp", stage="mtp"),
        *(
            Weight(f"{DRAFT}model.{norm.tensor.name.removeprefix('mtp.')}", norm, stage="mtp")
            for norm in norms.values()
        ),
        *map_vllm_draft_layer(config, layer, map_layer, "model.layers.0"),
    )
