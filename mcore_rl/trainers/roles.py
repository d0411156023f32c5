"""The models of a run as a loop calls them: actor, critic, and those that only score.

Every call brings the model to its devices first (`DeviceSharing.use`), and leaves an empty batch as
it is: a step in which no group passed the filter goes through the loop as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, Protocol

import numpy as np

from mcore_rl.algorithms.controllers import Coefficients, measure
from mcore_rl.algorithms.inputs import is_prepared
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.config.import_path import is_import_path
from mcore_rl.config.rules_algorithm import TOP_TOKEN_LOSSES, build_teachers
from mcore_rl.config.schema import AlgorithmConfig, RLConfig
from mcore_rl.controller.batch_ops import (
    concat_batches,
    select_small_columns,
    select_token_columns,
)
from mcore_rl.controller.dispatch import RankGroup, RemoteMethod
from mcore_rl.data.batch import MODEL_INPUTS, Batch, Column, Samples
from mcore_rl.engine.worker import ModelWorker, apply_on_rank_zero
from mcore_rl.observability.warnings import StepWarnings
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.policy_checks import check_gaps
from mcore_rl.trainers.policy_loss import needs_log_prob_pass
from mcore_rl.trainers.step_samples import describe_samples
from mcore_rl.trainers.training_batch import (
    SCORE_COLUMNS,
    TRAJECTORY_COLUMNS,
    StepMetrics,
    TokenCounts,
    add_prepared_columns,
    add_token_weights,
    build_training_batch,
    compute_score_metrics,
    map_mini_batches,
    merge_update_metrics,
    select_responses,
    split_mini_batches,
)

Metrics = dict[str, float]
# Columns along response tokens that samples are selected, scored and weighted by before an update.
EARLIER_COLUMNS = (
    "weight_versions", "turn_numbers", "state_ids", "process_rewards", "token_rewards", "entropy",
    "sum_pi_squared", "policy_mask", "cross_entropy_mask", "top_entropy_mask", "current_log_probs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The inputs of a step's updates."""

    samples: Samples  # all samples of the step, with advantages and, for a critic, returns
    selected: Samples  # those that are trained on, with the weights of each loss
    counts: Sequence[TokenCounts]  # trained tokens of each mini-batch
    algorithm: AlgorithmConfig  # with the coefficients of the step


