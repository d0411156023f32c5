"""The inputs of an update, made of scored samples: gaps, token rewards, advantages, loss weights.

Pure functions of a whole batch. They run on rank 0 of a model (`ModelWorker.apply`), where the
columns along tokens are: the driver gets the names of new columns, numbers and sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mcore_rl.algorithms.advantages import add_token_rewards, compute_advantages
from mcore_rl.algorithms.aggregation import compute_loss_weights, select_top_entropy
from mcore_rl.algorithms.correction import apply_correction, find_gaps_beyond
from mcore_rl.algorithms.distillation import compute_distillation_metrics, compute_sampled_kl
from mcore_rl.algorithms.inputs import (
    LOSS_WEIGHTS,
    MiniBatchInputs,
    get_loss_name,
    prepare_columns,
)
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.algorithms.sample_choice import CHOICE_STREAM, choose_responses
from mcore_rl.config.rules_algorithm import TOP_TOKEN_LOSSES
from mcore_rl.config.schema import AlgorithmConfig, FilterConfig, TrainerConfig
from mcore_rl.controller.batch_ops import B, select_rows
from mcore_rl.data.batch import UNSET, Batch, Jagged, Samples
from mcore_rl.data.trajectories import Trajectories, find_truncated
from mcore_rl.engine.steps import count_trained_tokens
from mcore_rl.observability.metrics import merge_metrics
from mcore_rl.trainers.policy_checks import (
    compute_gap_mask,
    compute_gaps_and_mismatch,
)
from mcore_rl.trainers.policy_loss import COLUMN_OF_METRIC

T = TypeVar("T")
TokenCounts = Mapping[str, int]  # tokens with a weight, by the column of the weights

TRAJECTORY_COLUMNS = "group_ids", "trajectories", "segments"  # identify a sample's trajectory
# Columns that compute_score_metrics reads.
SCORE_COLUMNS = (
    "response_mask", "log_probs", "rollout_log_probs", "entropy", "weight_versions", "replayed",
)  # fmt: skip
# Metrics of an optimizer step, not of its tokens.
_STEP_METRICS = ("loss", "mtp_loss", "indexer_loss", "grad_norm", "lr")
_ROUTER_PREFIX = "moe/"
_ALL_TOKENS_METRIC = "moe/aux_loss"  # a mean over all tokens, with or without a loss


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Statistics of a training batch, for the driver."""

    gaps: dict[str, float]  # between trainer and servers; checked before an update
    metrics: dict[str, float]
    warnings: dict[str, str]  # see find_warnings
    counts: list[TokenCounts]  # of each mini-batch


def build_training_batch(
    batch: Batch, algorithm: AlgorithmConfig, trainer: TrainerConfig, step: int, seed: Sequence[int]
) -> tuple[Batch, Batch, BatchStats]:
    """Compute advantages of all samples, and the loss weights of those that are trained on.

    Returns:
        samples: New columns of all samples: token_rewards, advantages and, for a value model,
            returns.
        selected: New columns of the samples left by algorithm.filter.keep_responses: masks,
            corrections, and the weights of each mini-batch's losses. For a batch without log_probs,
            which then come with the update, also gap_mask: the tokens that the update compares.
        stats: Gaps, metrics, warnings and token counts.
        Both batches are empty when a gap is beyond the bounds of the trainer: log-probs mean
        nothing then.
    """
    gaps, metrics = dict[str, float](), dict[str, float]()
    version = _get_compared_version(trainer, step)
    if "log_probs" in batch:
        gaps, metrics = compute_gaps_and_mismatch(batch, algorithm.correction, version)
    if find_gaps_beyond(gaps, trainer.gap_bounds):
        return Batch({}), Batch({}), BatchStats(gaps, metrics, {}, [])
    samples = add_advantages(add_token_rewards(batch, algorithm), algorithm)
    selected = select_responses(samples, algorithm.filter, seed)
    weighted = selected
    if "log_probs" not in batch:
        weighted = selected.with_columns(gap_mask=compute_gap_mask(selected, version))
    weighted = mask_truncated(weighted, algorithm.filter)
    weighted, correction_metrics = add_corrections(weighted, algorithm)
    num = algorithm.num_mini_batches
    weighted, counts = map_mini_batches(weighted, num, seed, add_loss_weights, algorithm)
    metrics = (
        metrics
        | compute_policy_entropy(batch)
        | compute_distillation_metrics(batch)
        | correction_metrics
    )
    stats = BatchStats(gaps, metrics, find_warnings(samples), counts)
    return _select_new(samples, batch), _select_new(weighted, selected), stats


