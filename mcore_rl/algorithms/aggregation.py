"""Loss aggregation: the weight of each token's loss. Nothing else normalises a loss.

Weights are computed before the mini-batch is split, so that the aggregated loss is the plain sum of
weight * loss, however tokens are split over micro-batches, ranks and context-parallel chunks.
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
# Maps the number of trained tokens of each sequence to the weight of each of these tokens.
SequenceWeights = Callable[[Floats], Floats]
AGGREGATIONS: Registry[SequenceWeights] = Registry("algorithm.loss_aggregation", ("counts",))


def compute_loss_weights(
    response_mask: Jagged,
    mode: str,
    settings: Mapping[str, object] | None = None,
    sequences: Rows | None = None,
) -> Jagged:
    """Compute the weight of each response token: the aggregated loss is sum_t weight_t * loss_t.

    Args:
        response_mask: 1 at tokens to train on, else 0, of the whole mini-batch over all ranks.
        mode: Value of algorithm.loss_aggregation.
        settings: Settings of the mode.
        sequences: Index of the sequence of each row, as Trajectories.numbers; None: each row is a
            sequence. Sequences without a trained token do not count.

    Returns:
        float32 in the same rows, 0 wherever the mask is 0.

    Raises:
        ValueError: no token is to be trained on.
        ConfigError: the mode or a setting is unknown, or the mode does not return a finite weight
            for each sequence.
    """
    sequence_weights = AGGREGATIONS.bind(mode, settings or {})
    trained = (response_mask.values != 0).astype(np.float64)
    row_sequences = np.arange(len(response_mask)) if sequences is None else sequences
    token_sequences = np.repeat(row_sequences, response_mask.lengths)
    num = int(row_sequences.max(initial=-1)) + 1
    counts = np.bincount(token_sequences, weights=trained, minlength=num).astype(np.float64)
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
    return response_mask.with_values((trained * weights[token_sequences]).astype(np.float32))


def select_top_entropy(entropy: Jagged, response_mask: Jagged, share: float) -> Jagged:
    """Mark a share of the chosen tokens, those of the highest entropy, with 1, others with 0.

    The high-entropy minority tokens of Wang et al. 2025 (arXiv:2506.01939, share 0.2).
    The number is rounded to the nearest, at least one; ties with the lowest selected entropy are
    selected, too. The share is of the whole step, and the loss is divided by all of its tokens, as
    in the paper.
    """
    chosen = response_mask.values != 0
    entropies = entropy.values[chosen]
    mask = np.zeros_like(response_mask.values)
    if len(entropies):
        rank = len(entropies) - max(round(share * len(entropies)), 1)
        mask[chosen] = entropies >= np.partition(entropies, rank)[rank]
    return response_mask.with_values(mask)


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
    length: int  # in tokens; a run without it takes rollout.max_response_tokens

    def __post_init__(self) -> None:
        check_at_least("length", self.length, 1)


@AGGREGATIONS.register("sequence_sum_fixed_length")
def _sequence_sum_fixed_length(counts: Floats, settings: FixedLengthSettings) -> Floats:
    """The mean over sequences of the sum over their tokens, divided by a constant length.

    Dr. GRPO (arXiv:2503.20783): no bias towards any length, and losses of the size of a
    token's. The mean is over sequences with a trained token, as in the other modes.
    """
    return np.full_like(counts, 1.0 / (np.count_nonzero(counts) * settings.length))
