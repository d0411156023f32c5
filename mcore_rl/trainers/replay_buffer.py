"""Groups of earlier steps that later steps train on again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mcore_rl.algorithms.sample_choice import priority_of
from mcore_rl.config.schema import ReplayConfig
from mcore_rl.controller.batch_ops import (
    from_arrays,
    joined,
    lost_groups,
    per_sample,
    to_arrays,
    without_groups,
)
from mcore_rl.data.batch import NO_VERSION, Array, Samples
from mcore_rl.data.trajectories import compared

_STREAM = 0x7265706C  # sets its random numbers apart from others of the same seed and step


class ReplayBuffer:
    """What was trained on in the last max_age steps, as whole groups; a state of a checkpoint.

    Groups that are lost with a node leave it.

    Samples keep the log-probs and weight versions of the servers that generated them. Those that
    are drawn have 1 in the column `replayed`.
    """

    def __init__(self, config: ReplayConfig, seed: int, call_s: float) -> None:
        """`call_s` is how long a checkpoint waits for the samples."""
        self._config, self._seed, self._call_s = config, seed, call_s
        self._kept: Samples | None = None

    def draw(self, num_groups: int, step: int) -> Samples | None:
        """Up to `num_groups` different groups, each with a chance in proportion to its priority.

        Those of priority 0 are never drawn. None where there is none.
        """
        self._let_go_of_lost()
        if self._kept is None or num_groups < 1:
            return None
        ids = self._kept.array("group_ids")
        groups, weights = np.unique(ids), self._priorities()
        num = min(num_groups, int(np.count_nonzero(weights)))
        if not num:
            return None
        rng = np.random.default_rng([self._seed, step, _STREAM])
        drawn = rng.choice(groups, num, replace=False, p=weights / weights.sum())
        samples = self._kept.take(np.flatnonzero(np.isin(ids, drawn)).tolist())
        return samples.with_columns(replayed=np.ones(len(samples), np.int8))

    def _priorities(self) -> Array:
        """Of each group in order: the sum over its roles, of which there is mostly one."""
        assert self._kept is not None
        own = per_sample(self._kept)
        ids, by_role = (b.array("group_ids") for b in (own, compared(own)))
        rewards = self._kept.array("rewards").astype(np.float64)
        found = np.zeros(len(np.unique(ids)))
        index = np.unique(ids, return_inverse=True)[1]
        for part in np.unique(by_role):
            rows = by_role == part
            found[index[rows][0]] += priority_of(rewards[rows], self._config)
        return found

    def add(self, batch: Samples, step: int) -> None:
        """Keeps new samples for later steps, and lets go of those that are then too old.

        A group that is there already is replaced: it was generated again.
        """
        if not self._config.share:
            return
        ids = np.unique(batch.array("group_ids"))
        kept = batch if self._kept is None else joined([without_groups(self._kept, ids), batch])
        oldest = _oldest_versions(kept)
        self._kept = kept.take(np.flatnonzero(step - oldest <= self._config.max_age).tolist())

    def _let_go_of_lost(self) -> None:
        if self._kept is not None and (lost := lost_groups([self._kept])):
            print(f"{len(lost)} groups died with their node: they are not replayed any more")
            self._kept = without_groups(self._kept, lost)

    def snapshot(self) -> Samples | None:
        """What there is, by reference; for `go_back`."""
        return self._kept

    def go_back(self, snapshot: Samples | None) -> None:
        """To what was there. What is lost meanwhile leaves it when it is next looked at."""
        self._kept = snapshot

    def state_dict(self) -> dict[str, Any]:
        self._let_go_of_lost()
        if self._kept is None:
            return {"samples": None}
        what = "a checkpoint needs the samples that are replayed"
        return {"samples": to_arrays(self._kept, what, self._call_s)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Without a share nothing is kept, whatever was."""
        if self._config.share and state["samples"] is not None:
            self._kept = from_arrays(state["samples"])


def _oldest_versions(batch: Samples) -> Array:
    """[samples]: of the tokens that the policy has chosen in their groups; 0 without one."""
    never, found = np.iinfo(np.int64).max, per_sample(batch).array("oldest_versions")
    of_rows = np.where(found == NO_VERSION, never, found)
    ids, index = np.unique(batch.array("group_ids"), return_inverse=True)
    of_groups = np.full(len(ids), never)
    np.minimum.at(of_groups, index, of_rows)
    return np.asarray(np.where(of_groups == never, 0, of_groups)[index])