def compute_score_metrics(
    batch: Batch, algorithm: AlgorithmConfig, trainer: TrainerConfig, step: int
) -> dict[str, float]:
    """Return the metrics of log-probs and entropies that came with the update.

    They are those that build_training_batch returns for log-probs that were there before it.
    """
    version = _get_compared_version(trainer, step)
    gaps, metrics = compute_gaps_and_mismatch(batch, algorithm.correction, version)
    return gaps | metrics | compute_policy_entropy(batch)


def _get_compared_version(trainer: TrainerConfig, step: int) -> int | None:
    """Return the version of the policy, where samples may have others as well."""
    return step - 1 if trainer.staleness else None


def _select_new(batch: Batch, before: Batch) -> Batch:
    """Return the columns that `before` does not have."""
    return Batch({n: c for n, c in batch.columns.items() if before.columns.get(n) is not c})


# Advantages, masks and weights.


def add_advantages(batch: Batch, algorithm: AlgorithmConfig) -> Batch:
    """Add the columns advantages and, for a value model, returns.

    With teachers, rewards count only with distillation.use_reward; the sampled KL is subtracted.
    """
    distillation, responses = algorithm.distillation, batch.jagged("response_ids")
    if distillation.loss == "off" or distillation.use_reward:
        columns = compute_advantages(batch, algorithm.advantage, algorithm.advantage_settings)
    else:
        zeros = np.zeros(len(responses.values), np.float32)
        columns = {"advantages": responses.with_values(zeros)}
    if distillation.loss == "sampled_kl":
        kl = np.float32(distillation.coef) * compute_sampled_kl(batch).values
        columns["advantages"] = responses.with_values(columns["advantages"].values - kl)
    return batch.with_columns(**columns)


def select_responses(batch: B, filters: FilterConfig, seed: Sequence[int]) -> B:
    """Apply algorithm.filter.keep_responses after advantages were computed over all responses.

    With advantages_of=kept it was applied before.
    """
    if filters.advantages_of == "kept":
        return batch
    return select_rows(choose_responses, batch, filters, [*seed, CHOICE_STREAM])


def mask_truncated(batch: Batch, filters: FilterConfig) -> Batch:
    """Mask all tokens of truncated trajectories from every loss (mask_truncated).

    A trajectory is truncated if its last turn is or a limit has ended it: all of its samples are
    masked then, and none for an earlier turn that was cut off. DAPO's overlong filtering
    (arXiv:2503.14476, section 3.4). Truncated trajectories still count in the advantages of their
    group.
    """
    if not filters.mask_truncated:
        return batch
    mask, last_rows = batch.jagged("response_mask"), Trajectories(batch).last_rows
    is_complete = ~find_truncated(batch)[last_rows]
    columns = {"response_mask": mask, "cross_entropy_mask": _get_cross_entropy_mask(batch)}
    is_unmasked = np.repeat(is_complete, mask.lengths)  # [response tokens]
    masked = {name: c.with_values(c.values * is_unmasked) for name, c in columns.items()}
    return batch.with_columns(**masked)


def _get_cross_entropy_mask(batch: Batch) -> Jagged:
    """Return the samples' own mask; by default the tokens that the policy did not choose."""
    response_mask = batch.jagged("response_mask")
    is_not_chosen = response_mask.values == 0
    if "cross_entropy_mask" not in batch:
        return response_mask.with_values(is_not_chosen)
    mask = batch.jagged("cross_entropy_mask")
    return mask.with_values(np.where(mask.values == UNSET, is_not_chosen, mask.values))


