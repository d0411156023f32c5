"""Synchronous on-policy training: generate, score, update, push the weights, again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.controllers import Coefficients
from mcore_rl.algorithms.inputs import needs_of
from mcore_rl.algorithms.token_rewards import with_token_rewards
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.batch import Batch
from mcore_rl.observability.metrics import Report
from mcore_rl.observability.stopwatch import Stopwatch
from mcore_rl.workers import steps
from mcore_rl.workers.checkpointer import Checkpointer, tell
from mcore_rl.workers.evaluation import Evaluation
from mcore_rl.workers.rollout_pool import RolloutPool
from mcore_rl.workers.sample_tables import SampleTables
from mcore_rl.workers.turns import Turns


@dataclass(frozen=True, slots=True)
class SyncTrainer:
    """The models and servers of a run, and the loop over them."""

    config: RLConfig
    turns: Turns  # of actor, reference and servers on their devices
    rollout: RolloutPool
    checkpointer: Checkpointer
    coefficients: Coefficients  # of KL and entropy, at each step
    evaluation: Evaluation
    samples: SampleTables

    def train(self, prompts: Iterator[Batch], report: Report) -> None:
        """Run the steps up to trainer.num_steps, from 1 or from where the checkpointer goes on.

        Raises:
            RunStopped: a signal has asked for it; the last step is saved.
            PolicyMismatchError: samples came from other weights, or log-probs differ by more than
                trainer.max_logprob_gap or mean_logprob_gap.
            ConfigError: no response of a step got a reward.
        """
        config, algorithm = self.config, self.config.algorithm
        temperature = config.rollout.temperature
        for step in range(self.checkpointer.next_step, config.trainer.num_steps + 1):
            clock, seed = Stopwatch(), [config.seed, step]
            with clock("generate"):
                asked = next(prompts)
                batch = self.rollout.generate(asked, n=algorithm.group_size)
                if "baseline_rewards" in needs_of(ADVANTAGES[algorithm.advantage]):
                    greedy = self.rollout.generate(asked, n=1, is_greedy=True)
                    batch = steps.with_baseline_rewards(batch, greedy)
            steps.check_versions(batch, step - 1)
            num_tokens = int(batch.num_tokens.sum())
            batch, metrics = steps.judged(batch, config.reward.on_error)
            metrics |= steps.describe(batch)
            with clock("log_probs"):
                self.turns.stop_serving()
                if algorithm.kl_coef:
                    batch = self.turns.with_reference_log_probs(batch, temperature)
                self.turns.begin_training()
                batch = steps.with_log_probs(batch, self.turns.actor, algorithm, temperature)
            metrics |= steps.checked_mismatch(batch, config, step)
            with clock("update"):
                if config.reward.shuffle:
                    batch = steps.shuffled_rewards(batch, seed)
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
                for doubt in steps.doubts(batch, len(asked) * algorithm.group_size):
                    tell(f"step {step}: {doubt}")
                batch = steps.without_uniform_groups(batch, now)
                batch, left_out = steps.with_correction(batch, now)
                metrics |= followed | left_out
                if step > config.critic.warmup_steps:
                    metrics |= steps.update(
                        self.turns.actor, batch, now, temperature=temperature, seed=seed
                    )
            if self.checkpointer.is_due(step):
                with clock("save"):
                    self.checkpointer.save(step)
            with clock("weight_sync"):
                self.turns.serve(version=step)
            metrics["tokens_per_s"] = num_tokens / clock.total_s
            if self.evaluation.is_due(step):
                with clock("evaluate"):
                    metrics |= self.evaluation.run(step)
            metrics |= clock.seconds
            report(step, metrics)
            self.checkpointer.step_ended(step, metrics)
