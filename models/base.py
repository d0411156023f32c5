"""What a model family is, and how the family of a checkpoint is found.

A family is data: how its Hugging Face config maps to Megatron's, and the weight rules that loading,
export and resharding read. Family files import no torch, so that plans can be made anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import ModelSizes
from mcore_rl.reshard.rules import Weight

HFConfig = dict[str, Any]  # the contents of config.json


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    `config_map` gives keyword arguments of Megatron's TransformerConfig, and of its GPTModel those
    that the config class has no field for (activation by its Hugging Face name under "activation").
    `layer_spec` gives Megatron's layer spec of a chunk from (TransformerConfig, chunk number of the
    rank or None). `weights` gives the rules, with the vocabulary padded to the size handed in. All
    raise ConfigError for a config they cannot express.
    """

    name: str
    architecture: str  # as config.json names it
    config_map: Callable[[HFConfig], dict[str, Any]]
    layer_spec: Callable[[Any, int | None], Any]
    weights: Callable[[HFConfig, int], tuple[Weight, ...]]


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    _FAMILIES[family.architecture] = family
    return family


def read_config(model_path: str | Path) -> HFConfig:
    """The config.json of a checkpoint folder."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={str(model_path)!r}: there is no config.json in that folder")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}, not an object")
    return config


def family_of(config: HFConfig) -> Family:
    """The family that config.json names under "architectures"."""
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in _FAMILIES:
            return _FAMILIES[architecture]
    raise ConfigError(
        f"config.json: architectures={architectures} is not supported; allowed: {sorted(_FAMILIES)}"
    )


def field(config: HFConfig, name: str) -> Any:
    """A field that the config must have."""
    if config.get(name) is None:
        raise ConfigError(f"config.json has no {name!r}, which {config.get('architectures')} needs")
    return config[name]


def rope_theta(config: HFConfig) -> float:
    """The rotary base, where either generation of transformers keeps it; scaled rope is refused."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"config.json: rope_type={kind!r} is not supported; allowed: 'default'")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConfigError("config.json has neither rope_theta nor rope_parameters.rope_theta")
    return float(theta)


def head_dim(config: HFConfig) -> int:
    return int(
        config.get("head_dim")
        or field(config, "hidden_size") // field(config, "num_attention_heads")
    )


def padded_vocab_size(config: HFConfig, tp: int) -> int:
    """The vocabulary rounded up so that it divides over tp ranks."""
    return -(-int(field(config, "vocab_size")) // tp) * tp


def model_sizes(config: HFConfig) -> ModelSizes:
    """What a layout of this model has to divide."""
    fields = family_of(config).config_map(config)
    num_experts = fields.get("num_moe_experts", 0)
    has_dense = not num_experts or 0 in fields.get("moe_layer_freq", [])
    return ModelSizes(
        num_attention_heads=fields["num_attention_heads"],
        num_query_groups=fields["num_query_groups"],
        ffn_sizes=(fields["ffn_hidden_size"],) if has_dense else (),
        num_experts=num_experts,
        expert_ffn_size=fields.get("moe_ffn_hidden_size", 0),
    )
