"""Whether samples are of the policy that is trained on them, as versions and log-probs tell it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mcore_rl.algorithms.correction import compute_mismatch, find_gaps_beyond
from mcore_rl.config.schema import CorrectionConfig, TrainerConfig
from mcore_rl.controller.batch_ops import B, per_sample
from mcore_rl.data.batch import NO_VERSION, Array, Batch, Jagged, Samples


class PolicyMismatchError(RuntimeError):
    """The servers do not run the trainer's policy, so training would be wrong."""


def check_versions(batch: Samples, expected: int, max_age: int = 0) -> None:
    """Checks that every token of a step that the policy chose has the version of the servers.

    Those of replayed samples, and only they, may be up to `max_age` versions older.

    Raises:
        PolicyMismatchError: some do not.
    """
    fresh, replayed = split_replayed(per_sample(batch))
    versions = _versions(fresh)
    if len(fresh) and versions.tolist() != [expected]:
        raise PolicyMismatchError(
            f"servers answered with weights of version {versions.tolist()}; expected {expected}"
        )
    versions = _versions(replayed)
    if len(versions) and not expected - max_age <= versions[0] <= versions[-1] < expected:
        raise PolicyMismatchError(
            f"replayed samples have weights of version {versions.tolist()}; expected: from "
            f"{expected - max_age} to {expected - 1}"
        )


def _versions(batch: Batch) -> Array:
    """The oldest and the newest of each sample; those between are of mixed ones."""
    found = np.concatenate([batch.array("oldest_versions"), batch.array("newest_versions")])
    return np.unique(found[found != NO_VERSION])


def ages(batch: Samples, version: int) -> Array:
    """Of the oldest token of each sample that has one of the policy's, for a policy's version."""
    oldest = per_sample(batch).array("oldest_versions")
    return version - oldest[oldest != NO_VERSION]


def checked_age(batch: Samples, version: int, max_age: int) -> dict[str, float]:
    """The mean over samples that are not replayed of the age of their oldest token, in versions.

    Nothing if all have to be new.

    `version` is that of the policy that is trained on them, and `max_age` the oldest allowed.

    Raises:
        PolicyMismatchError: a token is older, or newer than the policy.
    """
    fresh = split_replayed(per_sample(batch))[0]
    found = ages(fresh, version)
    if not len(found):
        return {}
    oldest, newest = int(found.max()), int(version - _versions(fresh)[-1])
    if newest < 0 or oldest > max_age:
        raise PolicyMismatchError(
            f"samples for the policy of version {version} are from {newest} to {oldest} "
            f"versions old; allowed: up to trainer.staleness={max_age}"
        )
    return {"samples/age": float(found.mean())} if max_age else {}


def split_replayed(batch: B) -> tuple[B, B]:
    """The samples of this step, and those of earlier ones."""
    if "replayed" not in batch:
        return batch, batch.take([])
    is_replayed = batch.array("replayed") != 0
    rows = [np.flatnonzero(chosen).tolist() for chosen in (~is_replayed, is_replayed)]
    return batch.take(rows[0]), batch.take(rows[1])


def logprob_gaps(batch: Batch) -> dict[str, float]:
    """Absolute difference, in nats, of trainer and rollout log-probs at chosen tokens.

    Nothing where the policy has chosen none.
    """
    trainer, rollout = batch.jagged("log_probs").values, batch.jagged("rollout_log_probs").values
    gaps = np.abs(trainer - rollout)[batch.jagged("response_mask").values != 0]
    if not len(gaps):
        return {}
    return {"max_logprob_gap": float(gaps.max()), "mean_logprob_gap": float(gaps.mean())}


def gaps_and_mismatch(
    batch: Batch, config: CorrectionConfig, version: int | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """What logprob_gaps has found, to be checked, and metrics of how far the two are apart.

    None where the servers' log-probs stand for the trainer's. Replayed samples, of other weights,
    do not count. Where samples are of several versions, the gaps are those of samples of the policy
    itself, of `version`: others differ from it by what it has learned since, too.
    """
    fresh = split_replayed(batch)[0]
    if config.use_rollout_log_probs or not len(fresh):
        return {}, {}
    compared = batch.take(np.flatnonzero(_is_compared(batch, version)).tolist())
    return logprob_gaps(compared), compute_mismatch(fresh)


def compute_gap_mask(batch: Batch, version: int | None = None) -> Jagged:
    """Return 1 at the response tokens that the gaps of `gaps_and_mismatch` are of, else 0."""
    mask = batch.jagged("response_mask")
    is_compared = np.repeat(_is_compared(batch, version), mask.lengths)
    return mask.with_values(((mask.values != 0) & is_compared).astype(np.int8))


def _is_compared(batch: Batch, version: int | None) -> Array:
    """[samples]: whether the gaps are of it: not replayed, and no token older than `version`."""
    is_replayed = (
        batch.array("replayed") != 0 if "replayed" in batch else np.zeros(len(batch), bool)
    )
    if version is None:
        return ~is_replayed
    return ~is_replayed & (per_sample(batch).array("oldest_versions") == version)  # none is newer


def check_gaps(gaps: Mapping[str, float], bounds: TrainerConfig, step: int) -> None:
    """Whether what logprob_gaps has found is within max_logprob_gap and mean_logprob_gap.

    Raises:
        PolicyMismatchError: one is beyond its bound.
    """
    for name in find_gaps_beyond(gaps, get_gap_bounds(bounds)):
        raise PolicyMismatchError(
            f"step {step}: {name} of trainer and rollout is {gaps[name]:.3g} nats; allowed: "
            f"trainer.{name}={getattr(bounds, name):g}. The weights or the settings of one are "
            "wrong"
        )


def get_gap_bounds(trainer: TrainerConfig) -> dict[str, float]:
    """Return the largest gaps that a step may have, by the names that logprob_gaps gives them."""
    return {name: getattr(trainer, name) for name in ("max_logprob_gap", "mean_logprob_gap")}