def add_corrections(batch: Batch, algorithm: AlgorithmConfig) -> tuple[Batch, dict[str, float]]:
    """Add the columns of algorithm.correction and top_entropy_share; return their metrics too."""
    batch, metrics = apply_correction(batch, algorithm.correction)
    if algorithm.top_entropy_share < 1:
        entropy, mask = batch.jagged("entropy"), batch.jagged("response_mask")
        highest = select_top_entropy(entropy, mask, algorithm.top_entropy_share)
        batch = batch.with_columns(top_entropy_mask=highest)
    return batch, metrics


def add_loss_weights(batch: Batch, algorithm: AlgorithmConfig) -> tuple[Batch, TokenCounts]:
    """Add the weights of each loss of a mini-batch; return how many of each are not 0.

    algorithm.loss_aggregation normalises each over its own tokens, with all samples of a trajectory
    as one sequence; then comes its coefficient.

    loss_weights: over policy_mask or, without one, response_mask; 0 where correction_weights or
    top_entropy_mask are. kl_weights, entropy_weights, distillation_weights: over response_mask.
    cross_entropy_weights: over cross_entropy_mask or, where a sample has none, where response_mask
    is 0. A loss without a coefficient has no column; one without a token has zeros.
    """
    response_mask = batch.jagged("response_mask")
    policy_mask = batch.jagged("policy_mask") if "policy_mask" in batch else response_mask
    trajectories = Trajectories(batch)
    policy = _compute_weights(policy_mask, 1.0, algorithm, trajectories)
    for name in ("correction_weights", "top_entropy_mask"):
        if name in batch:
            policy = policy.with_values(np.where(batch.jagged(name).values, policy.values, 0))
    columns, distillation = {LOSS_WEIGHTS: policy}, algorithm.distillation
    coefficients = {
        "kl_weights": algorithm.kl_coef if algorithm.kl_placement == "loss" else 0.0,
        "entropy_weights": algorithm.entropy_coef,
    }
    if distillation.loss in TOP_TOKEN_LOSSES:
        if not distillation.use_reward:
            columns[LOSS_WEIGHTS] = policy.with_values(np.zeros_like(policy.values))
        columns["distillation_weights"] = _compute_weights(
            response_mask, distillation.coef, algorithm, trajectories
        )
    for name, coef in coefficients.items():
        if coef:
            columns[name] = _compute_weights(response_mask, coef, algorithm, trajectories)
    if coef := algorithm.cross_entropy_coef:
        mask = _get_cross_entropy_mask(batch)
        columns["cross_entropy_weights"] = _compute_weights(mask, coef, algorithm, trajectories)
    return batch.with_columns(**columns), count_trained_tokens(Batch({**columns}))


def _compute_weights(
    mask: Jagged, coef: float, algorithm: AlgorithmConfig, trajectories: Trajectories
) -> Jagged:
    """Return `coef` times the weights of algorithm.loss_aggregation; zeros for an empty mask."""
    if not mask.values.any():
        return mask.with_values(np.zeros(len(mask.values), np.float32))
    mode, settings = algorithm.loss_aggregation, algorithm.loss_aggregation_settings
    weights = compute_loss_weights(mask, mode, settings, trajectories.numbers)
    return weights.with_values(weights.values * np.float32(coef))


def add_token_weights(batch: Batch, aggregation: str) -> tuple[Batch, TokenCounts]:
    """Add loss_weights over the tokens that the policy chose; return how many are not 0.

    A mini-batch without such a token has zeros.
    """
    mask, sequences = batch.jagged("response_mask"), Trajectories(batch).numbers
    weights = mask.with_values(np.zeros(len(mask.values), np.float32))
    if mask.values.any():
        weights = compute_loss_weights(mask, aggregation, sequences=sequences)
    counts = count_trained_tokens(Batch({LOSS_WEIGHTS: weights}))
    return batch.with_columns(loss_weights=weights), counts


