"""Synchronous on-policy training: generate, score, update, push the weights, again."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.algorithms.controllers import Coefficients
from mcore_rl.algorithms.distillation import distillation_metrics
from mcore_rl.algorithms.replay import ReplayBuffer
from mcore_rl.algorithms.token_rewards import with_token_rewards
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.observability.metrics import Report
from mcore_rl.observability.stopwatch import Stopwatch
from mcore_rl.workers import scoring, steps
from mcore_rl.workers.checkpointer import Checkpointer, tell
from mcore_rl.workers.evaluation import Evaluation
from mcore_rl.workers.rollout_pool import RolloutPool
from mcore_rl.workers.sample_tables import SampleTables
from mcore_rl.workers.samples import samples_of_step
from mcore_rl.workers.turns import Turns


@dataclass(frozen=True, slots=True)
class SyncTrainer:
    """The models and servers of a run, and the loop over them."""

    config: RLConfig
    turns: Turns  # of actor, reference and servers on their devices
    rollout: RolloutPool
    checkpointer: Checkpointer
    coefficients: Coefficients  # of KL and entropy, at each step
    replay: ReplayBuffer  # groups of earlier steps
    evaluation: Evaluation
    samples: SampleTables

    def train(self, prompts: PromptBatches, report: Report) -> None:
        """Run the steps up to trainer.num_steps, from 1 or from where the checkpointer goes on.

        Raises:
            RunStopped: a signal has asked for it; the last step is saved.
            PolicyMismatchError: samples came from other weights, or log-probs differ by more than
                trainer.max_logprob_gap or mean_logprob_gap.
            ConfigError: no response of a step got a reward, or too few groups passed the filter.
        """
        config, algorithm = self.config, self.config.algorithm
        temperature = config.rollout.temperature
        for step in range(self.checkpointer.next_step, config.trainer.num_steps + 1):
            clock = Stopwatch()
            with clock("generate"):
                batch, metrics = samples_of_step(config, self.rollout, prompts, self.replay, step)
            with clock("log_probs"):
                self.turns.stop_serving()
                if len(batch):  # else no group has passed the filter: there is nothing to learn
                    batch, scored = scoring.with_scores(batch, self.turns, config)
                    metrics |= scored
                if len(batch) and algorithm.kl_coef:
                    batch = self.turns.with_reference_log_probs(batch, temperature)
                self.turns.begin_training()
                if len(batch):
                    batch = steps.with_log_probs(batch, self.turns.actor, algorithm, temperature)
                    metrics |= steps.checked_mismatch(batch, config, step)
                    metrics |= distillation_metrics(batch)
            with clock("update"):
                if len(batch):
                    metrics |= self._update(batch, step)
            if self.checkpointer.is_due(step):
                with clock("save"):
                    self.checkpointer.save(step)
            with clock("weight_sync"):
                self.turns.serve(version=step)
            metrics["tokens_per_s"] = metrics["generated_tokens"] / clock.total_s
            if self.evaluation.is_due(step):
                with clock("evaluate"):
                    metrics |= self.evaluation.run(step)
            metrics |= clock.seconds
            report(step, metrics)
            self.checkpointer.step_ended(step, metrics)

    def _update(self, batch: Batch, step: int) -> dict[str, float]:
        """The critic and the actor learn from a batch with log-probs."""
        config, seed = self.config, [self.config.seed, step]
        metrics: dict[str, float] = {}
        now, followed = self.coefficients.of_step(batch)
        batch = with_token_rewards(batch, now)
        if self.turns.critic is None:
            batch = steps.with_advantages(batch, now)
        else:
            with self.turns.critic_on_device() as critic:
                batch = steps.with_values(batch, critic)
                batch = steps.with_advantages(batch, now)
                metrics |= steps.update_critic(critic, batch, config, seed=seed)
        self.samples.of_step(step, batch)
        for doubt in steps.doubts(batch):
            tell(f"step {step}: {doubt}")
        batch = steps.chosen_responses(batch, now.samples, seed)
        batch = steps.without_truncated(batch, now.samples)
        batch, left_out = steps.with_correction(batch, now)
        metrics |= followed | left_out
        if step > config.critic.warmup_steps:
            temperature = config.rollout.temperature
            metrics |= steps.update(
                self.turns.actor, batch, now, temperature=temperature, seed=seed
            )
        return metrics
