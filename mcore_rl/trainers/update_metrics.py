"""Metrics of an update, from those of its optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.algorithms.inputs import LOSS_WEIGHTS, WEIGHTS, stream_name
from mcore_rl.data.batch import Batch
from mcore_rl.observability.metrics import merge_metrics
from mcore_rl.trainers.policy_loss import COLUMN_OF_METRIC

TokenCounts = Mapping[str, int]  # tokens with a weight, by the column of the weights
_OF_A_STEP = ("loss", "mtp_loss", "grad_norm", "lr")
_OF_ROUTERS = "moe/"  # how names of their metrics begin
_OF_ALL_TOKENS = "moe/aux_loss"


def token_counts(batch: Batch) -> TokenCounts:
    """Of a mini-batch with the weights of its losses."""
    names = [name for name in batch.names if name.endswith(WEIGHTS)]
    return {name: int((batch.jagged(name).values != 0).sum()) for name in names}


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What an optimizer step has returned, and of how many tokens it was."""

    metrics: Mapping[str, float]
    trained: TokenCounts
    num_tokens: int  # with those that have no loss


def of_update(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """A mean over tokens stays one over all tokens of the update, however they are distributed.

    Losses, norms and rates belong to a step: theirs are means over steps.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step.metrics):
        having = [step for step in steps if name in step.metrics]
        weights = [_weight(name, step) for step in having]
        merged |= merge_metrics([{name: step.metrics[name]} for step in having], weights)
    return merged


def _weight(name: str, step: StepMetrics) -> float:
    """Of how many tokens a metric of the step is the mean; 1 for what is none."""
    if name == _OF_ALL_TOKENS:
        return step.num_tokens
    if name in _OF_A_STEP or name.startswith(_OF_ROUTERS):
        return 1
    if name in map(stream_name, step.trained):
        return 1
    column = COLUMN_OF_METRIC.get(name, LOSS_WEIGHTS)
    return step.trained.get(column, step.trained[LOSS_WEIGHTS])
