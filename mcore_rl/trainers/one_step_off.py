"""Training one step off: the next samples are generated while these are trained on.

    servers   | samples 1 | samples 2  |  push 1 | samples 3   | push 2 |
    trainer   |           | update 1   |         | update 2    |

Step k trains on samples of version k - 2; its policy has version k - 1. The servers need devices of
their own. With trainer.staleness=0 generation waits for the push, as in trainers/sync.py.
"""

from __future__ import annotations

from mcore_rl.trainers.async_rollout import RolloutPrefetcher
from mcore_rl.trainers.base import RLTrainer
from mcore_rl.trainers.checkpointing import Stateful
from mcore_rl.trainers.policy_checks import check_ages


class OneStepOffTrainer(RLTrainer):
    """A loop whose servers are one step ahead of it.

    What stops the generation of a step is raised when the step before has been trained.
    """

    mode = "one_step_off"

    def prepare(self) -> None:
        """Build the prefetcher."""
        inputs = self.inputs
        self.prefetcher = RolloutPrefetcher(self.sampler, inputs.thread, inputs.experts)

    def list_states(self) -> dict[str, Stateful]:
        """Save the prefetcher first: it generates lost samples again, which draws prompts."""
        return {"ahead": self.prefetcher} | super().list_states()

    def train(self) -> None:
        """Run the steps that are left."""
        self.prefetcher.start()
        last, staleness = self.config.trainer.num_steps, self.config.trainer.staleness or 0
        for step in self.steps():
            with self.timer("generate"):  # the time that the trainer waits for it
                batch, metrics = self.prefetcher.take(step, version=step - 1)
            metrics |= check_ages(batch, step - 1, staleness)
            self.devices.disable_resend()
            if staleness and step < last:
                self.prefetcher.begin(step + 1, version=step - 1)
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
            with self.timer("generate"):  # a server takes no weights while it answers
                self.prefetcher.wait()
            with self.timer("weight_sync"):
                self.devices.update_weights(version=step)
            metrics |= self.evaluate_if_due(step)
            metrics["time/servers_idle_s"] = self.prefetcher.idle_s()
            self.finish_step(step, metrics)
