"""Whether samples are of the policy that is trained on them, as versions and log-probs tell it."""

from __future__ import annotations

import numpy as np

from mcore_rl.algorithms.correction import mismatch
from mcore_rl.config.schema import RLConfig, TrainerConfig
from mcore_rl.data.batch import Array, Batch


class PolicyMismatchError(RuntimeError):
    """The servers do not run the trainer's policy, so training would be wrong."""


def check_versions(batch: Batch, expected: int, max_age: int = 0) -> None:
    """Checks that every token of a step that the policy chose has the version of the servers.

    Those of replayed samples, and only they, may be up to `max_age` versions older.

    Raises:
        PolicyMismatchError: some do not.
    """
    fresh, replayed = split_replayed(batch)
    versions = np.unique(chosen(fresh, "weight_versions"))
    if len(fresh) and versions.tolist() != [expected]:
        raise PolicyMismatchError(
            f"servers answered with weights of version {versions.tolist()}; expected {expected}"
        )
    versions = np.unique(chosen(replayed, "weight_versions"))
    if len(versions) and not expected - max_age <= versions[0] <= versions[-1] < expected:
        raise PolicyMismatchError(
            f"replayed samples have weights of version {versions.tolist()}; expected: from "
            f"{expected - max_age} to {expected - 1}"
        )


def checked_age(batch: Batch, version: int, max_age: int) -> dict[str, float]:
    """The mean age of tokens that are not replayed, in versions; nothing if all have to be new.

    `version` is that of the policy that is trained on them, and `max_age` the oldest allowed.

    Raises:
        PolicyMismatchError: a token is older, or newer than the policy.
    """
    ages = version - chosen(split_replayed(batch)[0], "weight_versions")
    if not len(ages):
        return {}
    if not 0 <= ages.min() <= ages.max() <= max_age:
        raise PolicyMismatchError(
            f"samples for the policy of version {version} are from {ages.min()} to {ages.max()} "
            f"versions old; allowed: up to trainer.staleness={max_age}"
        )
    return {"samples/age": float(ages.mean())} if max_age else {}


def chosen(batch: Batch, name: str) -> Array:
    """A column along response tokens, where the policy chose the token."""
    return np.asarray(batch.jagged(name).values[batch.jagged("response_mask").values != 0])


def split_replayed(batch: Batch) -> tuple[Batch, Batch]:
    """The samples of this step, and those of earlier ones."""
    if "replayed" not in batch:
        return batch, batch.take([])
    is_replayed = batch.array("replayed") != 0
    rows = [np.flatnonzero(chosen).tolist() for chosen in (~is_replayed, is_replayed)]
    return batch.take(rows[0]), batch.take(rows[1])


def logprob_gaps(batch: Batch) -> dict[str, float]:
    """Absolute difference, in nats, of trainer and rollout log-probs at chosen tokens."""
    trainer, rollout = batch.jagged("log_probs").values, batch.jagged("rollout_log_probs").values
    gaps = np.abs(trainer - rollout)[batch.jagged("response_mask").values != 0]
    return {"max_logprob_gap": float(gaps.max()), "mean_logprob_gap": float(gaps.mean())}


def checked_mismatch(batch: Batch, config: RLConfig, step: int) -> dict[str, float]:
    """Metrics of how far trainer and servers are apart, with the gaps checked.

    None where the servers' log-probs stand for the trainer's. Replayed samples, of other weights,
    do not count. The gaps are those of samples of the policy itself: others differ from it by what
    it has learned since, too.
    """
    batch = split_replayed(batch)[0]
    if config.algorithm.correction.use_rollout_log_probs or not len(batch):
        return {}
    current = _of_version(batch, step - 1) if config.trainer.staleness else batch
    gaps = checked_gaps(current, config.trainer, step) if len(current) else {}
    return gaps | mismatch(batch)


def _of_version(batch: Batch, version: int) -> Batch:
    """The samples with a token that the policy chose, all of whose are of this version."""
    pairs = zip(batch.jagged("weight_versions"), batch.jagged("response_mask"), strict=True)
    found = [versions[mask != 0] for versions, mask in pairs]
    return batch.take([row for row, own in enumerate(found) if len(own) and (own == version).all()])


def checked_gaps(batch: Batch, bounds: TrainerConfig, step: int) -> dict[str, float]:
    """logprob_gaps, checked against trainer.max_logprob_gap and mean_logprob_gap.

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
