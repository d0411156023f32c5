"""What a trainer does with the samples of a step: scores, log-probs, updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_rl.algorithms.controllers import Coefficients, measured
from mcore_rl.config.schema import AlgorithmConfig, RLConfig
from mcore_rl.controller.batch_ops import near
from mcore_rl.data.batch import Samples
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.trainers import policy_checks, scoring, steps, updates
from mcore_rl.trainers.advantage_step import (
    SCORE_COLUMNS,
    Findings,
    compute_score_metrics,
    training_batch,
)
from mcore_rl.trainers.device_sharing import Turns
from mcore_rl.trainers.log_prob_pass import needs_pass
from mcore_rl.trainers.sample_log import SampleTables
from mcore_rl.trainers.step_samples import LEFT_OUT, num_groups
from mcore_rl.trainers.step_warnings import StepWarnings


@dataclass(frozen=True, slots=True)
class Learner:
    """The models of a run that score and learn."""

    config: RLConfig
    turns: Turns
    coefficients: Coefficients  # of KL and entropy, at each step
    tables: SampleTables
    warnings: StepWarnings = field(default_factory=StepWarnings)

    def learn(
        self, batch: Samples, sampled: Mapping[str, float], step: int, clock: Stopwatch
    ) -> dict[str, float]:
        """Train on the samples of a step; its metrics. Afterwards the actor is on its devices.

        `sampled` are the metrics of all samples that were generated for it.

        Nothing is learned where no group has passed the filter. The batch then is empty, or has
        samples that are only shown.

        Raises:
            PolicyMismatchError: log-probs differ by more than trainer.max_logprob_gap or
                mean_logprob_gap.
        """
        config, algorithm = self.config, self.config.algorithm
        temperature = config.rollout.temperature
        metrics: dict[str, float] = {}
        if LEFT_OUT in batch:
            self.tables.of_step(step, batch)
            batch = batch.take([])
        self._warn(num_groups(batch), sampled, step)
        with clock("log_probs"):
            if len(batch):
                batch, metrics = scoring.with_scores(batch, self.turns, config)
            if len(batch) and algorithm.kl_coef:
                batch = self.turns.with_reference_log_probs(batch, temperature)
            self.turns.begin_training()
            if len(batch) and needs_pass(config):
                batch = self._with_log_probs(batch)
        with clock("update"):
            if len(batch):
                metrics |= self._update(batch, step)
        return metrics

    def _warn(self, num: int, sampled: Mapping[str, float], step: int) -> None:
        """Warn of samples and groups that are missing in a step with `num` groups.

        A filter that has one round to fill a step is meant to leave groups out.
        """
        self.warnings.begin_step()
        if dropped := round(sampled.get("dropped", 0)):
            text = f"{dropped} responses are missing, as they got no reward"
            self.warnings.add("responses got no reward", step, text)
        wanted, policy = self.config.trainer.prompts_per_step, self.config.algorithm.filter
        if num >= wanted:
            return
        setting = f"algorithm.filter.group_filter={policy.group_filter!r}"
        text = f"{num} groups to train on, of {wanted} that were asked for"
        if not policy.group_filter:
            self.warnings.add("groups were missing", step, text)
        elif not num:
            text = f"no group has passed {setting}: nothing is learned"
            self.warnings.add(f"no group passed {setting}", step, text)
        elif policy.max_rounds > 1:
            self.warnings.add(f"too few groups passed {setting}", step, f"{text}, after {setting}")
        elif 2 * num < wanted:
            self.warnings.count(f"fewer than half of {wanted} groups passed {setting}")

    def _update(self, batch: Samples, step: int) -> dict[str, float]:
        """The critic and the actor learn from a batch with log-probs."""
        config, seed = self.config, [self.config.seed, step]
        found = dict[str, float]()
        if self.coefficients.follow:
            found = near(self.turns.actor, measured, batch, self.coefficients.config)
        now, metrics = self.coefficients.of_step(found, len(batch))
        if self.turns.critic is None:
            batch, trained, findings = self._training_batch(batch, now, step)
        else:
            with self.turns.critic_on_device() as critic:
                batch = steps.with_values(batch, critic)
                batch, trained, findings = self._training_batch(batch, now, step)
                metrics |= updates.update_critic(critic, batch, config, seed=seed)
        if has_scores := "log_probs" in batch:
            self.tables.of_step(step, batch)
        for kind, doubt in findings.doubts.items():
            self.warnings.add(kind, step, doubt)
        metrics |= findings.gaps | findings.metrics
        if not has_scores:
            return metrics | self._update_with_scores(batch, trained, findings, now, step)
        if step > config.critic.warmup_steps:
            metrics |= updates.update(
                self.turns.actor,
                trained,
                findings.counts,
                now,
                temperature=config.rollout.temperature,
                seed=seed,
            )
        return metrics

    def _with_log_probs(self, batch: Samples) -> Samples:
        config = self.config
        temperature = config.rollout.temperature
        return steps.with_log_probs(batch, self.turns.actor, config.algorithm, temperature)

    def _update_with_scores(
        self,
        batch: Samples,
        trained: Samples,
        findings: Findings,
        now: AlgorithmConfig,
        step: int,
    ) -> dict[str, float]:
        """Update the actor on a batch without log-probs, which the update gives; metrics."""
        config, actor = self.config, self.turns.actor
        trainer, [counts] = config.trainer, findings.counts
        scores, gaps, metrics = updates.update_with_scores(
            actor,
            trained,
            counts,
            now,
            temperature=config.rollout.temperature,
            bounds=policy_checks.get_gap_bounds(trainer),
        )
        policy_checks.check_gaps(gaps, trainer, step)
        batch = batch.union(scores)
        self.tables.of_step(step, batch)
        given = batch, now, trainer, step
        return near(actor, compute_score_metrics, *given, reads=SCORE_COLUMNS) | metrics

    def _training_batch(
        self, batch: Samples, now: AlgorithmConfig, step: int
    ) -> tuple[Samples, Samples, Findings]:
        """The batch with advantages, what of it is trained on, with weights, and what is found."""
        trainer, seed = self.config.trainer, [self.config.seed, step]
        judged, weighed, found = near(
            self.turns.actor, training_batch, batch, now, trainer, step, seed
        )
        policy_checks.check_gaps(found.gaps, trainer, step)
        if "log_probs" not in batch and not any(any(count.values()) for count in found.counts):
            # No optimizer step is taken, which would have given the log-probs.
            return self._training_batch(self._with_log_probs(batch), now, step)
        batch = batch.union(judged)
        return batch, steps.chosen_responses(batch, now.filter, seed).union(weighed), found
