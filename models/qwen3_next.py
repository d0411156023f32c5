"""Qwen3-Next: gated delta nets and gated attention with experts (Qwen3NextForCausalLM)."""

from __future__ import annotations

from typing import Any

from mcore_rl.models.base import Family, HFConfig, check_values, get_field, register
from mcore_rl.models.gated_delta_net import (
    DeltaNet,
    get_layer_spec,
    map_hybrid_config,
    map_hybrid_drafts,
    map_hybrid_vllm_weights,
    map_hybrid_weights,
)
from mcore_rl.models.parts import Layer
from mcore_rl.reshard.rules import Rule, Section, Split, StackedSections, Weight


def count_mtp_layers(config: HFConfig) -> int:
    """Return num_nextn_predict_layers; 1 where config.json does not say, as in vLLM."""
    return int(config.get("num_nextn_predict_layers", 1))


def map_config(config: HFConfig) -> dict[str, Any]:
    get_field(config, "num_experts" if "num_local_experts" not in config else "num_local_experts")
    check_values(
        config,
        {
            "attention_bias": False,
            "attn_output_gate": True,
            "output_gate_type": "silu",
            "num_nextn_predict_layers": min(1, count_mtp_layers(config)),
        },
    )
    return map_hybrid_config(config, count_mtp_layers(config))


class _InterleavedDeltaNet(DeltaNet):
    """A delta net whose two projections are interleaved by key head, here and in vLLM."""

    def __init__(self, config: HFConfig, layer: Layer) -> None:
        super().__init__(config, layer)
        rows = 2 * self.num_heads * (self.key + self.value)
        self.qkvz = self.build_tensor("in_proj_qkvz.weight", rows, self.hidden)
        rows = 2 * self.num_heads * self.group
        self.ba = self.build_tensor("in_proj_ba.weight", rows, self.hidden)

    def build_in_proj(self) -> StackedSections:
        key, value, group = self.key, self.value, self.group
        stride, starts = 2 * (key + value), (0, key, 2 * key, 2 * key + value)
        sections = [
            Section(0, start, size, stride)
            for start, size in zip(starts, (key, key, value, value), strict=True)
        ]
        sections += [Section(1, start, group, 2 * group) for start in (0, group)]
        return StackedSections((self.qkvz, self.ba), tuple(sections), self.num_heads)

    def build_vllm_projections(self) -> tuple[Rule, Rule]:
        return Split(self.qkvz, 0), Split(self.ba, 0)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    num_mtp_layers = count_mtp_layers(config)
    return map_hybrid_weights(config, padded_vocab, _InterleavedDeltaNet, num_mtp_layers)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_hybrid_vllm_weights(config, _InterleavedDeltaNet)


def map_drafts(config: HFConfig) -> tuple[Weight, ...]:
    return map_hybrid_drafts(config, _InterleavedDeltaNet) if count_mtp_layers(config) else ()


FAMILY = register(
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        count_mtp_layers,
        map_drafts,
        defaults={"head_dim": 256},
    )
)
