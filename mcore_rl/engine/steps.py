"""Parts of an optimizer step that are the same in every engine: losses, metrics, gaps, schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.inputs import (
    LOSS_WEIGHTS,
    WEIGHTS,
    Losses,
    LossInputs,
    Tensors,
    get_loss_name,
    get_needs,
)
from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.data.batch import PICKED_KEYS, Batch, Jagged
from mcore_rl.engine.logprob import VocabShard, compute_log_probs

if TYPE_CHECKING:
    from mcore_rl.engine.base import EngineSpec, LossFunction
    from mcore_rl.engine.packing import MicroBatch

Result = dict[str, torch.Tensor]
Scores = dict[str, torch.Tensor]  # by name, each [response tokens of this rank, ...]
_SCORES = "scores/"  # prefix of the names of scores in a result of training
# Jagged columns that do not run along the responses.
_OTHER_COLUMNS = (
    "prompt_ids", "response_ids", "routed_experts", "stage_routed_experts", PICKED_KEYS
)  # fmt: skip


def select_response_columns(batch: Batch) -> dict[str, Jagged]:
    """Return the columns that run along the responses, without ids and routed experts.

    Raises:
        ValueError: A jagged column has other lengths than the responses.
    """
    lengths, columns = batch.jagged("response_ids").lengths, {}
    for name, column in batch.columns.items():
        if name.partition("/")[0] in _OTHER_COLUMNS or not isinstance(column, Jagged):
            continue
        if not np.array_equal(column.lengths, lengths):
            raise ValueError(f"column {name!r} does not run along the response tokens")
        columns[name] = column
    return columns


def build_loss_inputs(scores: Tensors, batch: Batch, device: torch.device) -> LossInputs:
    """Return the inputs of a loss function for a micro-batch that is whole on this rank.

    Args:
        scores: Outputs of the model, [response tokens] each, in the order of the batch.
    """
    columns = select_response_columns(batch).items()
    lengths = torch.from_numpy(batch.jagged("response_ids").lengths)
    return LossInputs(
        scores=scores,
        columns={name: torch.from_numpy(c.values.copy()).to(device) for name, c in columns},
        sequence_ids=torch.arange(len(batch)).repeat_interleave(lengths).to(device),
        num_sequences=len(batch),
    )


def count_trained_tokens(batch: Batch) -> dict[str, int]:
    """Return the number of response tokens with a weight other than 0, by column of weights."""
    names = [name for name in batch.names if name.endswith(WEIGHTS)]
    return {name: int(np.count_nonzero(batch.jagged(name).values)) for name in names}


def sum_losses(
    loss_function: Callable[[LossInputs], Losses],
    inputs: LossInputs,
    num_trained: Mapping[str, int],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of weights * loss of a micro-batch, and its parts of train_batch's metrics.

    Weights do not sum to one in every aggregation, so metrics have a norm of their own: each
    micro-batch adds the sum over its tokens with a weight, divided by the number of those of all
    micro-batches and ranks. Sums of the parts over both are the metrics.

    Args:
        num_trained: Sums of count_trained_tokens over all micro-batches and ranks.
    """
    losses, metrics = loss_function(inputs)
    streams = losses if isinstance(losses, Mapping) else {LOSS_WEIGHTS: losses}
    sums = {name: (loss * inputs.columns[name]).sum() for name, loss in streams.items()}
    total = torch.stack([*sums.values()]).sum()
    parts = {}
    for name, metric in metrics.items():
        column, value = metric if isinstance(metric, tuple) else (LOSS_WEIGHTS, metric)
        trained = torch.where(inputs.columns[column] != 0, value.detach(), 0)
        parts[name] = trained.sum() / max(num_trained[column], 1)
    if isinstance(losses, Mapping):
        parts |= {get_loss_name(name): value.detach() for name, value in sums.items()}
    parts["loss"] = total.detach()
    return total, parts


