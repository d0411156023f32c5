"""Columns that a loss reads and that are made of the whole mini-batch, in one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.inputs import missing
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged

G = TypeVar("G", bound=Callable[..., Any])


def prepared_by(prepare: Callable[..., Mapping[str, Jagged]]) -> Callable[[G], G]:
    """Decorator of a loss that reads columns made of the whole mini-batch.

    `prepare(inputs: MiniBatchInputs)`, or `prepare(inputs, settings)` with the settings of the
    loss, runs on rank 0 of the actor before the update. It returns columns by name, a number for
    each response token, which the loss reads with `LossInputs.prepared`. So they do not depend on
    how the mini-batch is split over micro-batches and ranks.
    """
    found = tuple(inspect.signature(prepare).parameters)
    if found not in (("inputs",), ("inputs", "settings")):
        raise ConfigError(
            f"@prepared_by of {getattr(prepare, '__name__', prepare)}{inspect.signature(prepare)}; "
            "allowed: (inputs), or (inputs, settings)"
        )

    def mark(function: G) -> G:
        function.prepare = prepare  # type: ignore[attr-defined]
        return function

    return mark


def prepared_columns(
    loss: Callable[..., Any], settings: object | None, inputs: MiniBatchInputs, who: str
) -> dict[str, Jagged]:
    """The columns that the function of `prepared_by` makes for a loss with these settings.

    Raises:
        ConfigError: they are something else than new columns of finite numbers, one a response
            token.
    """
    prepare = loss.prepare  # type: ignore[attr-defined]
    takes_settings = "settings" in inspect.signature(prepare).parameters
    found = prepare(inputs, settings) if takes_settings else prepare(inputs)
    lengths = inputs.batch.jagged("response_ids").lengths
    for name, column in found.items():
        if name in inputs.batch:
            raise ConfigError(f"{who} prepares {name}, which is a column of the batch already")
        if not isinstance(column, Jagged) or not np.array_equal(column.lengths, lengths):
            raise ConfigError(f"{who} prepares {name}; allowed: a Jagged with the responses' rows")
        if column.values.ndim != 1 or not np.isfinite(column.values).all():
            raise ConfigError(f"{who} prepares {name}; allowed: a finite number for each token")
    return dict(found)


def is_prepared(loss: Callable[..., Any]) -> bool:
    return hasattr(loss, "prepare")


@dataclass(frozen=True, slots=True)
class MiniBatchInputs:
    """Columns of a whole mini-batch, over all ranks, before its update: see prepared_by."""

    batch: Batch
    seed: Sequence[int]  # of this mini-batch: the same in a run that is resumed

    @property
    def log_probs(self) -> Jagged:
        """[response tokens] of the policy as it is before the update, in nats."""
        return self._column("current_log_probs")

    @property
    def entropy(self) -> Jagged:
        """[response tokens] of that policy, in nats."""
        return self._column("entropy")

    @property
    def old_log_probs(self) -> Jagged:
        """[response tokens] of the policy that generated, by the trainer, in nats."""
        return self._column("log_probs", "old_log_probs")

    @property
    def rollout_log_probs(self) -> Jagged:
        """[response tokens] of the same, by the server that generated."""
        return self._column("rollout_log_probs")

    @property
    def advantages(self) -> Jagged:
        """[response tokens]"""
        return self._column("advantages")

    @property
    def response_mask(self) -> Jagged:
        """[response tokens]: 1 at those that the policy chose, else 0."""
        return self._column("response_mask")

    @property
    def loss_weights(self) -> Jagged:
        """[response tokens]: 0 at those that are not trained on, as rejected ones."""
        return self._column("loss_weights")

    @property
    def rewards(self) -> npt.NDArray[np.floating]:
        """[samples]"""
        return self.batch.array("rewards")

    def _column(self, name: str, called: str = "") -> Jagged:
        if name not in self.batch:
            missing(called or name, "algorithm.loss")
        return self.batch.jagged(name)
