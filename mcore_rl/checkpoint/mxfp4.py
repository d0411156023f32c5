"""Stacked experts in MXFP4, as gpt-oss is published: OCP Microscaling Formats 1.0, section 5.2.

A tensor `NAME` [experts, columns, rows] comes as `NAME_blocks` [experts, rows, columns / 32, 16],
two values of 4 bits (e2m1) in a byte, the lower half first, and `NAME_scales` [experts, rows,
columns / 32], exponents of 2 with a bias of 127. So files have the matrices of a plain checkpoint
transposed. Products are exact in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Box

METHOD = "mxfp4"  # quant_method in config.json
BLOCK = 32  # columns with one scale
DESCRIPTION = f"mxfp4, blocks of {BLOCK}"
SUFFIXES = BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
BASE = ""  # the suffix of a tensor's own name
_BIAS = 127
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def compute_buffer_bytes(num_elements: int) -> int:
    """Return the memory for dequantizing: values, their indices and products."""
    return num_elements * 3 * torch.float32.itemsize


def get_shape(blocks: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape of a tensor, from the shape of its blocks."""
    experts, rows, groups, _ = blocks
    return experts, groups * BLOCK, rows


def check_shapes(
    name: str, blocks: tuple[tuple[int, ...], torch.dtype], scales: tuple[tuple[int, ...], Any]
) -> None:
    """Raise ConfigError unless blocks and scales, by shape and dtype, form a tensor."""
    for suffix, (shape, dtype) in ((BLOCKS_SUFFIX, blocks), (SCALES_SUFFIX, scales)):
        if dtype != torch.uint8:
            raise ConfigError(f"{name}{suffix} has dtype {dtype}; allowed: torch.uint8")
        expected = (*blocks[0][:3], BLOCK // 2) if suffix == BLOCKS_SUFFIX else blocks[0][:3]
        if len(blocks[0]) != 4 or shape != expected:
            raise ConfigError(
                f"{name}{suffix} has shape {shape}; allowed: [experts, rows, columns / {BLOCK}, "
                f"{BLOCK // 2}] blocks, and a scale for each"
            )


def locate_blocks(box: Box) -> tuple[Box, Box, slice]:
    """Return the boxes of blocks and scales that a box overlaps, and its columns in them."""
    (expert, column, row), (experts, columns, rows) = box.offsets, box.sizes
    first, last = column // BLOCK, -(-(column + columns) // BLOCK)
    offsets, sizes = (expert, row, first), (experts, rows, last - first)
    start = column - first * BLOCK
    blocks = Box((*offsets, 0), (*sizes, BLOCK // 2))
    return blocks, Box(offsets, sizes), slice(start, start + columns)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the products, float32 [experts, columns, rows].

    Args:
        blocks: [experts, rows, columns / 32, 16] uint8
        scales: [experts, rows, columns / 32] uint8
    """
    values = torch.cat([_VALUES, -_VALUES])
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.int().sub_(_BIAS).unsqueeze(-1)
    return torch.ldexp(values[halves.int()], exponents).flatten(-2).transpose(1, 2)
