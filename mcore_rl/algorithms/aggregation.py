"""The only place that normalises a loss.

A loss is aggregated by weights fixed before the mini-batch is split: however its tokens are split
over micro-batches, ranks and context-parallel chunks, the aggregated loss is the plain sum of
weight * loss over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.checks import check_at_least
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Jagged
from mcore_rl.data.trajectories import Rows

Floats = npt.NDArray[np.float64]
# From the number of trained tokens of each sequence to the weight of each of its trained tokens.
SequenceWeights = Callable[[Floats], Floats]
AGGREGATIONS: Registry[SequenceWeights] = Registry("algorithm.loss_aggregation", ("counts",))


def loss_weights(
    response_mask: Jagged,
    mode: str,
    settings: Mapping[str, object] | None = None,
    sequences: Rows | None = None,
) -> Jagged:
    """Weight of each response token: the aggregated loss is sum_t weight_t * loss_t.

    response_mask is a whole mini-batch, over all ranks: 1 at tokens to train on, else 0. The result
    is float32 in the same rows, 0 wherever the mask is. A sequence without a trained token does not
    count as a sequence. `settings` are those of the mode, if it has any. `sequences`: the number of
    the sequence that each row is of, such as Trajectories.numbers; without it each row is its own.

    Raises:
        ValueError: no token at all is to be trained on.
        ConfigError: an unknown mode or setting, or one that returns something else than a finite
            weight for each sequence.
    """
    sequence_weights = AGGREGATIONS.bound(mode, settings or {})
    trained = (response_mask.values != 0).astype(np.float64)
    numbers = np.arange(len(response_mask)) if sequences is None else sequences
    sequence = np.repeat(numbers, response_mask.lengths)
    num = int(numbers.max(initial=-1)) + 1
    counts = np.bincount(sequence, weights=trained, minlength=num).astype(np.float64)
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
    return response_mask.with_values((trained * weights[sequence]).astype(np.float32))


def top_entropy_mask(entropy: Jagged, response_mask: Jagged, share: float) -> Jagged:
    """1 at the chosen tokens of the highest entropy, this share of all of the batch, else 0.

    The high-entropy minority tokens of Wang et al. 2025 (arXiv:2506.01939, share 0.2).
    As many as are nearest to the share, at least one; and those whose entropy equals the lowest of
    these. The batch is that of the step, and the loss is divided by all tokens, as in the paper.
    """
    chosen = response_mask.values != 0
    found = entropy.values[chosen]
    kept = np.zeros_like(response_mask.values)
    if len(found):
        place = len(found) - max(round(share * len(found)), 1)
        kept[chosen] = found >= np.partition(found, place)[place]
    return response_mask.with_values(kept)


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


@dataclass(frozen=True, slots=True)
class FixedLengthSettings:
    length: int  # in tokens; of a run, if it is not set: rollout.max_response_tokens

    def __post_init__(self) -> None:
        check_at_least("length", self.length, 1)


@AGGREGATIONS.register("sequence_sum_fixed_length")
def _sequence_sum_fixed_length(counts: Floats, settings: FixedLengthSettings) -> Floats:
    """The mean over sequences of the sum over their tokens, divided by a constant length.

    Dr. GRPO (arXiv:2503.20783): no bias towards any length, and losses of the size of a
    token's. Sequences without a trained token are left out of the mean, as they are of the others.
    """
    return np.full_like(counts, 1.0 / (np.count_nonzero(counts) * settings.length))
