"""The inputs of a loss function for a micro-batch, with sums over sequences split over CP ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_rl.algorithms.inputs import LossInputs, Tensors
from mcore_rl.engine.megatron.packing import MicroBatch


def loss_inputs(scores: Tensors, micro: MicroBatch) -> LossInputs:
    return LossInputs(
        scores=scores,
        columns=micro.columns,
        sequence_ids=micro.sequence_ids,
        num_sequences=len(micro.rows),
        sum_over_ranks=_sum_over_context_parallel,
    )


def _sum_over_context_parallel(totals: torch.Tensor) -> torch.Tensor:
    if parallel_state.get_context_parallel_world_size() == 1:
        return totals
    total: torch.Tensor = _Sum.apply(totals, parallel_state.get_context_parallel_group())
    return total


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group, on all of them.

    The loss is the sum of what each rank computes, so the gradient of the total is the sum of what
    each rank's part of the loss says of it. Megatron's mappings
    (tensor_parallel/mappings.py:27) would sum a copy of a gradient that is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, totals: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _summed(totals, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
