"""Trajectories of several samples: an agent whose context began anew.

The samples of a trajectory share its group id, its index in the group and its reward, and are
numbered by segment. Statistics over responses, and means of a loss over sequences, are over
trajectories, so that a trajectory of three samples counts once.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from mcore_rl.data.batch import PICKED_KEYS, Batch, Column, Jagged, Samples

Rows = npt.NDArray[np.int64]
# jagged columns with entries for prompt tokens
_PROMPT_COLUMNS = ("prompt_ids", "routed_experts", PICKED_KEYS)
_CUT_OFF = ("truncated", "aborted")  # statuses of trajectories that a limit has ended
_SUMMED = ("response_tokens",)  # columns of one value per sample to sum over segments


def split_groups_by_role(batch: Batch) -> Batch:
    """Return the batch with a group id for each pair of prompt and role.

    Advantages compare within these groups. The ids of the batch itself are per prompt: steps count
    prompts, and mini-batches are cut between them.
    """
    if "roles" not in batch or not (batch.array("roles") != "").any():
        return batch
    pairs = [batch.array("group_ids"), np.unique(batch.array("roles"), return_inverse=True)[1]]
    ids = np.unique(np.stack(pairs), axis=1, return_inverse=True)[1]
    return batch.with_columns(group_ids=ids.reshape(-1).astype(np.int64))


def find_truncated(batch: Samples) -> npt.NDArray[np.bool_]:
    """Return which samples a limit has cut off: their last turn, or the trajectory that they end.

    A trajectory that ran out of time ends with a complete turn; only its status tells.
    """
    is_truncated = np.asarray(batch.array("finish_reasons") == "length", np.bool_)
    if "statuses" in batch:
        is_truncated |= np.isin(batch.array("statuses"), _CUT_OFF)
    return is_truncated


class Trajectories:
    """Trajectories of a batch, whose samples may be in any order."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    @cached_property
    def is_trivial(self) -> bool:
        """True if each trajectory is one sample."""
        return "segments" not in self._batch or not self._batch.array("segments").any()

    @cached_property
    def _order(self) -> Rows:
        """Rows of the batch sorted by trajectory, then by segment."""
        names = ("segments", "trajectories", "group_ids")
        return np.asarray(np.lexsort([self._batch.array(name) for name in names]), np.int64)

    @cached_property
    def _bounds(self) -> Rows:
        """Trajectory i has the rows _order[_bounds[i]:_bounds[i + 1]]."""
        keys = [self._batch.array(name)[self._order] for name in ("group_ids", "trajectories")]
        is_first = np.ones(len(self._batch), np.bool_)
        is_first[1:] = (np.diff(keys[0]) != 0) | (np.diff(keys[1]) != 0)
        return np.append(np.flatnonzero(is_first), len(self._batch)).astype(np.int64)

    @cached_property
    def numbers(self) -> Rows:
        """Index of the trajectory of each row of the batch: the row of `join`."""
        if self.is_trivial:
            return np.arange(len(self._batch))
        numbers = np.empty(len(self._batch), np.int64)
        numbers[self._order] = np.repeat(np.arange(len(self._bounds) - 1), np.diff(self._bounds))
        return numbers

    @cached_property
    def last_rows(self) -> Rows:
        """Row of the last segment of the trajectory of each row of the batch."""
        if self.is_trivial:
            return np.arange(len(self._batch))
        return self._order[self._bounds[1:] - 1][self.numbers]

    def join(self) -> Batch:
        """Return a batch of one row per trajectory.

        Columns along response tokens are concatenated over segments, response_tokens are summed,
        other columns are those of the last segment. Columns along prompt tokens are left out.
        """
        if self.is_trivial:
            return self._batch
        columns: dict[str, Column] = {}
        for name, column in self._batch.columns.items():
            if name in _SUMMED and not isinstance(column, Jagged):
                columns[name] = np.add.reduceat(column[self._order], self._bounds[:-1])
            elif not isinstance(column, Jagged):
                columns[name] = column[self._order][self._bounds[1:] - 1]
            elif name not in _PROMPT_COLUMNS:
                rows = column.take(self._order.tolist())
                columns[name] = Jagged(rows.values, rows.offsets[self._bounds])
        return Batch(columns)

    def split(self, column: Jagged) -> Jagged:
        """Split a column along the response tokens of `join` into rows of the batch."""
        if self.is_trivial:
            return column
        lengths = self._batch.jagged("response_ids").lengths[self._order]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Jagged(column.values, offsets).take(np.argsort(self._order).tolist())

    def find_rows(self, joined_rows: Rows) -> list[int]:
        """Return the rows of the batch in these rows of `join`, in ascending order."""
        if self.is_trivial:
            return sorted(joined_rows.tolist())
        return sorted(np.flatnonzero(np.isin(self.numbers, joined_rows)).tolist())
