"""Fully asynchronous training: servers generate all the time, and the trainer takes what is ready.

    servers   | samples .......... | push 1 .......... | push 2 .......... | push 3 ....
    trainer   |      | update 1    |     | update 2    |     | update 3    |

A push comes in the middle of responses, whose next tokens are of the new version. No token is more
than trainer.staleness versions older than the policy that is trained on it. On devices that they
share with the trainer servers sleep while it trains, and go on where they were.
"""

from __future__ import annotations

from mcore_rl.trainers.async_rollout import AsyncRollout
from mcore_rl.trainers.base import RLTrainer
from mcore_rl.trainers.checkpointing import Stateful


class FullyAsyncTrainer(RLTrainer):
    """A loop that never waits for a response that it does not need."""

    mode = "fully_async"

    def prepare(self) -> None:
        """Build the rollout that goes on beside the trainer."""
        self.generation = AsyncRollout(self.sampler)

    def list_states(self) -> dict[str, Stateful]:
        """Save the groups first: those that were lost begin again, which draws prompts."""
        return {"ahead": self.generation} | super().list_states()

    def train(self) -> None:
        """Run the steps that are left."""
        self.generation.start()
        for step in self.steps():
            with self.timer("generate"):  # the time that the trainer waits for it
                batch, metrics = self.generation.take(step)
            with self.timer("log_probs"):
                self.devices.offload_rollout()
            with self.generation.background_polling():
                batch = self.drop_rejected(batch, metrics, step)
                with self.timer("log_probs"):
                    for model in self.frozen_models:
                        batch, scores = model.score(batch)
                        metrics |= scores
                    batch = self.actor.compute_log_probs(batch)
                with self.timer("update"):
                    if self.critic is not None:
                        batch = self.critic.compute_values(batch)
                    training, stats = self.actor.compute_advantages(batch, step)
                    metrics |= stats
                    if self.critic is not None:
                        metrics |= self.critic.update(training, step)
                    batch, stats = self.actor.update(training, step)
                    metrics |= stats
                self.log_samples(batch, step)
            self.save_if_due(step)
            with self.timer("weight_sync"):
                self.devices.update_weights(version=step)
            self.generation.begin_version(step)
            metrics |= self.evaluate_if_due(step)
            metrics["time/servers_idle_s"] = self.generation.idle_s()
            self.finish_step(step, metrics)
