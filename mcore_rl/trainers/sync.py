"""Synchronous on-policy training: generate, score, update, push the weights, again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_rl.algorithms.advantages import ADVANTAGES, uniform_groups
from mcore_rl.algorithms.aggregation import loss_weights
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch
from mcore_rl.observability.metrics import Report, merge
from mcore_rl.observability.stopwatch import Stopwatch
from mcore_rl.workers.rollout_pool import RolloutPool
from mcore_rl.workers.weight_sync import WeightSync


class PolicyMismatchError(RuntimeError):
    """The servers do not run the trainer's policy: what is learned would be wrong."""


@dataclass(frozen=True, slots=True)
class SyncTrainer:
    """The models and servers of a run, and the loop over them."""

    config: RLConfig
    turns: Turns
    rollout: RolloutPool

    def train(self, prompts: Iterator[Batch], report: Report) -> None:
        """Run trainer.num_steps steps.

        Raises:
            PolicyMismatchError: samples came from other weights, or log-probs differ by more than
                trainer.max_logprob_gap or mean_logprob_gap.
        """
        for step in range(1, self.config.trainer.num_steps + 1):
            clock = Stopwatch()
            with clock("generate"):
                batch = self.rollout.generate(next(prompts), n=self.config.algorithm.group_size)
            _check_versions(batch, step - 1)
            metrics, num_tokens = _describe(batch), int(batch.num_tokens.sum())
            with clock("log_probs"):
                self.turns.stop_serving()
                if self.config.algorithm.kl_coef:
                    batch = self._with_reference(batch)
                self.turns.begin_training()
                temperature = self.config.rollout.temperature
                batch = self.turns.actor.compute_log_probs(batch, temperature=temperature)
            metrics |= self._check_gaps(batch, step)
            with clock("update"):
                batch = self._with_advantages(batch, step)
                metrics |= self._update(batch, step)
            with clock("weight_sync"):
                self.turns.serve(version=step)
            metrics["tokens_per_s"] = num_tokens / clock.total_s
            report(step, metrics | clock.seconds)

    def _with_reference(self, batch: Batch) -> Batch:
        assert self.reference is not None
        scored = self.reference.compute_log_probs(
            batch.select("prompt_ids", "response_ids"), temperature=self.config.rollout.temperature
        )
        return batch.with_columns(reference_log_probs=scored["log_probs"])

    def _check_gaps(self, batch: Batch, step: int) -> dict[str, float]:
        gaps = logprob_gaps(batch)
        for name, gap in gaps.items():
            bound = getattr(self.config.trainer, name)
            if not gap <= bound:  # a gap that is not a number is no agreement either
                raise PolicyMismatchError(
                    f"step {step}: {name} of trainer and rollout is {gap:.3g} nats; allowed: "
                    f"trainer.{name}={bound:g}. The weights or the settings of one are wrong"
                )
        return gaps

    def _with_advantages(self, batch: Batch, step: int) -> Batch:
        rewards, algorithm = batch.array("rewards"), self.config.algorithm
        if self.config.reward.shuffle:
            rewards = np.random.default_rng([self.config.seed, step]).permutation(rewards)
        groups = batch.array("group_ids")
        values = ADVANTAGES[algorithm.advantage](
            rewards, groups, normalize_by_std=algorithm.normalize_by_std
        )
        responses = batch.jagged("response_ids")
        per_token = np.repeat(values, responses.lengths).astype(np.float32)
        batch = batch.with_columns(advantages=responses.with_values(per_token))
        if algorithm.drop_uniform_groups:
            batch = batch.take(np.flatnonzero(~uniform_groups(rewards, groups)).tolist())
        return batch

    def _update(self, batch: Batch, step: int) -> dict[str, float]:
        """One optimizer step a mini-batch; no step where no group is left to learn from."""
        parts = mini_batches(
            batch, self.config.algorithm.num_mini_batches, [self.config.seed, step]
        )
        found = []
        for part in parts:
            weights = loss_weights(
                part.jagged("response_mask"), self.config.algorithm.loss_aggregation
            )
            part = part.with_columns(loss_weights=weights)
            # Every data-parallel rank reports what is true of all of them.
            found.append(
                self.turns.actor.update(part, temperature=self.config.rollout.temperature)[0]
            )
        return {f"actor/{name}": value for name, value in merge(found).items()}


def mini_batches(batch: Batch, num: int, seed: list[int]) -> list[Batch]:
    """Whole groups dealt at random into at most `num` mini-batches; none is empty."""
    groups = np.random.default_rng(seed).permutation(np.unique(batch.array("group_ids")))
    parts = [part for part in np.array_split(groups, num) if len(part)]
    return [
        batch.take(np.flatnonzero(np.isin(batch.array("group_ids"), part)).tolist())
        for part in parts
    ]


def _check_versions(batch: Batch, expected: int) -> None:
    """Every token of an on-policy step comes from the weights of the step before."""
    versions = np.unique(batch.jagged("weight_versions").values)
    if versions.tolist() != [expected]:
        raise PolicyMismatchError(
            f"servers answered with weights of version {versions.tolist()}; expected {expected}"
        )


def logprob_gaps(batch: Batch) -> dict[str, float]:
    """Absolute difference, in nats, of trainer and rollout log-probs at chosen tokens."""
    trainer, rollout = batch.jagged("log_probs").values, batch.jagged("rollout_log_probs").values
    gaps = np.abs(trainer - rollout)[batch.jagged("response_mask").values != 0]
    return {"max_logprob_gap": float(gaps.max()), "mean_logprob_gap": float(gaps.mean())}


def _describe(batch: Batch) -> dict[str, float]:
    lengths = batch.jagged("response_ids").lengths
    metrics: dict[str, Any] = {
        "reward": batch.array("rewards").mean(),
        "response_tokens": lengths.mean(),
        "response_tokens_max": lengths.max(),
        "truncated": (batch.array("finish_reasons") == "length").mean(),
    }
    parts = [name for name in batch.columns if name.startswith("reward/")]
    return {k: float(v) for k, v in metrics.items()} | {
        name: float(batch.array(name).mean()) for name in parts
    }
