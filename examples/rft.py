"""A trainer of one's own: rejection sampling fine-tuning (RFT, arXiv:2308.01825).

    mcore-rl rl recipe=quickstart trainer.mode=examples/rft.py:RejectionSampling \
        algorithm.num_mini_batches=1

Each step samples responses, keeps those that the reward accepts, once each, and imitates them: the
negative log-likelihood of their tokens, as in `mcore-rl sft`. It is expert iteration with the
policy itself as the expert, without a baseline, a ratio or a clip.
"""

from __future__ import annotations

import numpy as np

from mcore_rl.algorithms.losses import negative_log_likelihood
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.batch_ops import select_token_columns
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.engine.base import LossFunction
from mcore_rl.engine.worker import ModelWorker, apply_on_rank_zero
from mcore_rl.trainers.base import RLTrainer
from mcore_rl.trainers.training_batch import add_token_weights

MIN_REWARD = 1.0  # of a response that is imitated


class RejectionSampling(RLTrainer):
    """A loop that imitates its own best responses."""

    @classmethod
    def build_loss(cls, config: RLConfig) -> LossFunction:
        """Return the loss of the actor's updates."""
        return negative_log_likelihood

    def train(self) -> None:
        """Run the steps that are left."""
        for step in self.steps():
            with self.timer("generate"):
                samples, metrics = self.sampler.collect(step)
            accepted = self.select_accepted(samples)
            metrics["samples/accepted"] = len(accepted) / len(samples)
            self.devices.offload_rollout()
            with self.timer("update"):
                if len(accepted):
                    metrics |= self.imitate(accepted)
            self.log_samples(samples, step)
            self.save_if_due(step)
            with self.timer("weight_sync"):
                self.devices.update_weights(version=step)
            metrics |= self.evaluate_if_due(step)
            self.finish_step(step, metrics)

    def select_accepted(self, samples: Samples) -> Samples:
        """Return the samples whose reward is at least MIN_REWARD, each response once a group."""
        digests = apply_on_rank_zero(
            self.actor.workers, digest_responses, samples.select("response_ids")
        )
        seen, rows = set(), []
        rewards, groups = samples.array("rewards"), samples.array("group_ids").tolist()
        for row, key in enumerate(zip(groups, digests, strict=True)):
            if rewards[row] >= MIN_REWARD and key not in seen:
                seen.add(key)
                rows.append(row)
        return samples.take(rows)

    def imitate(self, accepted: Samples) -> dict[str, float]:
        """Take an optimizer step on the mean over the tokens of all accepted responses."""
        mask = accepted.select("response_mask", "group_ids")
        weights, _ = apply_on_rank_zero(self.actor.workers, add_token_weights, mask, "token_mean")
        self.devices.use("actor")
        batch = select_token_columns(accepted.union(weights))
        [metrics] = self.actor.workers.call(ModelWorker.update, batch, temperature=1.0)[0]
        return {f"actor/{name}": value for name, value in metrics.items()}


def digest_responses(batch: Batch) -> list[int]:
    """Return a number for each response, the same for equal ones."""
    return [hash(np.ascontiguousarray(row).tobytes()) for row in batch.jagged("response_ids")]
