"""One pass over the micro-batches of a batch, through Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import LossFunction
from mcore_rl.engine.megatron.heads import Head
from mcore_rl.engine.megatron.packing import MicroBatch, pack
from mcore_rl.parallel.balance import num_parts_within

Result = dict[str, torch.Tensor]
# What Megatron calls on the last stage's output: (loss to differentiate, token count, result).
LossClosure = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Result]]


def micro_batches(
    batch: Batch, max_tokens: int, at_least: int, device: torch.device
) -> list[MicroBatch]:
    """This rank's micro-batches: as many on every data-parallel rank, each within the budget."""
    num = torch.tensor(num_parts_within(batch.num_tokens.tolist(), max_tokens), device=device)
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(num, op=dist.ReduceOp.MAX, group=group)
    multiple = parallel_state.get_tensor_model_parallel_world_size()
    return pack(batch, max(int(num), at_least), multiple, device)


def run_micro_batches(
    chunks: Sequence[Any],
    micros: list[MicroBatch],
    make_loss: Callable[[Any, MicroBatch], LossClosure],
    *,
    forward_only: bool,
) -> list[Result]:
    """Drive Megatron's schedule; on the last stage, results in the order of the micro-batches."""

    def forward_step(data: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, LossClosure]:
        micro = next(data)
        output = chunk(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            attention_mask=None,
            packed_seq_params=micro.packed,
        )
        return output, make_loss(unwrap_model(chunk), micro)

    results: list[Result] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micros) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micros),
        # Without a pipeline nobody reads it, and with one the stages tell each other the shapes.
        seq_length=max(micro.input_ids.shape[1] for micro in micros),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def inference(head: Head) -> Callable[[Any, MicroBatch], LossClosure]:
    """The scores are the result, and there is no loss."""
    return partial(_score_closure, head)


def training(
    head: Head, loss_function: LossFunction, total_tokens: int
) -> Callable[[Any, MicroBatch], LossClosure]:
    """The sum of loss_weights * loss over the response tokens; metrics, weighted alike.

    Megatron divides gradients by the number of tokens of all ranks and micro-batches, which is what
    its router losses need. Our weights already sum to one over the mini-batch, so the loss is
    multiplied by that number first.
    """
    return partial(_loss_closure, head, loss_function, total_tokens)


def _score_closure(head: Head, chunk: Any, micro: MicroBatch) -> LossClosure:
    def close(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
        scores = head(chunk, output, micro)
        nothing = output.new_zeros(())
        return nothing, torch.tensor(0, dtype=torch.int), scores

    return close


def _loss_closure(
    head: Head, loss_function: LossFunction, total_tokens: int, chunk: Any, micro: MicroBatch
) -> LossClosure:
    def close(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
        scores = head(chunk, output, micro)
        loss, metrics = loss_function(scores, micro.columns)
        weights = micro.columns["loss_weights"]
        total = (loss * weights).sum()
        result = {name: (value * weights).sum().detach() for name, value in metrics.items()}
        result["loss"] = total.detach()
        tokens = torch.tensor(micro.num_tokens, dtype=torch.int, device=output.device)
        return total * total_tokens, tokens, result

    return close


def tokens_of_all_ranks(micros: list[MicroBatch], device: torch.device) -> int:
    """What Megatron will divide gradients by: tokens of all data- and context-parallel ranks."""
    total = torch.tensor(sum(micro.num_tokens for micro in micros), device=device)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(total, group=group)
    return int(total)


def whole_column(micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """[response tokens of the micro-batch, ...] from what each context-parallel rank scored."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    whole = values.new_zeros((micro.num_response_tokens, *values.shape[1:]))
    whole[micro.places] = values
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole
