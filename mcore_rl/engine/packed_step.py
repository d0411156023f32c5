"""Losses, metrics and scores of packed micro-batches: what engines with packs share.

Groups are process groups: `context`, the ranks that have parts of the same packs, or None without
context parallelism; `data`, those and the ranks that have other samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.inputs import WEIGHTS, LossInputs, Tensors, get_needs
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import EngineSpec, LossFunction
from mcore_rl.engine.logprob import VocabShard, compute_log_probs
from mcore_rl.engine.packing import MicroBatch
from mcore_rl.engine.steps import reduce_logprob_gaps, sum_losses

Result = dict[str, torch.Tensor]
Scores = dict[str, torch.Tensor]  # by name, each [response tokens of this rank, ...]
_SCORES = "scores/"  # prefix of the names of scores in a result of training


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """The scores of a pass: log-probs, and entropy, sum_pi_squared and top log-probs if enabled."""

    temperature: float
    chunk_bytes: int  # limit on logits and probabilities in memory at a time
    with_entropy: bool
    with_squares: bool = False
    num_top: int = 0


def choose_scores(
    spec: EngineSpec,
    temperature: float,
    loss_function: LossFunction | None,
    *,
    with_scores: bool = False,
) -> ScoreSettings:
    """Return the scores that a pass of an engine computes: all of them without a loss."""
    is_scoring = loss_function is None
    is_entropy_read = loss_function is None or "entropy" in get_needs(loss_function)
    return ScoreSettings(
        temperature,
        spec.engine.logprob_chunk_bytes,
        with_entropy=with_scores or is_entropy_read,
        with_squares=spec.with_sum_pi_squared and is_scoring,
        num_top=spec.num_top_log_probs if is_scoring else 0,
    )


def score_tokens(
    hidden: torch.Tensor,
    head: torch.Tensor,
    micro: MicroBatch,
    shard: VocabShard,
    settings: ScoreSettings,
) -> Scores:
    """Return the scores of the response tokens of a micro-batch.

    If the batch has the column teacher_ids, also chosen_log_probs [tokens, ids] of these ids.

    Args:
        hidden: [scored tokens, hidden], the states at micro.hidden_rows.
        head: Rows of the output projection, those of `shard`.
    """
    targets = micro.targets
    if has_teacher := "teacher_ids" in micro.columns:
        targets = torch.cat([targets[:, None], micro.columns["teacher_ids"].flatten(1)], 1)
    values = compute_log_probs(
        hidden,
        head,
        targets,
        shard,
        temperature=settings.temperature,
        chunk_bytes=settings.chunk_bytes,
        with_entropy=settings.with_entropy,
        with_squares=settings.with_squares,
        num_top=settings.num_top,
    )
    scores = {"log_probs": values.log_probs}
    if has_teacher:
        scores = {"log_probs": values.log_probs[:, 0], "chosen_log_probs": values.log_probs[:, 1:]}
    if settings.with_entropy:
        scores["entropy"] = values.entropy
    if settings.with_squares:
        scores["sum_pi_squared"] = values.sum_pi_squared
    if settings.num_top:
        scores |= {"top_log_probs": values.top_log_probs, "top_ids": values.top_ids}
    return scores


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Numbers of tokens in the micro-batches of all data- and context-parallel ranks."""

    total: int  # without padding
    trained: Mapping[str, int]  # response tokens with a weight, by weight column


def count_tokens(micros: Sequence[MicroBatch], device: torch.device, data: Any) -> TokenCounts:
    """Count the tokens of a mini-batch. Collective over the group `data`."""
    names = [name for name in micros[0].columns if name.endswith(WEIGHTS)]
    total = torch.tensor(sum(micro.num_tokens for micro in micros), device=device)
    trained = [torch.stack([m.columns[name].count_nonzero() for m in micros]) for name in names]
    counts = torch.stack([total, *(by_micro.sum() for by_micro in trained)])
    dist.all_reduce(counts, group=data)
    num_tokens, *num_trained = counts.tolist()
    return TokenCounts(num_tokens, dict(zip(names, num_trained, strict=True)))


