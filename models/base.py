"""Model families, and how the family of a checkpoint is found.

A family is data: how its Hugging Face config maps to Megatron's, and the weight rules that loading,
export and resharding read. Family files import no torch, so that plans can be made anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.checks import check_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.resolve_engine import ModelSizes
from mcore_rl.models.fields import check_fields
from mcore_rl.reshard.rules import Weight

HFConfig = dict[str, Any]  # the contents of config.json
# How architectures end.
CAUSAL = "ForCausalLM"
CLASSIFICATION, SEQUENCE = "ForTokenClassification", "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    `config_map` gives keyword arguments of Megatron's TransformerConfig, and of its GPTModel those
    that the config class has no field for (activation by its Hugging Face name under "activation").
    `layer_spec` gives Megatron's layer spec of a chunk from (TransformerConfig, chunk number of the
    rank or None). `weights` gives the rules, with the vocabulary padded to the size handed in, and
    `vllm_weights` those of vLLM's parameters, prediction layers left out. All
    raise ConfigError for a config they cannot express. `num_mtp_layers` counts the multi-token
    prediction layers that the checkpoint has after its decoder layers.
    """

    name: str
    architecture: str  # as config.json names it
    config_map: Callable[[HFConfig], dict[str, Any]]
    layer_spec: Callable[[Any, int | None], Any]
    weights: Callable[[HFConfig, int], tuple[Weight, ...]]
    vllm_weights: Callable[[HFConfig], tuple[Weight, ...]]
    num_mtp_layers: Callable[[HFConfig], int] = lambda config: 0


_FAMILIES: dict[str, Family] = {}

# Architectures that users ask for and that the engine cannot express, each with the reason.
_REFUSED = {
    "GptOssForCausalLM": "its attention sinks, alternating sliding windows and clamped SwiGLU with "
    "biased experts are not in the modules of engine/megatron/layers.py",
    "DeepseekV32ForCausalLM": "its sparse attention (an indexer that picks the keys) is not in "
    "engine/megatron/attention.py",
}


def register(family: Family) -> Family:
    _FAMILIES[family.architecture] = family
    return family


def read_config(model_path: str | Path, setting: str = "model.path") -> HFConfig:
    """The config.json of a checkpoint folder, with fields of the kinds that families read.

    `setting` is the key of the path, for messages.

    Raises:
        ConfigError: there is none, or it is not readable, or a field is of another kind.
    """
    check_exists(setting, model_path)
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{setting}={str(model_path)!r}: there is no config.json in that folder")
    config = read_json_object(path)
    check_fields(config)
    return config


def family_of(config: HFConfig) -> Family:
    """The family that config.json names under "architectures"."""
    architectures = config.get("architectures") or []
    # A value model is the same family with another head (models/heads.py).
    causal = [
        name.replace(CLASSIFICATION, CAUSAL).replace(SEQUENCE, CAUSAL) for name in architectures
    ]
    for architecture in causal:
        if architecture in _FAMILIES:
            return _FAMILIES[architecture]
    reasons = "".join(f" ({_REFUSED[name]})" for name in causal if name in _REFUSED)
    raise ConfigError(
        f"config.json: architectures={architectures} is not supported{reasons}; "
        f"allowed: {sorted(_FAMILIES)}"
    )


def field(config: HFConfig, name: str) -> Any:
    """A field that the config must have."""
    if config.get(name) is None:
        raise ConfigError(f"config.json has no {name!r}, which {config.get('architectures')} needs")
    return config[name]


def without_mtp(config: HFConfig) -> HFConfig:
    """The config of the same model without its layers for multi-token prediction."""
    fields = ("num_nextn_predict_layers", "num_mtp_layers")
    return {**config, **{name: 0 for name in fields if name in config}}


