"""Stacked tensors of a checkpoint: from slices, and as experts with names of their own.

Rules name a slice by its stack (reshard/rules.StackSlice), or experts one by one where files of a
model may have either form: Qwen3.5 stacks the experts of its layers and not those of its prediction
layer, Qwen3.6 both, transformers neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mcore_rl.reshard.rules import Box, LogicalTensor, join_slices, parse_slice

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
# Projections of an expert in its slice of a stack, one below the other.
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_STACK = re.compile(rf"(.+\.experts)\.({'|'.join(_PARTS)})")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A projection of an expert in a stack [experts, rows of all parts, columns]."""

    stack: str
    index: int
    part: int
    num_parts: int

    def get_shape(self, stack_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the projection."""
        return (stack_shape[1] // self.num_parts, *stack_shape[2:])

    def locate(self, box: Box, stack_shape: tuple[int, ...]) -> Box:
        """Return the box of the stack that a box of the projection is."""
        first = self.part * self.get_shape(stack_shape)[0] + box.offsets[0]
        return Box((self.index, first, *box.offsets[1:]), (1, *box.sizes))

    def select(self, stack: torch.Tensor) -> torch.Tensor:
        """Return the view of a stack that is the projection."""
        return stack[self.index].chunk(self.num_parts)[self.part]


def is_stack(name: str) -> bool:
    """Return whether a name is of stacked experts.

    >>> is_stack("layers.0.mlp.experts.gate_up_proj")
    True
    """
    return _STACK.fullmatch(name) is not None


def locate_expert(name: str) -> ExpertPart | None:
    """Return where files that stack experts have a projection; None for another tensor.

    >>> locate_expert("mlp.experts.3.up_proj.weight")
    ExpertPart(stack='mlp.experts.gate_up_proj', index=3, part=1, num_parts=2)
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    stack, parts = next((s, parts) for s, parts in _PARTS.items() if match[3] in parts)
    part = parts.index(match[3])
    return ExpertPart(f"{match[1]}.{stack}", int(match[2]), part, len(parts))


def list_experts(stack: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each projection in a stack.

    >>> [name for name, _ in list_experts("experts.down_proj", (2, 8, 4))]
    ['experts.0.down_proj.weight', 'experts.1.down_proj.weight']
    """
    experts, _, kind = stack.rpartition(".")
    parts = _PARTS[kind]
    for index in range(shape[0]):
        for part in parts:
            yield f"{experts}.{index}.{part}_proj.weight", (shape[1] // len(parts), *shape[2:])


def stack_experts(
    tensors: Iterable[tuple[str, torch.Tensor]], shapes: Shapes
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors; projections of experts become the stacks whose shapes are given.

    In memory at a time: all stacks that are not complete.
    """

    def locate(name: str) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]] | None:
        part = locate_expert(name)
        return None if part is None or part.stack not in shapes else (part.stack, part.select)

    return _fill_stacks(tensors, shapes, locate)


def stack_slices(
    tensors: Iterable[tuple[str, torch.Tensor]], expected: Sequence[LogicalTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint as they are complete; slices become their stack.

    In memory at a time: all stacks that are not complete.

    Args:
        expected: All tensors that come.
    """

    def locate(name: str) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]] | None:
        if (part := parse_slice(name)) is None:
            return None
        index, is_transposed = part.index, part.is_transposed
        return part.stack, lambda stack: stack[index].t() if is_transposed else stack[index]

    shapes = {tensor.name: tensor.shape for tensor in join_slices(expected)}
    return _fill_stacks(tensors, shapes, locate)


def _fill_stacks(
    tensors: Iterable[tuple[str, torch.Tensor]],
    shapes: Shapes,
    locate: Callable[[str], tuple[str, Callable[[torch.Tensor], torch.Tensor]] | None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors; those that `locate` places in a stack are copied there."""
    stacks: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}  # elements of each stack in `stacks`
    for name, tensor in tensors:
        if (place := locate(name)) is None:
            yield name, tensor
            continue
        stack, select = place
        if stack not in stacks:
            stacks[stack] = torch.empty(shapes[stack], dtype=tensor.dtype, device=tensor.device)
            missing[stack] = math.prod(shapes[stack])
        select(stacks[stack]).copy_(tensor)
        missing[stack] -= tensor.numel()
        if not missing[stack]:
            yield stack, stacks.pop(stack)
