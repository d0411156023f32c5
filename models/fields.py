"""The fields of config.json that families read: the type of each, checked when it is read.

A field that is absent or null passes: each family checks what it needs. The limits
are far above any model; they keep a damaged file from asking for endless rules.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.errors import ConfigError

MAX_EXPERTS = 1 << 16  # of all layers together


@dataclass(frozen=True, slots=True)
class Kind:
    allowed: str
    accepts: Callable[[Any], bool]


def _integer(low: int, high: int) -> Kind:
    # JSON's true is an int to Python.
    return Kind(f"an integer from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def _number(low: float, high: float) -> Kind:
    return Kind(
        f"a number from {low} to {high}", lambda v: type(v) in (int, float) and low <= v <= high
    )


def _list_of(what: str, kind: Kind) -> Kind:
    return Kind(f"a list of {what}", lambda v: isinstance(v, list) and all(map(kind.accepts, v)))


_TEXT = Kind("a string", lambda value: isinstance(value, str))
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))

_NAMES: dict[Kind, str] = {
    _integer(1, 1 << 10): "num_hidden_layers moe_layer_freq decoder_sparse_step",
    _integer(0, 1 << 10): "first_k_dense_replace num_nextn_predict_layers num_mtp_layers",
    _integer(1, 1 << 14): "num_attention_heads num_key_value_heads head_dim qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim num_experts num_local_experts n_routed_experts "
    "num_experts_per_tok n_shared_experts",
    _integer(0, 1 << 14): "n_group topk_group",
    _integer(1, 1 << 24): "vocab_size hidden_size intermediate_size moe_intermediate_size "
    "kv_lora_rank q_lora_rank",
    _integer(1, 1 << 40): "max_position_embeddings original_max_position_embeddings sliding_window",
    _number(1e-12, 1.0): "rms_norm_eps partial_rotary_factor",
    _number(1e-6, 1e12): "rope_theta routed_scaling_factor factor low_freq_factor high_freq_factor",
    _number(0.0, 1e6): "beta_fast beta_slow mscale mscale_all_dim attention_factor",
    _FLAG: "tie_word_embeddings attention_bias mlp_bias norm_topk_prob use_sliding_window "
    "use_qk_norm rope_interleave token_classification_bias truncate",
    _TEXT: "hidden_act scoring_func topk_method rope_type type dtype torch_dtype",
    _OBJECT: "rope_scaling rope_parameters id2label",
    _list_of("strings", _TEXT): "architectures layer_types",
    _list_of("layer numbers", _integer(0, 1 << 10)): "mlp_only_layers",
}
FIELDS: dict[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}

_MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("n_routed_experts", "n_group"))
_AT_MOST = (
    ("topk_group", "n_group"),
    ("first_k_dense_replace", "num_hidden_layers"),
    ("num_experts_per_tok", "num_experts"),
    ("num_experts_per_tok", "num_local_experts"),
    ("num_experts_per_tok", "n_routed_experts"),
)


def check_fields(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field of another kind than families read, or two that do not fit."""
    _check_kinds(config)
    for name in ("rope_scaling", "rope_parameters"):
        _check_kinds(config.get(name) or {})
    _check_relations({name: value for name, value in config.items() if value and name in FIELDS})


def _check_kinds(config: Mapping[str, Any]) -> None:
    for name, kind in FIELDS.items():
        value = config.get(name)
        if value is not None and not kind.accepts(value):
            raise ConfigError(
                f"config.json: {name}={reprlib.repr(value)} is not supported; allowed: "
                f"{kind.allowed}"
            )


def _check_relations(config: Mapping[str, Any]) -> None:
    """Between fields that are set and not zero."""
    for whole, part in _MULTIPLES:
        if whole in config and part in config and config[whole] % config[part]:
            raise ConfigError(
                f"config.json: {whole}={config[whole]} is no multiple of {part}={config[part]}"
            )
    for less, more in _AT_MOST:
        if less in config and more in config and config[less] > config[more]:
            raise ConfigError(f"config.json: {less}={config[less]} exceeds {more}={config[more]}")
    experts = max(
        config.get(name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    if (total := experts * config.get("num_hidden_layers", 1)) > MAX_EXPERTS:
        raise ConfigError(
            f"config.json: {experts} experts in each of {config['num_hidden_layers']} layers make "
            f"{total}; allowed: at most {MAX_EXPERTS}"
        )
