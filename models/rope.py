"""Rotary embeddings of config.json: plain, or scaled for contexts beyond that of pretraining.

The frequencies of a scaled one are those of transformers (engine/megatron/rope.py), as in vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import DEFAULT_ROPE_THETA, HFConfig, get_field, read_rope

_ORIGINAL = "original_max_position_embeddings"
# Parameters of each kind of scaling: required, and optional.
_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
# Without effect in transformers and vLLM: a remark in published configs, fields of read_rope.
_NO_EFFECT = {"finetuned", "architectures", "rope_type", "rope_theta", "partial_rotary_factor"}
_REFUSED = {
    "longrope": "its frequencies depend on the length of the whole sequence: those of a token "
    "would change with the tokens after it, and sequences of one pack need different ones",
}


def map_rope_config(config: HFConfig, default_theta: float = DEFAULT_ROPE_THETA) -> dict[str, Any]:
    """Return the arguments of the rotary embedding of grouped-query attention.

    `rotary_base` and `rotary_percent` are GPTModel's. `rope_parameters`, of a scaled embedding,
    are those of transformers. Dynamic scaling has none: it acts beyond count_positions.
    """
    rope = read_rope(config, default_theta)
    arguments: dict[str, Any] = {"rotary_base": float(rope["rope_theta"])}
    if rope.get("partial_rotary_factor") is not None:
        arguments["rotary_percent"] = float(rope["partial_rotary_factor"])
    scaling = {} if rope["rope_type"] == "default" else read_scaling(config, rope)
    if scaling and scaling["rope_type"] != "dynamic":
        arguments["rope_parameters"] = scaling
    return arguments


def read_scaling(
    config: HFConfig, rope: dict[str, Any], kinds: Collection[str] = tuple(_PARAMETERS)
) -> dict[str, Any]:
    """Return the parameters of a scaled rotary embedding, with all that its kind requires.

    Args:
        rope: Result of read_rope.
        kinds: Kinds that the family supports.

    Raises:
        ConfigError: The kind is another, a parameter is missing, or one is not of its kind.
    """
    kind, architectures = rope["rope_type"], config.get("architectures")
    if kind not in kinds:
        reason = f" ({_REFUSED[kind]})" if kind in _REFUSED else ""
        raise ConfigError(
            f"config.json: rope_type={kind!r} is not supported for {architectures}{reason}; "
            f"allowed: {', '.join(map(repr, ('default', *kinds)))}"
        )
    if kind == "dynamic":
        get_field(config, "max_position_embeddings")
    required, optional = _PARAMETERS[kind]
    if _ORIGINAL in required:  # as in standardize_rope_params (transformers/modeling_rope_utils.py)
        values = config.get(_ORIGINAL), rope.get(_ORIGINAL), config.get("max_position_embeddings")
        rope = {**rope, _ORIGINAL: next((value for value in values if value), None)}
    for name in required:
        get_field(rope, name)
    if kind == "linear" and isinstance(rope["factor"], int):
        # model_executor/layers/rotary_embedding/linear_scaling_rope.py:76
        raise ConfigError(
            f"config.json: rope_type='linear' with factor={rope['factor']} is not supported: vLLM "
            f"takes no integer; allowed: {float(rope['factor'])}"
        )
    for name in sorted(rope.keys() - _NO_EFFECT - {*required, *optional}):
        raise ConfigError(
            f"config.json: rope_type={kind!r} with {name}={rope[name]!r} is not supported; "
            f"allowed: {', '.join((*required, *optional))}"
        )
    names = ("rope_type", "rope_theta", *required, *optional)
    return {name: rope[name] for name in names if rope.get(name) is not None}


def count_positions(config: HFConfig) -> int | None:
    """Return how many positions a model has; None if config.json does not say.

    As vLLM (config/model.py:2585): linear scaling adds some to max_position_embeddings, which with
    YaRN and Llama 3's scaling contains them; YaRN's table ends at the scaled original context.
    Dynamic scaling and LongRoPE act beyond a length only, by frequencies that depend on the length
    of each sequence and differ between engines: their models have the positions up to that length.
    """
    positions: int | None = config.get("max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor") or 1
    original: int | None = config.get(_ORIGINAL) or rope.get(_ORIGINAL)
    if kind == "linear" and positions:
        return int(positions * factor)
    if kind == "longrope" and original:
        return original
    if kind == "yarn" and original:
        return min(positions or sys.maxsize, int(original * factor))
    return positions
