"""Families with one fault each, made from that of examples/my_family.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.config.import_path import load_object
from mcore_rl.models.base import Family
from mcore_rl.reshard.rules import GateUp, Weight

EXAMPLE = Path(__file__).parents[2] / "examples/my_family.py"
FAMILY: Family = load_object("model.family", f"{EXAMPLE}:FAMILY")
Change = Callable[[Weight], Weight | None]


def change_weights(change: Change) -> Family:
    """Return the family with other rules of Megatron's parameters."""

    def weights(config: Any, padded_vocab: int) -> tuple[Weight, ...]:
        return tuple(filter(None, map(change, FAMILY.weights(config, padded_vocab))))

    return replace(FAMILY, weights=weights)


def change_vllm_weights(change: Change) -> Family:
    def weights(config: Any) -> tuple[Weight, ...]:
        assert FAMILY.vllm_weights is not None
        return tuple(filter(None, map(change, FAMILY.vllm_weights(config))))

    return replace(FAMILY, vllm_weights=weights)


def _drop_norm(weight: Weight) -> Weight | None:
    return None if weight.stage == "final_norm" else weight


def _swap_gate(weight: Weight) -> Weight:
    rule = weight.rule
    return weight._replace(rule=GateUp(rule.up, rule.gate)) if isinstance(rule, GateUp) else weight


def _rename(weight: Weight) -> Weight:
    return weight._replace(name=weight.name.replace("linear_proj", "linear_out"))


def _split_norm(weight: Weight) -> Weight:
    is_norm = weight.name.endswith("linear_qkv.layer_norm_weight")
    return weight._replace(axis="tp") if is_norm else weight


def _change_config(**changes: Any) -> Family:
    return replace(FAMILY, config_map=lambda config: FAMILY.config_map(config) | changes)


FORGETS_NORM = change_weights(_drop_norm)
SWAPS_GATE = change_weights(_swap_gate)
RENAMES_OUTPUT = change_weights(_rename)
SPLITS_NORM = change_weights(_split_norm)
WRONG_ROPE = _change_config(rotary_base=1e6)
WRONG_EPSILON = _change_config(layernorm_epsilon=1e-3)
SERVES_LESS = change_vllm_weights(_drop_norm)
NO_SERVERS = replace(FAMILY, vllm_weights=None)
OTHER = replace(FAMILY, architecture="OtherForCausalLM")

RULE_FAULTS = {
    "FORGETS_NORM": "the checkpoint has unexpected tensor model.norm.weight; the contract: rules",
    "SPLITS_NORM": "weights of 'mistral' on 2 shards: decoder.layers.{layer}.self_attention.line",
    "SERVES_LESS": "vllm_weights of 'mistral' lack model.norm.weight; the contract: the tensors",
}
ENGINE_FAULTS = {
    "SWAPS_GATE": "nats from those of transformers; the contract: within 0.0001 in float32",
    "WRONG_ROPE": "nats from those of transformers; the contract: within 0.0001 in float32",
    "WRONG_EPSILON": "nats from those of transformers; the contract: within 0.0001 in float32",
    "RENAMES_OUTPUT": "linear_out",
}
