"""Wrappers: checkpoints of a language model inside a model with a frozen vision tower.

The language model is trained. Tensors of the tower are not loaded: an export copies them from the
checkpoint that it started from, bit for bit. Images are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig
from mcore_rl.reshard.rules import Weight, rename_tensors

# The module of the language model in vLLM's wrappers.
_VLLM_MODULE = "language_model."


def wrap_family(
    family: Family,
    name: str,
    architecture: str,
    *,
    prefixes: Mapping[str, str],
    frozen_prefixes: tuple[str, ...],
) -> Family:
    """Return the family of a wrapper around the models of a family.

    Args:
        architecture: Value of "architectures" in config.json, whose text_config has the fields of
            the language model.
        prefixes: Prefix of the language model's tensors in the wrapper, by that in a checkpoint of
            the language model alone. "" stands for all tensors; the longest prefix applies.
        frozen_prefixes: Prefixes of the tensors that are not trained.
    """
    longest_first = sorted(prefixes.items(), key=lambda item: -len(item[0]))

    def rename(tensor: str) -> str:
        for inner, outer in longest_first:
            if tensor.startswith(inner):
                return outer + tensor.removeprefix(inner)
        return tensor

    def map_config(config: HFConfig) -> dict[str, Any]:
        _check_nested_fields(config)
        return family.config_map(config)

    def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
        return tuple(rename_tensors(family.weights(config, padded_vocab), rename))

    def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
        assert family.vllm_weights is not None
        renamed = rename_tensors(family.vllm_weights(config), rename)
        return tuple(weight._replace(name=_VLLM_MODULE + weight.name) for weight in renamed)

    vllm_weights: Callable[[HFConfig], tuple[Weight, ...]] | None = map_vllm_weights
    return replace(
        family,
        name=name,
        architecture=architecture,
        config_map=map_config,
        weights=map_weights,
        vllm_weights=vllm_weights if family.vllm_weights is not None else None,
        vllm_drafts=None,  # their names would be those of a model without a wrapper
        frozen_prefixes=frozen_prefixes,
    )


# Fields beside text_config that transformers and vLLM would read there.
_COMMON_FIELDS = ("tie_word_embeddings", "quantization_config")


def _check_nested_fields(config: HFConfig) -> None:
    """Raise ConfigError unless the language model's fields are nested, and repeated alike.

    `config` has the fields of text_config beside its own, which have precedence (read_config).
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(
            f"config.json: {config.get('architectures')} has no text_config; allowed: the fields "
            "of the language model as an object text_config"
        )
    for name in _COMMON_FIELDS:
        if name in text and name in config and text[name] != config[name]:
            raise ConfigError(
                f"config.json: {name}={config[name]!r} differs from text_config.{name}="
                f"{text[name]!r}; allowed: equal values, or one of them"
            )
