"""Checks that samples are of the policy that is trained on them: weight versions and log-probs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.correction import compute_mismatch, find_gaps_beyond
from mcore_rl.config.schema import CorrectionConfig, TrainerConfig
from mcore_rl.controller.batch_ops import B, get_sample_columns
from mcore_rl.data.batch import NO_VERSION, Array, Batch, Jagged, Samples


class PolicyMismatchError(RuntimeError):
    """The servers do not run the trainer's policy, so training would be wrong."""


def check_versions(batch: Samples, expected: int, max_age: int = 0) -> None:
    """Check that every token that the policy chose has the version `expected`.

    Tokens of replayed samples, and only they, may be up to `max_age` versions older. Samples of
    groups that failed may have no token that the policy chose.

    Raises:
        PolicyMismatchError: A token has another version.
    """
    fresh, replayed = split_replayed(get_sample_columns(batch))
    versions = _list_versions(fresh)
    if len(versions) and versions.tolist() != [expected]:
        raise PolicyMismatchError(
            f"servers answered with weights of version {versions.tolist()}; expected {expected}"
        )
    versions = _list_versions(replayed)
    if len(versions) and not expected - max_age <= versions[0] <= versions[-1] < expected:
        raise PolicyMismatchError(
            f"replayed samples have weights of version {versions.tolist()}; expected: from "
            f"{expected - max_age} to {expected - 1}"
        )


def _list_versions(batch: Batch) -> Array:
    """Return the oldest and the newest version of each sample, sorted and unique."""
    versions = np.concatenate([batch.array("oldest_versions"), batch.array("newest_versions")])
    return np.unique(versions[versions != NO_VERSION])


def compute_ages(batch: Samples, version: int) -> Array:
    """Return how many versions before `version` the oldest token of each sample was chosen.

    Samples without a token that the policy chose are left out.
    """
    oldest = get_sample_columns(batch).array("oldest_versions")
    ages: Array = version - oldest[oldest != NO_VERSION]
    return ages


def check_ages(batch: Samples, version: int, max_age: int) -> dict[str, float]:
    """Check that no token is older than `max_age` versions or newer than `version`, the policy's.

    Replayed samples are not checked. Returns the metric samples/age, the mean age of the oldest
    token of each sample, in versions; nothing if all have to be new.

    Raises:
        PolicyMismatchError: A token is older, or newer than the policy.
    """
    fresh = split_replayed(get_sample_columns(batch))[0]
    ages = compute_ages(fresh, version)
    if not len(ages):
        return {}
    oldest, newest = int(ages.max()), int(version - _list_versions(fresh)[-1])
    if newest < 0 or oldest > max_age:
        raise PolicyMismatchError(
            f"samples for the policy of version {version} are from {newest} to {oldest} "
            f"versions old; allowed: up to trainer.staleness={max_age}"
        )
    return {"samples/age": float(ages.mean())} if max_age else {}


def split_replayed(batch: B) -> tuple[B, B]:
    """Return the samples of this step, and the samples of earlier steps."""
    if "replayed" not in batch:
        return batch, batch.take([])
    is_replayed = batch.array("replayed") != 0
    rows = [np.flatnonzero(is_part).tolist() for is_part in (~is_replayed, is_replayed)]
    return batch.take(rows[0]), batch.take(rows[1])


def compute_logprob_gaps(batch: Batch) -> dict[str, float]:
    """Return max_logprob_gap and mean_logprob_gap of trainer and servers, in nats.

    Over tokens that the policy chose; empty where there is none.
    """
    trainer, rollout = batch.jagged("log_probs").values, batch.jagged("rollout_log_probs").values
    gaps = np.abs(trainer - rollout)[batch.jagged("response_mask").values != 0]
    if not len(gaps):
        return {}
    return {"max_logprob_gap": float(gaps.max()), "mean_logprob_gap": float(gaps.mean())}


def compute_gaps_and_mismatch(
    batch: Batch, config: CorrectionConfig, version: int | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the log-prob gaps, to be checked, and metrics of how far the policies are apart.

    Empty where the servers' log-probs stand for the trainer's. Replayed samples, of other weights,
    do not count. Where samples are of several versions, the gaps are those of samples of the policy
    itself, `version`: others also differ by what the policy has learned since.
    """
    fresh = split_replayed(batch)[0]
    if config.use_rollout_log_probs or not len(fresh):
        return {}, {}
    compared = batch.take(np.flatnonzero(_is_compared(batch, version)).tolist())
    return compute_logprob_gaps(compared), compute_mismatch(fresh)


def compute_gap_mask(batch: Batch, version: int | None = None) -> Jagged:
    """Return 1 at the response tokens whose gaps count, else 0."""
    mask = batch.jagged("response_mask")
    is_compared = np.repeat(_is_compared(batch, version), mask.lengths)
    return mask.with_values(((mask.values != 0) & is_compared).astype(np.int8))


def _is_compared(batch: Batch, version: int | None) -> npt.NDArray[np.bool_]:
    """Return whether gaps count a sample, [samples]: not replayed, no token before `version`."""
    is_replayed: npt.NDArray[np.bool_] = (
        batch.array("replayed") != 0 if "replayed" in batch else np.zeros(len(batch), bool)
    )
    if version is None:
        return ~is_replayed
    # No version is newer than the policy's.
    is_newest: npt.NDArray[np.bool_] = get_sample_columns(batch).array("oldest_versions") == version
    return ~is_replayed & is_newest


def check_gaps(gaps: Mapping[str, float], bounds: TrainerConfig, step: int) -> None:
    """Check gaps against trainer.max_logprob_gap and trainer.mean_logprob_gap.

    Raises:
        PolicyMismatchError: One is beyond its bound.
    """
    for name in find_gaps_beyond(gaps, bounds.gap_bounds):
        raise PolicyMismatchError(
            f"step {step}: {name} of trainer and rollout is {gaps[name]:.3g} nats; allowed: "
            f"trainer.{name}={getattr(bounds, name):g}. The weights or the settings of one are "
            "wrong"
        )
