"""The steps of reinforcement-learning loops: functions of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mcore_rl.algorithms.advantages import token_advantages, uniform_groups
from mcore_rl.algorithms.aggregation import loss_weights
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AlgorithmConfig, TrainerConfig
from mcore_rl.controller.worker_group import Method, WorkerGroup
from mcore_rl.data.batch import Batch
from mcore_rl.observability.metrics import merge


class PolicyMismatchError(RuntimeError):
    """The servers do not run the trainer's policy, so training would be wrong."""


def check_versions(batch: Batch, expected: int) -> None:
    """Checks that every token of an on-policy step has the version of the step before.

    Raises:
        PolicyMismatchError: some do not.
    """
    versions = np.unique(batch.jagged("weight_versions").values)
    if versions.tolist() != [expected]:
        raise PolicyMismatchError(
            f"servers answered with weights of version {versions.tolist()}; expected {expected}"
        )


def judged(batch: Batch, on_error: str) -> tuple[Batch, dict[str, float]]:
    """The batch, with reward.on_error=drop without the samples that got no reward; and metrics.

    Groups may then differ in size, and a group may be gone.

    Raises:
        ConfigError: none is left.
    """
    if on_error == "stop":  # the servers have raised
        return batch, {}
    errors = batch.array("reward_errors")
    left = np.flatnonzero(errors == "").tolist()
    metrics = {"reward_errors": 1 - len(left) / len(batch)}
    if on_error != "drop":
        return batch, metrics
    if not left:
        raise ConfigError(
            f"reward.on_error='drop': none of the {len(batch)} responses of a step got a reward; "
            f"the first: {errors[0]}"
        )
    return batch.take(left), metrics | {"dropped": float(len(batch) - len(left))}


def with_reference_log_probs(batch: Batch, score: Method, temperature: float) -> Batch:
    """`score`: the method of a group that gives log_probs of the reference model."""
    asked = batch.select("prompt_ids", "response_ids")
    scored = score(asked, temperature=temperature)
    return batch.with_columns(reference_log_probs=scored["log_probs"])


def logprob_gaps(batch: Batch) -> dict[str, float]:
    """Absolute difference, in nats, of trainer and rollout log-probs at chosen tokens."""
    trainer, rollout = batch.jagged("log_probs").values, batch.jagged("rollout_log_probs").values
    gaps = np.abs(trainer - rollout)[batch.jagged("response_mask").values != 0]
    return {"max_logprob_gap": float(gaps.max()), "mean_logprob_gap": float(gaps.mean())}


def checked_gaps(batch: Batch, bounds: TrainerConfig, step: int) -> dict[str, float]:
    """The same, checked against trainer.max_logprob_gap and mean_logprob_gap.

    Raises:
        PolicyMismatchError: one is beyond its bound.
    """
    gaps = logprob_gaps(batch)
    for name, gap in gaps.items():
        bound = getattr(bounds, name)
        if not gap <= bound:  # a gap that is not a number is no agreement either
            raise PolicyMismatchError(
                f"step {step}: {name} of trainer and rollout is {gap:.3g} nats; allowed: "
                f"trainer.{name}={bound:g}. The weights or the settings of one are wrong"
            )
    return gaps


def shuffled_rewards(batch: Batch, seed: Sequence[int]) -> Batch:
    """The same rewards, permuted over the samples: no signal is left."""
    rewards = np.random.default_rng(seed).permutation(batch.array("rewards"))
    return batch.with_columns(rewards=rewards)


def with_advantages(batch: Batch, algorithm: AlgorithmConfig) -> Batch:
    """Adds the column advantages; drops uniform groups if so configured."""
    found = token_advantages(batch, algorithm.advantage, algorithm.advantage_settings)
    batch = batch.with_columns(advantages=found)
    if algorithm.drop_uniform_groups:
        uniform = uniform_groups(batch.array("rewards"), batch.array("group_ids"))
        batch = batch.take(np.flatnonzero(~uniform).tolist())
    return batch


def mini_batches(batch: Batch, num: int, seed: Sequence[int]) -> list[Batch]:
    """Full groups, distributed at random over at most `num` mini-batches; none is empty."""
    groups = np.random.default_rng(seed).permutation(np.unique(batch.array("group_ids")))
    parts = [part for part in np.array_split(groups, num) if len(part)]
    return [
        batch.take(np.flatnonzero(np.isin(batch.array("group_ids"), part)).tolist())
        for part in parts
    ]


def with_loss_weights(batch: Batch, algorithm: AlgorithmConfig) -> Batch:
    """Adds the column loss_weights, of a whole mini-batch."""
    weights = loss_weights(
        batch.jagged("response_mask"),
        algorithm.loss_aggregation,
        algorithm.loss_aggregation_settings,
    )
    return batch.with_columns(loss_weights=weights)


def update(
    actor: WorkerGroup,
    batch: Batch,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    seed: Sequence[int],
) -> dict[str, float]:
    """One optimizer step per mini-batch; none if no group is left."""
    found = [
        # Every data-parallel rank reports what is true of all of them.
        actor.update(with_loss_weights(part, algorithm), temperature=temperature)[0]
        for part in mini_batches(batch, algorithm.num_mini_batches, seed)
    ]
    return {f"actor/{name}": value for name, value in merge(found).items()}


def describe(batch: Batch) -> dict[str, float]:
    """Metrics of what was generated."""
    lengths = batch.jagged("response_ids").lengths
    metrics: dict[str, Any] = {
        "reward": batch.array("rewards").mean(),
        "response_tokens": lengths.mean(),
        "response_tokens_max": lengths.max(),
        "truncated": (batch.array("finish_reasons") == "length").mean(),
    }
    parts = [name for name in batch.columns if name.startswith("reward/")]
    return {k: float(v) for k, v in metrics.items()} | {
        name: float(np.nanmean(batch.array(name))) for name in parts
    }
