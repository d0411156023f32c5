"""Objectives of training on examples: an optimizer step on a batch, and the loss without one.

The loss of pairs takes two passes. The first gives the scores of all responses under the current
weights. From these the driver computes the loss and what each token weighs in its gradient
(algorithms/preference.py), and the second pass is an update with those weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from mcore_rl.algorithms.aggregation import compute_loss_weights
from mcore_rl.algorithms.estimates import compute_ratio_error
from mcore_rl.algorithms.preference import (
    PairLosses,
    PreferenceLoss,
    bradley_terry,
    build_pair_inputs,
    compute_pair_weights,
)
from mcore_rl.controller.dispatch import RankGroup, RemoteMethod
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.examples import build_scoring_batch
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.observability.activity import Stopwatch

Metrics = dict[str, float]


class Objective(Protocol):
    """A model and the loss that it is trained by."""

    def step(self, batch: Batch, clock: Stopwatch) -> Metrics:
        """Take one optimizer step; return metrics of the weights before it."""

    def evaluate(self, batches: Iterator[Batch]) -> Metrics:
        """Return the metrics of all batches together, without training.

        NAME_stderr is the standard error over rows of a loss or an accuracy.
        """


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """The negative log-likelihood of the trained tokens, at temperature 1: nothing is sampled."""

    model: RankGroup
    aggregation: str = "token_mean"

    def step(self, batch: Batch, clock: Stopwatch) -> Metrics:
        """Take one optimizer step; return metrics of the weights before it."""
        weights = compute_loss_weights(batch.jagged("response_mask"), self.aggregation)
        with clock("update"):
            batch = batch.with_columns(loss_weights=weights)
            return self.model.call(ModelWorker.update, batch)[0][0]

    def evaluate(self, batches: Iterator[Batch]) -> Metrics:
        """Return `loss`: the mean over all trained tokens, whatever the aggregation."""
        sums, counts = list[float](), list[int]()  # of each row
        for batch in batches:
            scored = call_by_value(
                self.model, ModelWorker.compute_log_probs, batch, temperature=1.0
            )
            pairs = zip(scored.jagged("log_probs"), batch.jagged("response_mask"), strict=True)
            for log_probs, mask in pairs:
                sums.append(-float(log_probs[mask != 0].sum(dtype=np.float64)))
                counts.append(int((mask != 0).sum()))
        return {
            "loss": float(np.sum(sums) / np.sum(counts)),
            "loss_stderr": compute_ratio_error(sums, counts),
        }


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference of a preference loss: a frozen model, or the trained one without adapters."""

    workers: RankGroup
    compute_log_probs: RemoteMethod[..., Samples]
    is_offloaded: bool = False  # between calls: it shares devices with the trained model

    def add_log_probs(self, batch: Batch) -> Batch:
        """Add reference_log_probs: [response tokens], in nats."""
        columns = batch.select_inputs()
        scored = call_by_value(self.workers, self.compute_log_probs, columns, temperature=1.0)
        scored = scored.select("log_probs")
        if self.is_offloaded:
            self.workers.call(ModelWorker.to, "host")
        return batch.union(scored.rename_columns(log_probs="reference_log_probs"))


def call_by_value[**P](
    workers: RankGroup, method: RemoteMethod[P, Samples], *args: P.args, **kwargs: P.kwargs
) -> Batch:
    """Call a method with a batch in this process, so that the one it returns is here, too."""
    scored = workers.call(method, *args, **kwargs)
    assert isinstance(scored, Batch)
    return scored


class PairObjective(ABC):
    """A loss of pairs, whose value and gradient are computed before the update."""

    model: RankGroup

    @abstractmethod
    def compute_losses(self, batch: Batch, clock: Stopwatch) -> tuple[Batch, PairLosses]:
        """Return the batch that an update takes, without weights, and the losses of its pairs."""

    def step(self, batch: Batch, clock: Stopwatch) -> Metrics:
        """Take one optimizer step; return metrics of the weights before it."""
        batch, losses = self.compute_losses(batch, clock)
        weights = compute_pair_weights(batch, losses)
        with clock("update"):
            batch = batch.with_columns(loss_weights=weights)
            metrics = self.model.call(ModelWorker.update, batch)[0][0]
        # The loss of the update has the gradient of the pairs' loss, not its value.
        return {**metrics, **losses.metrics}

    def evaluate(self, batches: Iterator[Batch]) -> Metrics:
        """Return means over the pairs of all batches."""
        losses = [self.compute_losses(batch, Stopwatch())[1] for batch in batches]
        columns = [[getattr(part, field.name) for part in losses] for field in fields(PairLosses)]
        return PairLosses(*map(np.concatenate, columns)).metrics_with_errors


@dataclass(frozen=True)
class PreferenceObjective(PairObjective):
    """A loss of pairs of responses, by their log-probs under the policy and the reference."""

    model: RankGroup
    loss: PreferenceLoss
    reference: Reference | None  # None for a loss that has none

    def compute_losses(self, batch: Batch, clock: Stopwatch) -> tuple[Batch, PairLosses]:
        if self.reference is not None:
            with clock("reference"):
                batch = self.reference.add_log_probs(batch)
        with clock("log_probs"):
            batch = call_by_value(self.model, ModelWorker.compute_log_probs, batch, temperature=1.0)
        return batch, self.loss(build_pair_inputs(batch))


@dataclass(frozen=True)
class RewardObjective(PairObjective):
    """The Bradley-Terry loss of the scores at the last tokens of both conversations of a pair."""

    model: RankGroup

    def compute_losses(self, batch: Batch, clock: Stopwatch) -> tuple[Batch, PairLosses]:
        with clock("scores"):
            batch = call_by_value(
                self.model, ModelWorker.compute_values, build_scoring_batch(batch)
            )
        scores = batch.jagged("values").values.astype(np.float64)
        margins = batch.array("margins")[::2]
        return batch, bradley_terry(scores[::2], scores[1::2], margins)
