"""What a step trains on, of samples with log-probs: one function, run where their columns are.

All that is between log-probs and updates and looks at tokens is in it, so that it takes one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.algorithms.correction import find_gaps_beyond
from mcore_rl.algorithms.distillation import distillation_metrics
from mcore_rl.algorithms.token_rewards import with_token_rewards
from mcore_rl.config.schema import AlgorithmConfig, TrainerConfig
from mcore_rl.data.batch import Batch
from mcore_rl.trainers import steps
from mcore_rl.trainers.policy_checks import compute_gap_mask, gaps_and_mismatch, get_gap_bounds
from mcore_rl.trainers.update_metrics import TokenCounts


@dataclass(frozen=True, slots=True)
class Findings:
    """What the driver learns of a training batch."""

    gaps: dict[str, float]  # of trainer and servers, that it has to check before an update
    metrics: dict[str, float]
    doubts: dict[str, str]  # see steps.doubts
    counts: list[TokenCounts]  # of each mini-batch


def training_batch(
    batch: Batch, algorithm: AlgorithmConfig, trainer: TrainerConfig, step: int, seed: Sequence[int]
) -> tuple[Batch, Batch, Findings]:
    """Two batches with the columns that are new or replaced, and what the driver has to know.

    The first has advantages of all samples, with token_rewards, and returns for a value model. The
    second is of those samples that are trained on, after algorithm.filter.keep_responses: their
    masks and corrections, and the weights of each mini-batch's losses. Both are empty for gaps
    beyond the trainer's bounds: then log-probs say nothing.

    Without log_probs, which then come with the update (log_prob_pass.py), nothing is compared here:
    the second batch has the column gap_mask, of the tokens that the update compares.
    """
    gaps, metrics = dict[str, float](), dict[str, float]()
    version = _get_compared_version(trainer, step)
    if "log_probs" in batch:
        gaps, metrics = gaps_and_mismatch(batch, algorithm.correction, version)
    if find_gaps_beyond(gaps, get_gap_bounds(trainer)):
        return Batch({}), Batch({}), Findings(gaps, metrics, {}, [])
    rewarded = with_token_rewards(batch, algorithm)
    judged = steps.with_advantages(rewarded, algorithm)
    chosen = steps.chosen_responses(judged, algorithm.filter, seed)
    whole = chosen
    if "log_probs" not in batch:
        whole = chosen.with_columns(gap_mask=compute_gap_mask(chosen, version))
    whole = steps.without_truncated(whole, algorithm.filter)
    corrected, left_out = steps.with_correction(whole, algorithm)
    num = algorithm.num_mini_batches
    weighed, counts = steps.with_each(corrected, num, seed, steps.with_loss_weights, algorithm)
    metrics = metrics | steps.compute_policy_entropy(batch) | distillation_metrics(batch) | left_out
    return (
        _new(judged, batch),
        _new(weighed, chosen),
        Findings(gaps, metrics, steps.doubts(judged), counts),
    )


# What compute_score_metrics reads.
SCORE_COLUMNS = (
    "response_mask", "log_probs", "rollout_log_probs", "entropy", "weight_versions", "replayed",
)  # fmt: skip


def compute_score_metrics(
    batch: Batch, algorithm: AlgorithmConfig, trainer: TrainerConfig, step: int
) -> dict[str, float]:
    """Return the metrics of log-probs and entropy that came with the update, as training_batch
    gives them of those that were there before it.
    """
    version = _get_compared_version(trainer, step)
    gaps, metrics = gaps_and_mismatch(batch, algorithm.correction, version)
    return gaps | metrics | steps.compute_policy_entropy(batch)


def _get_compared_version(trainer: TrainerConfig, step: int) -> int | None:
    """Return the version of the policy, where samples may be of others, too."""
    return step - 1 if trainer.staleness else None


def _new(batch: Batch, before: Batch) -> Batch:
    """The columns that are not those from before."""
    return Batch({n: c for n, c in batch.columns.items() if before.columns.get(n) is not c})
