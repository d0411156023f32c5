"""Synchronous on-policy training: generate, score, update, push the weights, again."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.schema import RLConfig
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.observability.metrics import Report
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.trainers.checkpointing import Checkpointer
from mcore_rl.trainers.device_sharing import Turns
from mcore_rl.trainers.evaluation import Evaluation
from mcore_rl.trainers.learner import Learner
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.step_samples import samples_of_step


@dataclass(frozen=True, slots=True)
class SyncTrainer:
    """The models and servers of a run, and the loop over them."""

    config: RLConfig
    turns: Turns  # of actor, reference and servers on their devices
    rollout: RolloutPool
    prompts: PromptBatches
    replay: ReplayBuffer  # groups of earlier steps
    learner: Learner
    checkpointer: Checkpointer
    evaluation: Evaluation

    def train(self, report: Report) -> None:
        """Run the steps up to trainer.num_steps, from 1 or from where the checkpointer goes on.

        Raises:
            RunStopped: a signal has asked for it; the last step is saved.
            PolicyMismatchError: samples came from other weights, or log-probs differ by more than
                trainer.max_logprob_gap or mean_logprob_gap.
            ConfigError: no response of a step got a reward, or too few groups passed the filter.
        """
        source = self.config, self.rollout, self.prompts, self.replay
        for step in range(self.checkpointer.next_step, self.config.trainer.num_steps + 1):
            clock = Stopwatch(step)
            with clock("generate"):
                batch, metrics = samples_of_step(*source, step)
            with clock("log_probs"):
                self.turns.stop_serving()
            metrics |= self.learner.learn(batch, metrics, step, clock)
            if self.checkpointer.is_due(step):
                with clock("save"):
                    self.checkpointer.save(step)
            with clock("weight_sync"):
                self.turns.serve(version=step)
            metrics["tokens_per_s"] = metrics["generated_tokens"] / clock.total_s
            if self.evaluation.is_due(step):
                with clock("evaluate"):
                    metrics |= self.evaluation.run(step)
            metrics |= clock.seconds | clock.driver
            report(step, metrics)
            self.checkpointer.step_ended(step, metrics)
