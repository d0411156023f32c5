"""Groups of earlier steps that later steps train on again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mcore_rl.algorithms.sample_choice import compute_priority
from mcore_rl.config.schema import ReplayConfig
from mcore_rl.controller.batch_ops import (
    concat_batches,
    drop_groups,
    find_lost_groups,
    get_sample_columns,
    restore_batch,
    to_arrays,
)
from mcore_rl.data.batch import NO_VERSION, Array, Samples
from mcore_rl.data.trajectories import split_groups_by_role

_STREAM = 0x7265706C  # sets its random numbers apart from others of the same seed and step


class ReplayBuffer:
    """Complete groups that the last max_age steps have trained on; a state of a checkpoint.

    Groups that are lost with a node leave it. Samples keep the log-probs and weight versions of the
    servers that generated them. Drawn samples have 1 in the column `replayed`.
    """

    def __init__(self, config: ReplayConfig, seed: int, call_s: float) -> None:
        """Start empty. A checkpoint waits `call_s` for the samples."""
        self._config, self._seed, self._call_s = config, seed, call_s
        self._samples: Samples | None = None

    def draw(self, num_groups: int, step: int) -> Samples | None:
        """Draw up to `num_groups` different groups with probabilities proportional to priorities.

        Groups of priority 0 are never drawn. Returns None where there is none.
        """
        self._drop_lost()
        if self._samples is None or num_groups < 1:
            return None
        ids = self._samples.array("group_ids")
        groups, weights = np.unique(ids), self._compute_priorities()
        num = min(num_groups, int(np.count_nonzero(weights)))
        if not num:
            return None
        rng = np.random.default_rng([self._seed, step, _STREAM])
        drawn = rng.choice(groups, num, replace=False, p=weights / weights.sum())
        samples = self._samples.take(np.flatnonzero(np.isin(ids, drawn)).tolist())
        return samples.with_columns(replayed=np.ones(len(samples), np.int8))

    def _compute_priorities(self) -> Array:
        """Return the priority of each group in order: the sum over its roles, mostly one."""
        assert self._samples is not None
        columns = get_sample_columns(self._samples)
        ids, by_role = (b.array("group_ids") for b in (columns, split_groups_by_role(columns)))
        rewards = self._samples.array("rewards").astype(np.float64)
        priorities = np.zeros(len(np.unique(ids)))
        index = np.unique(ids, return_inverse=True)[1]
        for part in np.unique(by_role):
            rows = by_role == part
            priorities[index[rows][0]] += compute_priority(rewards[rows], self._config)
        return priorities

    def add(self, batch: Samples, step: int) -> None:
        """Add the samples of a step and drop those that are too old then.

        A group that is there already is replaced: it was generated again.
        """
        if not self._config.share:
            return
        ids = np.unique(batch.array("group_ids"))
        samples = batch
        if self._samples is not None:
            samples = concat_batches([drop_groups(self._samples, ids), batch])
        oldest = _compute_oldest_versions(samples)
        self._samples = samples.take(np.flatnonzero(step - oldest <= self._config.max_age).tolist())

    def _drop_lost(self) -> None:
        """Drop groups that were lost with a node, and print how many."""
        if self._samples is not None and (lost := find_lost_groups([self._samples])):
            print(f"{len(lost)} groups died with their node: they are not replayed any more")
            self._samples = drop_groups(self._samples, lost)

    def take_snapshot(self) -> Samples | None:
        """Return the samples, by reference, for `restore`."""
        return self._samples

    def restore(self, snapshot: Samples | None) -> None:
        """Restore a snapshot. Groups that were lost since leave it at the next draw."""
        self._samples = snapshot

    def state_dict(self) -> dict[str, Any]:
        """Return all samples as arrays."""
        self._drop_lost()
        if self._samples is None:
            return {"samples": None}
        what = "a checkpoint needs the samples that are replayed"
        return {"samples": to_arrays(self._samples, what, self._call_s)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore samples; without algorithm.filter.replay.share nothing."""
        if self._config.share and state["samples"] is not None:
            self._samples = restore_batch(state["samples"])


def _compute_oldest_versions(batch: Samples) -> Array:
    """Return the oldest version of a chosen token in each sample's group, [samples]; 0: none."""
    never, versions = np.iinfo(np.int64).max, get_sample_columns(batch).array("oldest_versions")
    row_versions = np.where(versions == NO_VERSION, never, versions)
    ids, index = np.unique(batch.array("group_ids"), return_inverse=True)
    group_versions = np.full(len(ids), never)
    np.minimum.at(group_versions, index, row_versions)
    return np.asarray(np.where(group_versions == never, 0, group_versions)[index])
