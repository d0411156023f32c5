"""Boxes: rectangular pieces of logical tensors, and their place in a local tensor. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class LogicalTensor(NamedTuple):  # a large model has tens of thousands
    """A full tensor of a Hugging Face checkpoint.

    `also` are further names under which the checkpoint repeats the same tensor: never read,
    written by an export.
    """

    name: str
    shape: tuple[int, ...]
    also: tuple[str, ...] = ()

    @property
    def copies(self) -> tuple[LogicalTensor, ...]:
        return tuple(LogicalTensor(name, self.shape) for name in self.also)


@dataclass(frozen=True, slots=True)
class Box:
    """Offsets and sizes of a hyper-rectangle.

    >>> Box((4, 0), (2, 8)).numel
    16
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"box offsets {self.offsets} and sizes {self.sizes} differ in rank")
        if min(self.offsets, default=0) < 0 or min(self.sizes, default=1) < 1:
            raise ValueError(f"empty or negative box: offsets {self.offsets}, sizes {self.sizes}")

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Block:
    """A box of one logical tensor and the place of its first element in a local tensor."""

    tensor: LogicalTensor
    box: Box
    local_offset: tuple[int, ...]

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return Box(self.local_offset, self.box.sizes).slices


def rows(tensor: LogicalTensor, start: int, count: int, local_start: int) -> Block:
    """Rows [start, start + count) of a tensor, placed at row local_start of the local tensor."""
    rest = tensor.shape[1:]
    zeros = (0,) * len(rest)
    return Block(tensor, Box((start, *zeros), (count, *rest)), (local_start, *zeros))
