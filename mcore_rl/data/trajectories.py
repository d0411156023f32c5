"""Trajectories of several samples: what an agent did in one go, where its context began anew.

The samples of a trajectory have its group id, its number in the group and the same reward, and
count up by their segment. Statistics over responses are over trajectories, and so are the means of
a loss over sequences, so that one of three samples counts once.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from mcore_rl.data.batch import Batch, Column, Jagged

Rows = npt.NDArray[np.int64]
_OF_PROMPT = ("prompt_ids", "routed_experts")  # jagged columns that have entries for the prompt
_SUMMED = ("response_tokens",)  # columns of one value a sample that add up


def compared(batch: Batch) -> Batch:
    """The batch with group ids by which responses are compared: those of a prompt and a role.

    The ids of the batch itself are those of prompts, in which steps count and mini-batches are cut.
    """
    if "roles" not in batch or not (batch.array("roles") != "").any():
        return batch
    pairs = [batch.array("group_ids"), np.unique(batch.array("roles"), return_inverse=True)[1]]
    found = np.unique(np.stack(pairs), axis=1, return_inverse=True)[1]
    return batch.with_columns(group_ids=found.reshape(-1).astype(np.int64))


class Trajectories:
    """Which samples of a batch, wherever they are, make a trajectory together."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    @cached_property
    def is_trivial(self) -> bool:
        """Whether each is one sample."""
        return "segments" not in self._batch or not self._batch.array("segments").any()

    @cached_property
    def _order(self) -> Rows:
        """Rows of the batch, trajectory after trajectory, each by its segments."""
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
        """Of each row of the batch, the row of `joined` that it is in."""
        if self.is_trivial:
            return np.arange(len(self._batch))
        numbers = np.empty(len(self._batch), np.int64)
        numbers[self._order] = np.repeat(np.arange(len(self._bounds) - 1), np.diff(self._bounds))
        return numbers

    @cached_property
    def last_rows(self) -> Rows:
        """Row of the last segment of each row's trajectory, one a row of the batch."""
        if self.is_trivial:
            return np.arange(len(self._batch))
        return self._order[self._bounds[1:] - 1][self.numbers]

    def joined(self) -> Batch:
        """One row a trajectory.

        Of the columns along response tokens those of all its segments, one after the other, and the
        sum of response_tokens; of the others, those of its last segment. Columns with entries for
        prompt tokens are left out.
        """
        if self.is_trivial:
            return self._batch
        columns: dict[str, Column] = {}
        for name, column in self._batch.columns.items():
            if name in _SUMMED and not isinstance(column, Jagged):
                columns[name] = np.add.reduceat(column[self._order], self._bounds[:-1])
            elif not isinstance(column, Jagged):
                columns[name] = column[self._order][self._bounds[1:] - 1]
            elif name not in _OF_PROMPT:
                rows = column.take(self._order.tolist())
                columns[name] = Jagged(rows.values, rows.offsets[self._bounds])
        return Batch(columns)

    def split(self, column: Jagged) -> Jagged:
        """A column along the response tokens of `joined`, as rows of the batch."""
        if self.is_trivial:
            return column
        lengths = self._batch.jagged("response_ids").lengths[self._order]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Jagged(column.values, offsets).take(np.argsort(self._order).tolist())

    def rows_of(self, joined_rows: Rows) -> list[int]:
        """The rows of the batch of these rows of `joined`, in ascending order."""
        if self.is_trivial:
            return sorted(joined_rows.tolist())
        return sorted(np.flatnonzero(np.isin(self.numbers, joined_rows)).tolist())
