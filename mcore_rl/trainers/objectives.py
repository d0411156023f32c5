"""What training on examples minimises: an optimizer step on a batch, and the same loss elsewhere.

The loss of pairs takes two passes. The first gives the scores of all responses under the current
weights. From these the driver computes the loss and what each token weighs in its gradient
(algorithms/preference.py), and the second pass is an update with those weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from mcore_rl.algorithms.aggregation import loss_weights
from mcore_rl.algorithms.estimates import ratio_error
from mcore_rl.algorithms.preference import (
    PairLosses,
    PreferenceLoss,
    bradley_terry,
    pair_inputs,
    pair_weights,
)
from mcore_rl.controller.dispatch import Group
from mcore_rl.data.batch import Batch
from mcore_rl.data.examples import scored_batch
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.trainers.steps import with_reference_log_probs

Metrics = dict[str, float]


class Objective(Protocol):
    """A model and a loss."""

    def step(self, batch: Batch, clock: Stopwatch) -> Metrics:
        """One optimizer step; its metrics are those of the weights before it."""

    def evaluate(self, batches: Iterator[Batch]) -> Metrics:
        """The metrics of all batches together, without training.

        NAME_stderr is the standard error over rows of a loss or an accuracy.
        """


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """The negative log-likelihood of the trained tokens, at temperature 1: nothing is sampled."""

    model: Group
    aggregation: str = "token_mean"

    def step(self, batch: Batch, clock: Stopwatch) -> Metrics:
        weights = loss_weights(batch.jagged("response_mask"), self.aggregation)
        with clock("update"):
            found: Metrics = self.model.update(batch.with_columns(loss_weights=weights))[0][0]
        return found

    def evaluate(self, batches: Iterator[Batch]) -> Metrics:
        """`loss`: the mean over all trained tokens, whatever the aggregation."""
        sums, counts = list[float](), list[int]()  # of each row
        for batch in batches:
            scored = self.model.compute_log_probs(batch, temperature=1.0)
            pairs = zip(scored.jagged("log_probs"), batch.jagged("response_mask"), strict=True)
            for log_probs, mask in pairs:
                sums.append(-float(log_probs[mask != 0].sum(dtype=np.float64)))
                counts.append(int((mask != 0).sum()))
        return {
            "loss": float(np.sum(sums) / np.sum(counts)),
            "loss_stderr": ratio_error(sums, counts),
        }


@dataclass(frozen=True, slots=True)
class Reference:
    """Who gives the reference's log-probs: a frozen model, or the trained one without adapters."""

    score: Callable[..., Batch]  # as WorkerGroup.compute_log_probs
    moved: Group | None = None  # the frozen model, where it is on the device for this alone

    def add_to(self, batch: Batch) -> Batch:
        if self.moved is not None:
            self.moved.to("device")
        batch = with_reference_log_probs(batch, self.score, 1.0)
        if self.moved is not None:
            self.moved.to("host")
        return batch


class PairObjective(ABC):
    """A loss of pairs: its value and its gradient are known before the update."""

    model: Group

    @abstractmethod
    def losses(self, batch: Batch, clock: Stopwatch) -> tuple[Batch, PairLosses]:
        """Those of the pairs of a batch, and the batch that an update takes, without weights."""

    def step(self, batch: Batch, clock: Stopwatch) -> Metrics:
        batch, losses = self.losses(batch, clock)
        weights = pair_weights(batch, losses)
        with clock("update"):
            found = self.model.update(batch.with_columns(loss_weights=weights))[0][0]
        return {**found, **losses.metrics}  # the loss of the update has the gradient, not the value

    def evaluate(self, batches: Iterator[Batch]) -> Metrics:
        """Means over the pairs of all batches."""
        found = [self.losses(batch, Stopwatch())[1] for batch in batches]
        columns = [[getattr(o, field.name) for o in found] for field in fields(PairLosses)]
        return PairLosses(*map(np.concatenate, columns)).metrics_with_errors


@dataclass(frozen=True)
class PreferenceObjective(PairObjective):
    """A loss of pairs of responses, by their log-probs under the policy and the reference."""

    model: Group
    loss: PreferenceLoss
    reference: Reference | None  # None for a loss that has none

    def losses(self, batch: Batch, clock: Stopwatch) -> tuple[Batch, PairLosses]:
        if self.reference is not None:
            with clock("reference"):
                batch = self.reference.add_to(batch)
        with clock("log_probs"):
            batch = self.model.compute_log_probs(batch, temperature=1.0)
        return batch, self.loss(pair_inputs(batch))


@dataclass(frozen=True)
class RewardObjective(PairObjective):
    """The Bradley-Terry loss of the scores at the last tokens of both conversations of a pair."""

    model: Group

    def losses(self, batch: Batch, clock: Stopwatch) -> tuple[Batch, PairLosses]:
        with clock("scores"):
            batch = self.model.compute_values(scored_batch(batch))
        scores = batch.jagged("values").values.astype(np.float64)
        margins = batch.array("margins")[::2]
        return batch, bradley_terry(scores[::2], scores[1::2], margins)