def require(config: HFConfig, allowed: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field that has another value than the only one allowed.

    A field that is absent or null passes: transformers' defaults are then what is allowed.
    """
    for name, value in allowed.items():
        found = config.get(name)
        if found is not None and found != value:
            raise ConfigError(
                f"config.json: {name}={_spelled(found)} is not supported for "
                f"{config.get('architectures')}; allowed: {_spelled(value)}"
            )


def _spelled(value: Any) -> str:
    """As config.json spells it, but for the quotes."""
    return json.dumps(value).replace('"', "'")


def rope(config: HFConfig) -> dict[str, Any]:
    """Rotary parameters, where either generation of transformers keeps them.

    rope_theta, rope_type ("default" when there is no scaling) and what that type needs; the
    architectures, for messages.

    Raises:
        ConfigError: there is no rope_theta, or one field contradicts another: transformers reads
            rope_scaling before rope_parameters, and other versions do not.
    """
    names = [name for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    parameters = [_standardize_rope(config, name) for name in names]
    if len(parameters) > 1 and parameters[0] != parameters[1]:
        values = " and ".join(f"{name}={_spelled(config[name])}" for name in names)
        raise ConfigError(f"config.json: {values} differ; allowed: one of them, or equal values")
    found = parameters[0] if parameters else _standardize_rope(config)
    if found.get("rope_theta") is None:
        raise ConfigError("config.json has neither rope_theta nor rope_parameters.rope_theta")
    return {**found, "architectures": config.get("architectures")}


def _standardize_rope(config: HFConfig, name: str = "") -> dict[str, Any]:
    """The object `name` of config.json with the rope fields around it, and one name for its type.

    As standardize_rope_params of transformers/modeling_rope_utils.py.
    """
    inner = config[name] if name else {}
    kinds = {inner[key] for key in ("rope_type", "type") if inner.get(key) is not None}
    if len(kinds) > 1:
        raise ConfigError(
            f"config.json: {name} has rope_type={inner['rope_type']!r} and type={inner['type']!r}; "
            "allowed: one of them, or equal values"
        )
    outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    merged = {key: value for key, value in (outer | inner).items() if value is not None}
    merged.pop("type", None)
    return {**merged, "rope_type": next(iter(kinds), "default")}


def rope_theta(config: HFConfig) -> float:
    """The rotary base of a model without scaled rope; scaled rope is refused."""
    found = rope(config)
    if found["rope_type"] != "default":
        raise ConfigError(
            f"config.json: rope_type={found['rope_type']!r} is not supported for "
            f"{config.get('architectures')}; allowed: 'default'"
        )
    return float(found["rope_theta"])


def head_dim(config: HFConfig) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    hidden, heads = field(config, "hidden_size"), field(config, "num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads}, and "
            "there is no head_dim"
        )
    return int(hidden // heads)


def kv_elements_per_token(config: HFConfig, tp: int = 1) -> int:
    """Elements of the key/value cache for a token in all layers, on one of `tp` workers.

    A worker has the keys and values of its own heads, and of one at least. Multi-head latent
    attention has a latent vector and a rotary key that all heads share (DeepSeek-V2, section 2.1),
    and every worker keeps them.
    """
    num_layers = int(field(config, "num_hidden_layers"))
    if config.get("kv_lora_rank"):
        return num_layers * int(config["kv_lora_rank"] + field(config, "qk_rope_head_dim"))
    heads = int(config.get("num_key_value_heads") or field(config, "num_attention_heads"))
    return num_layers * 2 * max(1, heads // tp) * head_dim(config)


def padded_vocab_size(config: HFConfig, tp: int) -> int:
    """The vocabulary rounded up so that it divides over tp ranks."""
    return -(-int(field(config, "vocab_size")) // tp) * tp


def model_sizes(config: HFConfig) -> ModelSizes:
    """What a layout of this model has to divide."""
    family = family_of(config)
    fields = family.config_map(config)
    num_experts = fields.get("num_moe_experts", 0)
    has_dense = not num_experts or 0 in fields["moe_layer_freq"]
    dense = (fields["ffn_hidden_size"],) if has_dense else ()
    shared = fields.get("moe_shared_expert_intermediate_size")
    heads = fields["num_attention_heads"]
    return ModelSizes(
        num_attention_heads=heads,
        num_query_groups=fields.get("num_query_groups", heads),
        ffn_sizes=(*dense, shared) if shared else dense,
        num_experts=num_experts,
        expert_ffn_size=fields.get("moe_ffn_hidden_size", 0),
        num_layers=fields["num_layers"],
        num_mtp_layers=family.num_mtp_layers(config),
        has_router_bias=fields.get("moe_router_enable_expert_bias", False),
        is_mla="kv_lora_rank" in fields,
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


def layers_with_experts(config: HFConfig) -> tuple[int, ...]:
    """Decoder layers, numbered over the whole model; none in a dense model."""
    fields = family_of(config).config_map(config)
    if not fields.get("num_moe_experts", 0):
        return ()
    return tuple(layer for layer, has in enumerate(fields["moe_layer_freq"]) if has)
