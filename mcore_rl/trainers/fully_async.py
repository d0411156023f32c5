"""Fully asynchronous training: servers generate all the time, and the trainer takes what is ready.

    servers   | samples .......... | push 1 .......... | push 2 .......... | push 3 ....
    trainer   |      | update 1    |     | update 2    |     | update 3    |

A push comes in the middle of responses, whose next tokens are of the new version. No token is more
than trainer.staleness versions older than the policy that is trained on it. On devices that they
share with the trainer servers sleep while it trains, and go on where they were.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.schema import RLConfig
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.observability.metrics import Report
from mcore_rl.trainers.async_rollout import AsyncRollout
from mcore_rl.trainers.checkpointing import Checkpointer
from mcore_rl.trainers.device_sharing import Turns
from mcore_rl.trainers.evaluation import Evaluation
from mcore_rl.trainers.learner import Learner


@dataclass(frozen=True, slots=True)
class FullyAsyncTrainer:
    """The models and servers of a run, and the loop over them."""

    config: RLConfig
    turns: Turns  # of actor, reference and servers, where they share devices
    rollout: AsyncRollout
    learner: Learner
    checkpointer: Checkpointer
    evaluation: Evaluation

    def train(self, report: Report) -> None:
        """Run the steps up to trainer.num_steps, from 1 or from where the checkpointer goes on.

        Raises:
            RunStopped: a signal has asked for it; the last step is saved.
            PolicyMismatchError: a token is more than trainer.staleness versions old, or log-probs
                of samples of the policy differ by more than trainer.max_logprob_gap or
                mean_logprob_gap.
            ConfigError: no response of a step got a reward, or too few groups passed the filter.
            WorkerError: a rank or a server failed, or no samples came in timeouts.call_s.
        """
        self.rollout.start()
        for step in range(self.checkpointer.next_step, self.config.trainer.num_steps + 1):
            clock = Stopwatch(step)
            with clock("generate"):  # what the trainer waits for it
                batch, metrics = self.rollout.take(step)
            with clock("log_probs"):
                self.turns.stop_serving()
            with self.rollout.tended():
                metrics |= self.learner.learn(batch, metrics, step, clock)
            if self.checkpointer.is_due(step):
                with clock("save"):
                    self.checkpointer.save(step)
            with clock("weight_sync"):
                self.turns.serve(version=step)
            self.rollout.pushed(step)
            metrics["tokens_per_s"] = metrics["generated_tokens"] / clock.total_s
            if self.evaluation.is_due(step):
                with clock("evaluate"):
                    metrics |= self.evaluation.run(step)
            metrics |= clock.seconds | clock.driver
            metrics["time/servers_idle_s"] = self.rollout.idle_s()
            report(step, metrics)
            self.checkpointer.step_ended(step, metrics)
