"""Synchronous on-policy training: generate, score, update, send the weights, again."""

from __future__ import annotations

from mcore_rl.trainers.base import RLTrainer


class SyncTrainer(RLTrainer):
    """The loop of HybridFlow (arXiv:2409.19256): every sample is of the policy that it updates."""

    def train(self) -> None:
        """Run the steps that are left."""
        for step in self.steps():
            with self.timer("generate"):
                batch, metrics = self.sampler.collect(step)
            batch = self.drop_rejected(batch, metrics, step)
            with self.timer("log_probs"):
                self.devices.offload_rollout()
                for model in self.frozen_models:  # reward model, teachers, reference
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
            metrics |= self.evaluate_if_due(step)
            self.finish_step(step, metrics)
