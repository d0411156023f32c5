"""Parts of an optimizer step that are the same in every engine: losses, metrics, gaps, schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

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
)
from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.data.batch import Batch, Jagged

# Jagged columns that do not run along the responses.
_OTHER_COLUMNS = ("prompt_ids", "response_ids", "routed_experts", "stage_routed_experts")


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
