"""Formats of quantized weights that checkpoints are read in, and the weights in packed formats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import torch

from mcore_rl.checkpoint import fp8, int4, mxfp4
from mcore_rl.config.errors import ConfigError

PACKED = (mxfp4, int4)  # formats with a weight in several tensors, of other shapes than its own
_CHECKS = {
    "fp8": fp8.check_quantization_config,
    mxfp4.METHOD: lambda quantization: None,
    int4.METHOD: int4.check_quantization_config,
}


def check_quantization_config(quantization: Any) -> None:
    """Raise ConfigError unless a quantization_config of config.json is of a format that is read."""
    if not isinstance(quantization, dict):
        raise ConfigError(f"config.json: quantization_config={quantization!r} is not an object")
    method = quantization.get("quant_method")
    if method not in _CHECKS:
        raise ConfigError(
            f"config.json: quantization_config with quant_method={method!r} is not supported; "
            f"allowed: {', '.join(map(repr, _CHECKS))}"
        )
    _CHECKS[method](quantization)


def is_readable(quantization: Any) -> bool:
    """Return whether a quantization_config of config.json is of a format that is read."""
    try:
        check_quantization_config(quantization)
    except ConfigError:
        return False
    return True


def find_packed_weights(
    entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, ModuleType]:
    """Return the format of each weight in a packed one, by the weight's name.

    Args:
        entries: Shape and dtype of each tensor in the files.

    Raises:
        ConfigError: A part of a weight is missing, or shapes and dtypes do not fit.
    """
    packed: dict[str, ModuleType] = {}
    for codec in PACKED:
        for name, present in _find_parts(entries, codec).items():
            parts = list_parts(name, codec)
            for part in parts:
                if part not in present:
                    raise ConfigError(
                        f"{min(present)} is there, but {part} is missing; allowed: all of "
                        f"{', '.join(codec.SUFFIXES)}, of {codec.DESCRIPTION}"
                    )
            codec.check_shapes(name, *(entries[part] for part in parts))
            packed[name] = codec
    return packed


def list_parts(name: str, codec: ModuleType) -> list[str]:
    """Return the names of the tensors that a packed weight is stored in."""
    return [name.removesuffix(codec.BASE) + suffix for suffix in codec.SUFFIXES]


def _find_parts(names: Collection[str], codec: ModuleType) -> dict[str, set[str]]:
    """Return the stored tensors of each weight of a format."""
    parts: dict[str, set[str]] = {}
    for name in names:
        for suffix in codec.SUFFIXES:
            if name.endswith(suffix):
                parts.setdefault(name.removesuffix(suffix) + codec.BASE, set()).add(name)
    return parts