def compute_loss(
    scores: Scores,
    loss_function: LossFunction,
    counts: TokenCounts,
    micro: MicroBatch,
    context: Any,
    *,
    with_scores: bool = False,
) -> tuple[torch.Tensor, Result]:
    """Return the sum of weight * loss over the response tokens, and this micro-batch's metrics.

    Args:
        with_scores: Give the loss function the log-probs, detached, as the column log_probs; add
            the scores to the result, for pop_scores.
    """
    detached = {name: values.detach() for name, values in scores.items()}
    inputs = build_loss_inputs(scores, micro, context)
    if with_scores:
        inputs = replace(inputs, columns={**inputs.columns, "log_probs": detached["log_probs"]})
    total, result = sum_losses(loss_function, inputs, counts.trained)
    if with_scores:
        result |= {f"{_SCORES}{name}": detached[name] for name in ("log_probs", "entropy")}
    return total, result


def build_loss_inputs(scores: Tensors, micro: MicroBatch, context: Any = None) -> LossInputs:
    """Return the inputs of a loss function for a micro-batch."""

    def sum_over_context(totals: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _AllReduce.apply(totals, context) if context is not None else totals
        return total

    return LossInputs(
        scores=scores,
        columns=micro.columns,
        sequence_ids=micro.sequence_ids,
        num_sequences=len(micro.rows),
        sum_over_ranks=sum_over_context,
    )


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


def reduce_metrics(results: Sequence[Result], data: Any) -> dict[str, float]:
    """Sum metrics over micro-batches and the ranks of the group `data`."""
    names = list(results[0])
    totals = torch.stack([torch.stack([r[name] for r in results]).sum() for name in names])
    dist.all_reduce(totals, group=data)
    return dict(zip(names, totals.tolist(), strict=True))


def pop_scores(results: Sequence[Result]) -> list[Result]:
    """Take the scores out of results of training; return them by micro-batch."""
    names = [name for name in results[0] if name.startswith(_SCORES)] if results else []
    return [{n.removeprefix(_SCORES): result.pop(n) for n in names} for result in results]


def compute_logprob_gaps(
    micros: Sequence[MicroBatch], scores: Sequence[Result], device: torch.device
) -> dict[str, float]:
    """Return the gaps of BaseEngine.train_batch_with_scores. Collective over all ranks."""
    parts = [  # scores are on the last stage only
        (values["log_probs"], micro.columns["rollout_log_probs"], micro.columns["gap_mask"])
        for micro, values in zip(micros, scores, strict=False)
    ]
    return reduce_logprob_gaps(parts, device)


def gather_column(micro: MicroBatch, values: torch.Tensor, context: Any) -> torch.Tensor:
    """Return [response tokens of the micro-batch, ...] from the scored tokens of all CP ranks."""
    if context is None:
        return values
    gathered = values.new_zeros((micro.num_response_tokens, *values.shape[1:]))
    gathered[micro.response_indices] = values
    dist.all_reduce(gathered, group=context)
    return gathered


def restore_batch_order(
    batch: Batch,
    micros: Sequence[MicroBatch],
    results: Sequence[Result],
    name: str,
    context: Any,
) -> Jagged:
    """Return a result along the response tokens as a column, in the order of the batch."""
    responses = batch.jagged("response_ids")
    shape = (len(responses.values), *results[0][name].shape[1:])
    values = np.empty(shape, torch.empty(0, dtype=results[0][name].dtype).numpy().dtype)
    for micro, result in zip(micros, results, strict=True):
        packed, start = gather_column(micro, result[name], context).cpu().numpy(), 0
        for row in micro.rows:
            end = start + int(responses.lengths[row])
            values[responses.offsets[row] : responses.offsets[row + 1]] = packed[start:end]
            start = end
    return responses.with_values(values)
