"""The only place that normalises a loss.

A loss is aggregated by weights fixed before the mini-batch is split: however its tokens are split
over micro-batches, ranks and context-parallel chunks, the aggregated loss is the plain sum of
weight * loss over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Jagged

Floats = npt.NDArray[np.float64]
# From the number of trained tokens of each sequence to the weight of each of its trained tokens.
SequenceWeights = Callable[[Floats], Floats]
AGGREGATIONS: Registry[SequenceWeights] = Registry("algorithm.loss_aggregation", ("counts",))


def loss_weights(
    response_mask: Jagged, mode: str, settings: Mapping[str, object] | None = None
) -> Jagged:
    """Weight of each response token: the aggregated loss is sum_t weight_t * loss_t.

    response_mask is a whole mini-batch, over all ranks: 1 at tokens to train on, else 0. The result
    is float32 in the same rows, 0 wherever the mask is. A sequence without a trained token does not
    count as a sequence. `settings` are those of the mode, if it has any.

    Raises:
        ValueError: no token at all is to be trained on.
        ConfigError: an unknown mode or setting, or one that returns something else than a finite
            weight for each sequence.
    """
    sequence_weights = AGGREGATIONS.bound(mode, settings or {})
    trained = (response_mask.values != 0).astype(np.float64)
    row = np.repeat(np.arange(len(response_mask)), response_mask.lengths)
    counts = np.bincount(row, weights=trained, minlength=len(response_mask)).astype(np.float64)
    if not counts.any():
        raise ValueError(
            f"no token of the mini-batch is to be trained on: response_mask is 0 at all "
            f"{len(trained)} tokens of {len(response_mask)} samples"
        )
    weights = np.asarray(sequence_weights(counts))
    if weights.shape != counts.shape or not np.isfinite(weights).all():
        raise ConfigError(
            f"{AGGREGATIONS.setting}={mode!r} returned {weights} for sequences of {counts} tokens; "
            "allowed: a finite weight for each"
        )
    return response_mask.with_values((trained * weights[row]).astype(np.float32))


@AGGREGATIONS.register("token_mean")
def _token_mean(counts: Floats) -> Floats:
    """Every token weighs the same, so long responses weigh more (DAPO, arXiv:2503.14476)."""
    return np.full_like(counts, 1.0 / counts.sum())


@AGGREGATIONS.register("sequence_mean_token_mean")
def _sequence_mean_token_mean(counts: Floats) -> Floats:
    """Every sequence weighs the same: the mean of token means (GRPO, arXiv:2402.03300)."""
    return 1.0 / (np.maximum(counts, 1.0) * np.count_nonzero(counts))


@AGGREGATIONS.register("sequence_mean_token_sum")
def _sequence_mean_token_sum(counts: Floats) -> Floats:
    """The mean over sequences of the sum over their tokens: no bias towards any length."""
    return np.full_like(counts, 1.0 / np.count_nonzero(counts))