def reduce_logprob_gaps(
    parts: Iterable[tuple[torch.Tensor, ...]], device: torch.device
) -> dict[str, float]:
    """Return the gaps of BaseEngine.train_batch_with_scores, of all ranks; all ranks take part.

    Ranks that have the same tokens count them as often as each other, so the mean is right.

    Args:
        parts: Log-probs of the trainer, log-probs of the servers and gap_mask, [tokens] each, of
            the micro-batches of this rank.
    """
    largest, total, count = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
    for log_probs, rollout_log_probs, gap_mask in parts:
        gaps = (log_probs - rollout_log_probs).abs()
        gaps = torch.where(gap_mask != 0, gaps, 0).double()
        total += gaps.sum()
        count += (gap_mask != 0).sum()
        largest = torch.maximum(largest, gaps.max() if len(gaps) else gaps.sum())
    sums = torch.stack([total, count])
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    sum_of_all, num_of_all = sums.tolist()
    if not num_of_all:
        return {}
    mean = sum_of_all / num_of_all
    # A sum keeps a NaN; a maximum over ranks may lose it.
    return {
        "max_logprob_gap": mean if math.isnan(mean) else float(largest),
        "mean_logprob_gap": mean,
    }


def compute_learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of a step, from 1 to `total_steps`.

    As Megatron's OptimizerParamScheduler.get_lr (megatron/core/optimizer_param_scheduler.py).

    >>> config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    >>> [compute_learning_rate(config, step, 4) for step in range(1, 5)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    last = max(total_steps, config.warmup_steps + 1)
    if step > last:
        return config.min_lr
    progress = (step - config.warmup_steps) / (last - config.warmup_steps)
    if config.schedule == "linear":
        share = 1.0 - progress
    elif config.schedule == "cosine":
        share = 0.5 * (math.cos(math.pi * progress) + 1.0)
    else:  # wsd: constant, then linear over the last steps
        share = min(1.0, (last - step) / config.wsd_decay_steps)
    return config.min_lr + share * (config.lr - config.min_lr)


# Steps on packed micro-batches (engine/packing.py). Groups are process groups: `context`, the ranks
# that have parts of the same packs, or None without context parallelism; `data`, those and the
# ranks that have other samples.


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


def count_tokens(
    micros: Sequence[MicroBatch], device: torch.device, data: dist.ProcessGroup | None
) -> TokenCounts:
    """Count the tokens of a mini-batch. Collective over the group `data`; None: all ranks."""
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
    context: dist.ProcessGroup | None,
    *,
    with_scores: bool = False,
) -> tuple[torch.Tensor, Result]:
    """Return the sum of weight * loss over the response tokens, and this micro-batch's metrics.

    Args:
        with_scores: Give the loss function the log-probs, detached, as the column log_probs; add
            the scores to the result, for pop_scores.
    """
    detached = {name: values.detach() for name, values in scores.items()}
    inputs = build_pack_inputs(scores, micro, context)
    if with_scores:
        inputs = replace(inputs, columns={**inputs.columns, "log_probs": detached["log_probs"]})
    total, result = sum_losses(loss_function, inputs, counts.trained)
    if with_scores:
        result |= {f"{_SCORES}{name}": detached[name] for name in ("log_probs", "entropy")}
    return total, result


def build_pack_inputs(
    scores: Tensors, micro: MicroBatch, context: dist.ProcessGroup | None = None
) -> LossInputs:
    """Return the inputs of a loss function for a micro-batch."""

    def sum_over_context(totals: torch.Tensor) -> torch.Tensor:
        return _all_reduce(totals, context) if context is not None else totals

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
    def forward(ctx: Any, totals: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sum_over_group(totals, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_over_group(gradients[0], ctx.group), None


_all_reduce: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor] = _AllReduce.apply


def _sum_over_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def reduce_metrics(results: Sequence[Result], data: dist.ProcessGroup | None) -> dict[str, float]:
    """Sum metrics over micro-batches and the ranks of the group `data`; None: all ranks."""
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


def gather_column(
    micro: MicroBatch, values: torch.Tensor, context: dist.ProcessGroup | None
) -> torch.Tensor:
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
    context: dist.ProcessGroup | None,
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
