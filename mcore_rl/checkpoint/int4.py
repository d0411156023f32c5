"""Weights in int4 with a scale per 32 columns of a row, as Kimi K2 Thinking is published.

The format "pack-quantized" of compressed-tensors: a weight `NAME` [rows, columns] comes as
`NAME_packed` [rows, columns / 8] in int32, eight values of 4 bits in one, the lowest bits first,
each 8 above its value; `NAME_scale` [rows, columns / 32] in bfloat16; and `NAME_shape`. The weight
is their product, rounded to bfloat16 (compressors/pack_quantized/helpers.py, unpack_from_int32;
quantization/lifecycle/forward.py, dequantize, of compressed-tensors).
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Box

METHOD = "compressed-tensors"  # quant_method in config.json
BLOCK = 32  # columns with one scale
DESCRIPTION = f"int4, groups of {BLOCK}"
# Values, scales, and the shape, which follows from that of the values: a group is never padded.
SUFFIXES = (".weight_packed", ".weight_scale", ".weight_shape")
BASE = ".weight"  # the suffix of a weight's own name
_PER_INT32, _BITS, _OFFSET = 8, 4, 8

_FORMAT = {
    "format": "pack-quantized", "kv_cache_scheme": None, "sparsity_config": None,
    "transform_config": None,
}  # fmt: skip
_GROUP = {"input_activations": None, "output_activations": None, "format": "pack-quantized"}
_WEIGHTS = {
    "num_bits": _BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": BLOCK,
    "actorder": None, "block_structure": None, "dynamic": False,
}  # fmt: skip


def check_quantization_config(quantization: dict[str, Any]) -> None:
    """Raise ConfigError unless a quantization_config of config.json has this format."""
    _check_values("", quantization, _FORMAT, required=("format",))
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(
            f"config.json: quantization_config with config_groups={groups!r} is not supported; "
            "allowed: an object of groups"
        )
    for name, group in groups.items():
        _check_values(f"config_groups.{name}.", group, _GROUP)
        weights = group.get("weights")
        required = ("num_bits", "type", "symmetric", "strategy", "group_size")
        _check_values(f"config_groups.{name}.weights.", weights, _WEIGHTS, required)


def _check_values(
    where: str, fields: Any, allowed: dict[str, Any], required: tuple[str, ...] = ()
) -> None:
    if not isinstance(fields, dict):
        raise ConfigError(
            f"config.json: quantization_config with {where.rstrip('.')}={fields!r} is not "
            "supported; allowed: an object"
        )
    for name, expected in allowed.items():
        value = fields.get(name)
        if value == {}:  # compressed-tensors writes both for what is absent
            value = None
        if value != expected and (value is not None or name in required):
            raise ConfigError(
                f"config.json: quantization_config with {where}{name}={value!r} is not supported; "
                f"allowed: {expected!r}"
            )


def get_shape(packed: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a weight, from the shape of its packed values."""
    rows, columns = packed
    return rows, columns * _PER_INT32


def check_shapes(name: str, *parts: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Raise ConfigError unless values, scales and shape, by shape and dtype, form a weight."""
    packed = parts[0][0]
    columns = packed[1] * _PER_INT32 if len(packed) == 2 else 0
    expected = (packed, (*packed[:1], columns // BLOCK), (2,))
    dtypes = ((torch.int32,), (torch.bfloat16,), (torch.int64, torch.int32))
    if not columns or columns % BLOCK:
        raise ConfigError(
            f"{name}_packed has shape {packed}; allowed: [rows, columns / {_PER_INT32}] with a "
            f"multiple of {BLOCK} columns"
        )
    for suffix, (shape, dtype), right, allowed in zip(
        SUFFIXES, parts, expected, dtypes, strict=True
    ):
        if shape != right or dtype not in allowed:
            raise ConfigError(
                f"{name.removesuffix(BASE)}{suffix} is {dtype} of shape {shape}; allowed: "
                f"{' or '.join(map(str, allowed))} of shape {right}"
            )


def locate_blocks(box: Box) -> tuple[Box, Box, slice]:
    """Return the boxes of values and scales that a box overlaps, and its columns in them."""
    (row, column), (rows, columns) = box.offsets, box.sizes
    first, last = column // BLOCK, -(-(column + columns) // BLOCK)
    values = Box((row, first * BLOCK // _PER_INT32), (rows, (last - first) * BLOCK // _PER_INT32))
    scales = Box((row, first), (rows, last - first))
    start = column - first * BLOCK
    return values, scales, slice(start, start + columns)


def dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the products, bfloat16 [rows, columns].

    Args:
        packed: [rows, columns / 8] int32
        scales: [rows, columns / 32] bfloat16
    """
    shifts = torch.arange(0, _PER_INT32 * _BITS, _BITS, dtype=torch.int32)
    values = (packed.unsqueeze(-1) >> shifts).bitwise_and_(15).sub_(_OFFSET)
    groups = values.view(*scales.shape, BLOCK)
    return (groups * scales.float().unsqueeze(-1)).bfloat16().flatten(1)