@dataclass(frozen=True, slots=True)
class Actor:
    """The policy that is trained."""

    workers: RankGroup
    devices: DeviceSharing
    config: RLConfig
    coefficients: Coefficients  # of KL and entropy, at each step
    warnings: StepWarnings

    def compute_log_probs(self, batch: Samples) -> Samples:
        """Add log_probs and entropy, unless the update's own forward pass gives them.

        With algorithm.correction.use_rollout_log_probs those of the servers stand for them.
        """
        if not len(batch) or not needs_log_prob_pass(self.config):
            return batch
        if self.config.algorithm.correction.use_rollout_log_probs:
            served = batch.select("rollout_log_probs")
            return batch.union(served.rename_columns(rollout_log_probs="log_probs"))
        return self._compute_log_probs(batch)

    def _compute_log_probs(self, batch: Samples) -> Samples:
        self.devices.use("actor")
        return self.workers.call(
            ModelWorker.compute_log_probs, batch, temperature=self.config.rollout.temperature
        )

    def compute_advantages(self, batch: Samples, step: int) -> tuple[TrainingBatch, Metrics]:
        """Compute advantages, corrections and loss weights on rank 0 (build_training_batch).

        Raises:
            PolicyMismatchError: The log-probs of trainer and servers differ by more than
                trainer.max_logprob_gap or mean_logprob_gap.
        """
        if not len(batch):
            return TrainingBatch(batch, batch, [], self.config.algorithm), {}
        values = Metrics()
        if self.coefficients.needs_measurements:
            values = self._apply(measure, batch, self.coefficients.config)
        algorithm, metrics = self.coefficients.update(values, len(batch))
        seed = [self.config.seed, step]
        args = algorithm, self.config.trainer, step, seed
        samples, chosen, stats = self._apply(build_training_batch, batch, *args)
        check_gaps(stats.gaps, self.config.trainer, step)
        if "log_probs" not in batch and not any(any(count.values()) for count in stats.counts):
            # No optimizer step will be taken, which would have given the log-probs.
            batch = self._compute_log_probs(batch)
            samples, chosen, stats = self._apply(build_training_batch, batch, *args)
            check_gaps(stats.gaps, self.config.trainer, step)
        for kind, text in stats.warnings.items():
            self.warnings.add(kind, step, text)
        batch = batch.union(samples)
        selected = select_responses(batch, algorithm.filter, seed).union(chosen)
        training = TrainingBatch(batch, selected, stats.counts, algorithm)
        return training, metrics | stats.gaps | stats.metrics

    def update(self, training: TrainingBatch, step: int) -> tuple[Samples, Metrics]:
        """Take an optimizer step per mini-batch with a token to train on, none before the critic
        is warm (critic.warmup_steps).

        Returns all samples, with the log-probs that an update without a pass before it has given,
        and metrics.

        Raises:
            PolicyMismatchError: As compute_advantages, before the optimizer step.
        """
        if "log_probs" not in training.samples and len(training.samples):
            return self._update_with_scores(training, step)
        if step <= self.config.critic.warmup_steps:
            return training.samples, {}
        return training.samples, self._update(training, [self.config.seed, step])

    def _update(self, training: TrainingBatch, seed: Sequence[int]) -> Metrics:
        batch, algorithm, counts = training.selected, training.algorithm, training.counts
        numbers = [number for number, count in enumerate(counts) if any(count.values())]
        if not numbers:
            return {}
        parts = split_mini_batches(batch, algorithm.num_mini_batches, seed)
        self.devices.use("actor")
        if is_prepared(LOSSES[algorithm.loss]):
            metrics = [
                self._update_prepared(batch.take(parts[n]), n, algorithm, seed) for n in numbers
            ]
        else:
            columns = select_read_columns(batch, algorithm.loss)
            temperature = self.config.rollout.temperature
            mini_batches = [parts[n] for n in numbers]
            metrics = _take_steps(self.workers, columns, mini_batches, temperature=temperature)
        steps = [
            (step_metrics, counts[n], parts[n])
            for step_metrics, n in zip(metrics, numbers, strict=True)
        ]
        return _prefix_metrics("actor", _merge_steps(batch, steps))

    def _update_prepared(
        self, part: Samples, number: int, algorithm: AlgorithmConfig, seed: Sequence[int]
    ) -> Metrics:
        """Take the step of a mini-batch for a loss with prepared columns (inputs.prepared_by).

        They are computed from the mini-batch and the policy as it is before this step.
        """
        temperature = self.config.rollout.temperature
        # Before the first step it is still the policy that has scored the batch.
        is_scored = not number and not algorithm.correction.use_rollout_log_probs
        scored = part
        if not is_scored:
            scored = self.workers.call(ModelWorker.compute_log_probs, part, temperature=temperature)
        current = scored.select("log_probs", "entropy")
        part = part.union(current.rename_columns(log_probs="current_log_probs"))
        columns = self._apply(add_prepared_columns, part, algorithm, [*seed, 1 + number])
        read = select_read_columns(part.union(columns), algorithm.loss)
        return self.workers.call(ModelWorker.update, read, temperature=temperature)[0][0]

    def _update_with_scores(
        self, training: TrainingBatch, step: int
    ) -> tuple[Samples, dict[str, float]]:
        """Take the one optimizer step of a batch that has no log-probs yet.

        The workers take none where a gap is beyond its bound.
        """
        trainer, algorithm, [counts] = self.config.trainer, training.algorithm, training.counts
        read = select_read_columns(training.selected, algorithm.loss)
        self.devices.use("actor")
        scores, gaps, metrics = self.workers.call(
            ModelWorker.update_with_scores,
            read,
            temperature=self.config.rollout.temperature,
            bounds=trainer.gap_bounds,
        )
        check_gaps(gaps, trainer, step)
        samples = training.samples.union(scores)
        columns = samples.select(*(name for name in samples.names if name in SCORE_COLUMNS))
        score_metrics = apply_on_rank_zero(
            self.workers, compute_score_metrics, columns, algorithm, trainer, step
        )
        rows = [*range(len(training.selected))]
        merged = _merge_steps(training.selected, [(metrics, counts, rows)])
        return samples, score_metrics | _prefix_metrics("actor", merged)

    def _apply[**P, R](
        self,
        function: Callable[Concatenate[Batch, P], R],
        batch: Samples,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        return apply_on_rank_zero(
            self.workers, function, select_small_columns(batch), *args, **kwargs
        )


@dataclass(frozen=True, slots=True)
class Critic:
    """The value model of an advantage function that reads values."""

    workers: RankGroup
    devices: DeviceSharing
    config: RLConfig

    def compute_values(self, batch: Samples) -> Samples:
        """Add the column values: [response tokens], of the critic before its update."""
        if not len(batch):
            return batch
        self.devices.use("critic")
        scored = self.workers.call(ModelWorker.compute_values, batch.select_inputs())
        return batch.union(scored.select("values"))

    def update(self, training: TrainingBatch, step: int) -> Metrics:
        """Take an optimizer step per mini-batch with a token that the policy chose, on all samples,
        towards the column returns.
        """
        batch, config = training.samples, self.config
        if not len(batch):
            return {}
        self.devices.use("critic")
        columns = *MODEL_INPUTS, "response_mask", "values", "returns"
        batch = batch.select(*(n for n in (*columns, *TRAJECTORY_COLUMNS) if n in batch))
        num, seed = config.algorithm.num_mini_batches, [config.seed, step]
        mask_columns = batch.select(
            *(n for n in (*TRAJECTORY_COLUMNS, "response_mask") if n in batch)
        )
        weighted, counts = apply_on_rank_zero(
            self.workers,
            map_mini_batches,
            mask_columns,
            num,
            seed,
            add_token_weights,
            config.critic.loss_aggregation,
        )
        batch = batch.union(weighted)
        pairs = zip(counts, split_mini_batches(batch, num, seed), strict=True)
        trained = [(count, rows) for count, rows in pairs if any(count.values())]
        if not trained:
            return {}
        parts = [rows for _, rows in trained]
        metrics = _take_steps(self.workers, select_read_columns(batch), parts)
        steps = [(m, count, rows) for m, (count, rows) in zip(metrics, trained, strict=True)]
        return _prefix_metrics("critic", _merge_steps(batch, steps))


class ScoringModel(Protocol):
    """A model that scores the samples of a step, and is not trained."""

    def score(self, batch: Samples) -> tuple[Samples, Metrics]:
        """Return the batch with its columns, and metrics."""


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """The policy that the KL is measured to: a model of its own, or a LoRA actor's base model."""

    devices: DeviceSharing
    role: str  # "reference" or "actor"
    compute_log_probs: RemoteMethod[..., Samples]  # of the workers of that role
    temperature: float

    def score(self, batch: Samples) -> tuple[Samples, Metrics]:
        """Add reference_log_probs: [response tokens], in nats."""
        if not len(batch):
            return batch, {}
        self.devices.use(self.role)
        workers, columns = self.devices.models[self.role], batch.select_inputs()
        scored = workers.call(self.compute_log_probs, columns, temperature=self.temperature)
        scored = scored.select("log_probs")
        return batch.union(scored.rename_columns(log_probs="reference_log_probs")), {}


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A model whose scores are added to the rewards."""

    workers: RankGroup
    devices: DeviceSharing
    weight: float  # reward_model.weight

    def score(self, batch: Samples) -> tuple[Samples, Metrics]:
        """Add weight times the score of prompt and response, at the last token, to the rewards.

        The column reward/model has the scores. A response whose own reward failed stays at 0
        (reward.on_error=zero), and has no score. Metrics are those of the complete rewards.
        """
        if not len(batch):
            return batch, {}
        self.devices.use("reward_model")
        scored = self.workers.call(ModelWorker.compute_scores, batch.select_inputs())
        scores = scored.array("scores")
        rewards, weight = batch.array("rewards"), np.float32(self.weight)
        is_failed = batch.array("reward_errors") != "" if "reward_errors" in batch else np.False_
        batch = batch.with_columns(
            rewards=np.where(is_failed, rewards, rewards + weight * scores),
            **{"reward/model": np.where(is_failed, np.float32(np.nan), scores)},
        )
        return batch, describe_samples(batch)


@dataclass(frozen=True, slots=True)
class Teachers:
    """The models that a policy is distilled from, on its own samples."""

    workers: Mapping[str, RankGroup]  # by the name of the teacher
    actor: RankGroup  # whose rank 0 merges the columns of several teachers
    devices: DeviceSharing
    config: RLConfig

    def score(self, batch: Samples) -> tuple[Samples, Metrics]:
        """Add the teachers' log-probs of the response tokens.

        With T teachers a response: teacher_log_probs [response tokens, T] of the tokens that were
        sampled and, for a loss over the likeliest k, teacher_ids [response tokens, T, k] and their
        teacher_top_log_probs. teacher_shares [response tokens, T] are the weights of the teachers.
        With teacher.column each sample has the one teacher that its row names.
        """
        if not len(batch):
            return batch, {}
        names, column = list(self.workers), self.config.teacher.column
        rows = {name: list(range(len(batch))) for name in names}
        if column:
            rows = {n: np.flatnonzero(batch.array("teacher") == n).tolist() for n in names}
        parts = [self._score(name, batch, rows[name]) for name in names if rows[name]]
        if column:
            order = np.argsort(np.concatenate([rows[name] for name in names if rows[name]]))
            return batch.union(concat_batches(parts).take(order.tolist())), {}
        if len(parts) == 1:
            return batch.union(parts[0]), {}
        columns = batch.select("response_ids")
        for number, part in enumerate(parts):
            columns = columns.union(part.rename_columns(**{n: f"{n}.{number}" for n in part.names}))
        merged = apply_on_rank_zero(self.actor, merge_teacher_columns, columns, len(parts))
        return batch.union(merged), {}

    def _score(self, name: str, batch: Samples, rows: list[int]) -> Samples:
        """Return the columns of one teacher, of these rows."""
        workers, weight = self.workers[name], build_teachers(self.config.teacher)[name].weight
        has_top = self.config.algorithm.distillation.loss in TOP_TOKEN_LOSSES
        self.devices.use(f"teacher.{name}")
        scored = workers.call(
            ModelWorker.compute_log_probs,
            batch.select_inputs().take(rows),
            temperature=self.config.rollout.temperature,
        )
        columns: Samples = apply_on_rank_zero(
            workers, build_teacher_columns, select_small_columns(scored), weight, has_top
        )
        return columns


def build_teacher_columns(scored: Batch, weight: float, has_top: bool) -> Batch:
    """Return the columns of one teacher, each with an axis of one teacher."""
    log_probs = scored.jagged("log_probs")
    shares = np.full((len(log_probs.values), 1), weight, np.float32)
    columns: dict[str, Column] = {
        "teacher_log_probs": log_probs.with_values(log_probs.values[:, None]),
        "teacher_shares": log_probs.with_values(shares),
    }
    if has_top:
        for name, source in {"ids": "top_ids", "top_log_probs": "top_log_probs"}.items():
            values = scored.jagged(source).values[:, None]
            columns[f"teacher_{name}"] = log_probs.with_values(values)
    return Batch(columns)


def merge_teacher_columns(batch: Batch, num_teachers: int) -> Batch:
    """Return the columns NAME.0, NAME.1, ... of all teachers as NAME, with an axis of teachers."""
    columns: dict[str, Column] = {}
    for name in (n.removesuffix(".0") for n in batch.names if n.endswith(".0")):
        parts = [batch.jagged(f"{name}.{number}") for number in range(num_teachers)]
        values = np.concatenate([part.values for part in parts], axis=1)
        columns[name] = parts[0].with_values(values)
    return Batch(columns)


def _take_steps(
    workers: RankGroup,
    batch: Samples,
    mini_batches: Sequence[Sequence[int]],
    temperature: float = 1.0,
) -> list[Metrics]:
    """Take an optimizer step on each of these lists of rows, in one call; return their metrics."""
    rows, sizes = [row for part in mini_batches for row in part], [*map(len, mini_batches)]
    # Every data-parallel rank reports the metrics of all of them.
    batch = batch.take(rows)
    return workers.call(ModelWorker.update, batch, sizes=sizes, temperature=temperature)[0]


def _merge_steps(
    batch: Samples, steps: Sequence[tuple[Mapping[str, float], TokenCounts, Sequence[int]]]
) -> Metrics:
    """Merge metrics, trained tokens and rows of each optimizer step."""
    num_tokens = batch.num_tokens
    return merge_update_metrics(
        [
            StepMetrics(metrics, counts, int(num_tokens[rows].sum()))
            for metrics, counts, rows in steps
        ]
    )


def _prefix_metrics(role: str, metrics: Mapping[str, float]) -> Metrics:
    return {f"{role}/{name}": value for name, value in metrics.items()}


def select_read_columns(batch: Samples, loss: str = "") -> Samples:
    """Drop the columns that no engine reads, and those that no loss of this package reads.

    A user's own loss (algorithm.loss) may read any column along tokens. A batch in this process
    keeps them: nothing of it is fetched.
    """
    batch = select_token_columns(batch)
    if isinstance(batch, Batch) or is_import_path(loss):
        return batch
    return batch.drop_columns(*EARLIER_COLUMNS)
