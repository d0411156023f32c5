"""Qwen3.5 and Qwen3.6: gated delta nets and gated attention, dense or with experts.

Published checkpoints are wrappers with a vision tower (Qwen3_5MoeForConditionalGeneration), whose
language model is trained on text: its three positions of a token are equal, so that the rotary
embedding is plain, whatever mrope_section says.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig, check_values, get_field, read_rope, register
from mcore_rl.models.gated_delta_net import (
    DeltaNet,
    get_layer_spec,
    is_mixture_of_experts,
    map_hybrid_config,
    map_hybrid_vllm_weights,
    map_hybrid_weights,
)
from mcore_rl.models.parts import Layer
from mcore_rl.models.wrapper import wrap_family
from mcore_rl.reshard.rules import Rule, Section, StackedSections, Weight


def count_mtp_layers(config: HFConfig) -> int:
    return int(config.get("mtp_num_hidden_layers") or 0)


def map_config(config: HFConfig) -> dict[str, Any]:
    is_moe = "Moe" in config["architectures"][0]
    if is_mixture_of_experts(config) != is_moe:
        raise ConfigError(
            f"config.json: {config['architectures'][0]} with num_experts="
            f"{config.get('num_experts')}; allowed: {'experts' if is_moe else 'none'}"
        )
    check_values(
        config,
        {
            "attention_bias": False,
            "attn_output_gate": True,
            "layer_scale": False,
            # As x sigmoid(x) is called there; "silu" is the same.
            "output_gate_type": "silu" if config.get("output_gate_type") == "silu" else "swish",
            "mamba_ssm_dtype": "float32",
            # transformers and vLLM read none of these of this architecture.
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "mtp_num_hidden_layers": min(1, count_mtp_layers(config)),
            "mtp_use_dedicated_embeddings": False,
        },
    )
    check_values(read_rope(config), {"rope_type": "default"})
    if is_moe:  # which has no dense layer
        config = {"intermediate_size": get_field(config, "moe_intermediate_size")} | config
    return map_hybrid_config(config, count_mtp_layers(config))


class _SeparateDeltaNet(DeltaNet):
    """A delta net with a projection of [q; k; v], and one each of z, b and a."""

    def __init__(self, config: HFConfig, layer: Layer) -> None:
        super().__init__(config, layer)
        heads = self.num_heads
        rows = {
            "qkv": heads * (2 * self.key + self.value),
            "z": heads * self.value,
            "b": heads * self.group,
            "a": heads * self.group,
        }
        self._qkv, self._z, self._b, self._a = (
            self.build_tensor(f"in_proj_{name}.weight", size, self.hidden)
            for name, size in rows.items()
        )

    def build_in_proj(self) -> StackedSections:
        sizes = (self.value, self.group, self.group)
        single = (Section(part, 0, size, size) for part, size in enumerate(sizes, start=1))
        return StackedSections(
            (self._qkv, self._z, self._b, self._a),
            (*self.list_qkv_sections(), *single),
            self.num_heads,
        )

    def build_vllm_projections(self) -> tuple[Rule, Rule]:
        z = Section(1, 0, self.value, self.value)
        ba = tuple(Section(part, 0, self.group, self.group) for part in (0, 1))
        return (
            StackedSections((self._qkv, self._z), (*self.list_qkv_sections(), z), self.num_heads),
            StackedSections((self._b, self._a), ba, self.num_heads),
        )


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_hybrid_weights(config, padded_vocab, _SeparateDeltaNet, count_mtp_layers(config))


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_hybrid_vllm_weights(config, _SeparateDeltaNet)


def _register(name: str, architecture: str) -> tuple[Family, Family]:
    """Register the models of text of an architecture, and their wrapper."""
    text = Family(
        f"{name}_text",
        f"{architecture}ForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        count_mtp_layers,
        defaults={"head_dim": 256},
    )
    wrapper = wrap_family(
        text,
        name,
        f"{architecture}ForConditionalGeneration",
        prefixes={"model.": "model.language_model."},
        frozen_prefixes=("model.visual.",),
    )
    return register(text), register(wrapper)


MOE_TEXT, MOE_FAMILY = _register("qwen3_5_moe", "Qwen3_5Moe")
DENSE_TEXT, DENSE_FAMILY = _register("qwen3_5", "Qwen3_5")
