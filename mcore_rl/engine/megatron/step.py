"""A forward or forward-backward pass over micro-batches, through Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from mcore_rl.algorithms.inputs import WEIGHTS, LossInputs, Tensors
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import LossFunction
from mcore_rl.engine.megatron.heads import Head
from mcore_rl.engine.megatron.packing import MicroBatch
from mcore_rl.engine.steps import reduce_logprob_gaps, sum_losses

Result = dict[str, torch.Tensor]
SCORES = "scores/"  # prefix of the names of scores in a result of training
# As Megatron's loss_func: loss to differentiate, number of tokens, result.
LossOutput = tuple[torch.Tensor, torch.Tensor, Result]
# From (model chunk with the head, micro-batch, output of the chunk).
LossFunc = Callable[[Any, MicroBatch, torch.Tensor], LossOutput]
# From (model chunk, micro-batch) to the context of the chunk's forward call.
ForwardContext = Callable[[Any, MicroBatch], AbstractContextManager[None]]


def run_micro_batches(
    chunks: Sequence[Any],
    micros: list[MicroBatch],
    loss_func: LossFunc,
    forward_context: ForwardContext,
    *,
    forward_only: bool,
) -> list[Result]:
    """Run Megatron's schedule; return one result per micro-batch on the last stage, else none."""

    def forward_step(
        data: Iterator[MicroBatch], chunk: Any
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossOutput]]:
        micro, model = next(data), unwrap_model(chunk)
        is_padding = (micro.token_indices < 0)[None] if model.config.num_moe_experts else None
        with forward_context(model, micro):
            output = chunk(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                attention_mask=None,
                packed_seq_params=micro.packed_seq_params,
                padding_mask=is_padding,
            )
        return output, partial(loss_func, model, micro)

    results: list[Result] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micros) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micros),
        # Unused without a pipeline; with one the stages exchange the shapes.
        seq_length=max(micro.input_ids.shape[1] for micro in micros),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def compute_scores(head: Head, chunk: Any, micro: MicroBatch, output: torch.Tensor) -> LossOutput:
    """Return the scores of a micro-batch as its result, and a loss of 0."""
    scores = head(chunk, output, micro)
    return output.new_zeros(()), torch.tensor(0, dtype=torch.int), scores


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Numbers of tokens in the micro-batches of all data- and context-parallel ranks."""

    total: int  # without padding: the number that Megatron divides gradients by
    trained: Mapping[str, int]  # response tokens with a weight, by weight column


def count_tokens(micros: list[MicroBatch], device: torch.device) -> TokenCounts:
    """Count the tokens of a mini-batch. Collective over data- and context-parallel ranks."""
    names = [name for name in micros[0].columns if name.endswith(WEIGHTS)]
    total = torch.tensor(sum(micro.num_tokens for micro in micros), device=device)
    trained = [torch.stack([m.columns[name].count_nonzero() for m in micros]) for name in names]
    counts = torch.stack([total, *(by_micro.sum() for by_micro in trained)])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(counts, group=group)
    num_tokens, *num_trained = counts.tolist()
    return TokenCounts(num_tokens, dict(zip(names, num_trained, strict=True)))


def compute_training_loss(
    head: Head,
    loss_function: LossFunction,
    counts: TokenCounts,
    chunk: Any,
    micro: MicroBatch,
    output: torch.Tensor,
    *,
    mtp_loss_coef: float = 0.0,
    with_scores: bool = False,
) -> LossOutput:
    """Return the sum of weight * loss over the response tokens, and this micro-batch's metrics.

    Loss weights already contain every mean. Megatron divides gradients by the number of tokens of
    all ranks and micro-batches, because its router losses need that, so the loss is multiplied by
    this number.

    Args:
        mtp_loss_coef: Coefficient of the multi-token prediction loss, which "loss" is without.
        with_scores: Give the loss function the log-probs, detached, as the column log_probs; add
            the scores to the result, for pop_scores.
    """
    output, *mtp_outputs = output.chunk(1 + len(micro.mtp_targets))
    scores = head(chunk, output, micro)
    detached = {name: values.detach() for name, values in scores.items()}
    inputs = build_loss_inputs(scores, micro)
    if with_scores:
        inputs = replace(inputs, columns={**inputs.columns, "log_probs": detached["log_probs"]})
    total, result = sum_losses(loss_function, inputs, counts.trained)
    if mtp_outputs:
        mtp_loss = head.compute_mtp_loss(chunk, mtp_outputs, micro)  # type: ignore[attr-defined]
        result["mtp_loss"] = mtp_loss.detach()
        total = total + mtp_loss_coef * mtp_loss
    if with_scores:
        result |= {f"{SCORES}{name}": detached[name] for name in ("log_probs", "entropy")}
    num_tokens = torch.tensor(micro.num_tokens, dtype=torch.int, device=output.device)
    return total * counts.total, num_tokens, result


def build_loss_inputs(scores: Tensors, micro: MicroBatch) -> LossInputs:
    """Return the inputs of a loss function for a micro-batch."""
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
    total: torch.Tensor = _AllReduce.apply(totals, parallel_state.get_context_parallel_group())
    return total


class _AllReduce(torch.autograd.Function):
    """The sum over the ranks of a group, on all of them, for sums per sequence in a loss.

    The loss is the sum of all ranks' losses, so the gradient of a total is the sum of its gradients
    on all ranks. Megatron's mappings (tensor_parallel/mappings.py:27) would sum a copy of a
    gradient that is not contiguous, and lose the sum.
    """

    @staticmethod
    def forward(ctx: Any, totals: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _sum_over_group(totals, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_over_group(gradients[0], ctx.group), None


def _sum_over_group(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def pop_scores(results: Sequence[Result]) -> list[Result]:
    """Take the scores out of results of training; return them by micro-batch."""
    names = [name for name in results[0] if name.startswith(SCORES)] if results else []
    return [{n.removeprefix(SCORES): result.pop(n) for n in names} for result in results]


def compute_logprob_gaps(
    micros: Sequence[MicroBatch], scores: Sequence[Result], device: torch.device
) -> dict[str, float]:
    """Return the gaps of BaseEngine.train_batch_with_scores. Collective over all ranks."""
    parts = [  # scores are on the last stage only
        (values["log_probs"], micro.columns["rollout_log_probs"], micro.columns["gap_mask"])
        for micro, values in zip(micros, scores, strict=False)
    ]
    return reduce_logprob_gaps(parts, device)


def gather_column(micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Return [response tokens of the micro-batch, ...] from the scored tokens of all CP ranks."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    gathered = values.new_zeros((micro.num_response_tokens, *values.shape[1:]))
    gathered[micro.response_indices] = values
    dist.all_reduce(gathered, group=parallel_state.get_context_parallel_group())
    return gathered


def restore_batch_order(
    batch: Batch, micros: Sequence[MicroBatch], results: Sequence[Result], name: str
) -> Jagged:
    """Return a result along the response tokens as a column, in the order of the batch."""
    responses = batch.jagged("response_ids")
    shape = (len(responses.values), *results[0][name].shape[1:])
    values = np.empty(shape, torch.empty(0, dtype=results[0][name].dtype).numpy().dtype)
    for micro, result in zip(micros, results, strict=True):
        packed, start = gather_column(micro, result[name]).cpu().numpy(), 0
        for row in micro.rows:
            end = start + int(responses.lengths[row])
            values[responses.offsets[row] : responses.offsets[row + 1]] = packed[start:end]
            start = end
    return responses.with_values(values)
