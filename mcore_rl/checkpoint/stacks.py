"""Stacked tensors of a checkpoint, from their slices (reshard/rules.StackSlice)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from mcore_rl.reshard.rules import LogicalTensor, join_slices, parse_slice


def stack_slices(
    tensors: Iterable[tuple[str, torch.Tensor]], expected: Sequence[LogicalTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint as they are complete; slices become their stack.

    In memory at a time: all stacks that are not complete.

    Args:
        expected: All tensors that come.
    """
    shapes = {tensor.name: tensor.shape for tensor in join_slices(expected)}
    stacks: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}  # slices of each stack in `stacks`
    for name, tensor in tensors:
        if (part := parse_slice(name)) is None:
            yield name, tensor
            continue
        if part.stack not in stacks:
            shape = shapes[part.stack]
            stacks[part.stack] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            missing[part.stack] = shape[0]
        stacks[part.stack][part.index] = tensor.t() if part.is_transposed else tensor
        missing[part.stack] -= 1
        if not missing[part.stack]:
            yield part.stack, stacks.pop(part.stack)