def add_prepared_columns(batch: Batch, algorithm: AlgorithmConfig, seed: Sequence[int]) -> Batch:
    """Add the columns that a loss reads of a whole mini-batch (algorithms/prepared.py).

    The batch has current_log_probs and entropy of the policy as it is before the update.
    """
    columns = prepare_columns(
        LOSSES[algorithm.loss],
        LOSSES.build_settings(algorithm.loss, algorithm.loss_settings),
        MiniBatchInputs(batch, seed),
        f"{LOSSES.setting}={algorithm.loss!r}",
    )
    return batch.with_columns(**columns)


# Mini-batches.


def split_mini_batches(batch: Samples, num: int, seed: Sequence[int]) -> list[list[int]]:
    """Distribute groups at random over at most `num` mini-batches; return the rows of each.

    Groups stay complete, and no mini-batch is empty.
    """
    group_ids = batch.array("group_ids")
    groups = np.random.default_rng(seed).permutation(np.unique(group_ids))
    parts = [part for part in np.array_split(groups, num) if len(part)]
    return [np.flatnonzero(np.isin(group_ids, part)).tolist() for part in parts]


def map_mini_batches(
    batch: Batch,
    num: int,
    seed: Sequence[int],
    function: Callable[..., tuple[Batch, T]],
    *args: object,
) -> tuple[Batch, list[T]]:
    """Apply `function` to each mini-batch; return the new columns in the batch, and the results.

    Args:
        function: Takes a mini-batch and `args`; returns it with new columns, and a result.
    """
    parts = split_mini_batches(batch, num, seed)
    results = [function(batch.take(rows), *args) for rows in parts]
    order = np.argsort(np.concatenate(parts)).tolist()
    merged = Batch.concat([part for part, _ in results]).take(order)
    columns = {name: merged[name] for name in merged.names if name not in batch}
    return batch.with_columns(**columns), [value for _, value in results]


# Metrics and warnings.


def compute_policy_entropy(batch: Batch) -> dict[str, float]:
    """Return the metric actor/entropy: the mean over tokens that the policy chose, in nats.

    A batch with the servers' log-probs has none, and gets it in the update.
    """
    is_chosen = batch.jagged("response_mask").values != 0
    if "entropy" not in batch or not is_chosen.any():
        return {}
    entropy = batch.jagged("entropy").values[is_chosen]
    return {"actor/entropy": float(entropy.mean(dtype=np.float64))}


def find_warnings(batch: Batch) -> dict[str, str]:
    """Return why a batch with advantages teaches nothing, or little, by kind (StepWarnings)."""
    warnings = {}
    has_end = batch.array("finish_reasons") == "stop"  # with a token that says so
    num_empty = int((batch.jagged("response_ids").lengths <= has_end).sum())
    if 2 * num_empty >= len(batch):
        text = f"{num_empty} of {len(batch)} responses are empty"
        warnings["half of the responses or more were empty"] = text
    if not (batch.jagged("advantages").values * batch.jagged("response_mask").values).any():
        rewards = batch.array("rewards")
        warnings["all advantages were 0"] = (
            f"all advantages are 0, with rewards from {rewards.min():g} to {rewards.max():g}: the "
            "batch teaches nothing"
        )
    return warnings


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of an optimizer step, and the tokens they are of."""

    metrics: Mapping[str, float]
    counts: TokenCounts
    num_tokens: int  # with those that have no loss


def merge_update_metrics(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Merge the metrics of an update's optimizer steps.

    A mean over tokens becomes the mean over all tokens of the update, however they are distributed.
    Losses, norms and learning rates belong to a step: their mean is over steps.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step.metrics):
        reporting = [step for step in steps if name in step.metrics]
        weights = [_get_weight(name, step) for step in reporting]
        merged |= merge_metrics([{name: step.metrics[name]} for step in reporting], weights)
    return merged


def _get_weight(name: str, step: StepMetrics) -> float:
    """Return the number of tokens that a metric is the mean of; 1 for what is no mean of tokens."""
    if name == _ALL_TOKENS_METRIC:
        return step.num_tokens
    if name in _STEP_METRICS or name.startswith(_ROUTER_PREFIX):
        return 1
    if name in map(get_loss_name, step.counts):
        return 1
    column = COLUMN_OF_METRIC.get(name, LOSS_WEIGHTS)
    return step.counts.get(column, step.counts[LOSS_WEIGHTS])
