"""Statistics for advantages: over groups of samples, and along the tokens of a response.

All in float64: dividing by a standard deviation near 0 would amplify the rounding of float32 means.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mcore_rl.data.batch import Jagged

Floats = npt.NDArray[np.float64]
EPSILON = 1e-6  # keeps a group of equal rewards from dividing by zero


def sum_by_index(index: npt.NDArray[np.integer], values: Floats, num: int = 0) -> Floats:
    """Sum the values of each index: [at least num]."""
    return np.asarray(np.bincount(index, weights=values, minlength=num), dtype=np.float64)


class Groups:
    """Statistics of groups: the values with one id, in any order and number.

    Takes and returns [values]; a statistic stands at each value of its group.
    """

    def __init__(self, ids: npt.NDArray[np.integer]) -> None:
        """Build the groups from `ids`: [values], or [values, parts] for ids of several parts."""
        _, index, counts = np.unique(ids, return_inverse=True, return_counts=True, axis=0)
        self.index: npt.NDArray[np.int64] = index.reshape(-1)  # from 0 to the number of groups - 1
        self.sizes: Floats = counts[self.index].astype(np.float64)

    def sum(self, values: Floats) -> Floats:
        return sum_by_index(self.index, values)[self.index]

    def mean(self, values: Floats) -> Floats:
        return self.sum(values) / self.sizes

    def center(self, values: Floats) -> Floats:
        """Subtract the mean of the group; a group of one becomes 0."""
        return values - self.mean(values)

    def std(self, values: Floats) -> Floats:
        """Return the sample standard deviation (n - 1); 0 in a group of one."""
        variance = self.sum(self.center(values) ** 2) / np.maximum(self.sizes - 1, 1)
        return np.asarray(np.sqrt(variance))

    def normalize(self, values: Floats, *, by_std: bool) -> Floats:
        """Subtract the mean, and if `by_std` divide by the standard deviation + 1e-6."""
        centered = self.center(values)
        return centered / (self.std(values) + EPSILON) if by_std else centered

    def is_uniform(self, values: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
        """Return whether all values of the group are equal."""
        lowest = np.full(len(values), np.inf)
        highest = np.full(len(values), -np.inf)
        np.minimum.at(lowest, self.index, values)
        np.maximum.at(highest, self.index, values)
        return np.asarray((lowest == highest)[self.index], dtype=np.bool_)


class ChosenTokens:
    """Tokens that the policy chose (response_mask 1), as arrays of [chosen].

    Tokens of tools and environments are no steps: the step after a token is the next chosen token.
    """

    def __init__(self, response_mask: Jagged) -> None:
        self._responses = response_mask
        self.positions = np.flatnonzero(response_mask.values)  # among the response tokens
        # Row i is [offsets[i]:offsets[i + 1]].
        offsets = np.searchsorted(self.positions, response_mask.offsets)
        self.offsets = offsets.astype(np.int64)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of chosen tokens of each sample: [samples]."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Row of the batch of each token: [chosen]."""
        return np.repeat(np.arange(len(self._responses)), self.counts)

    @property
    def last(self) -> npt.NDArray[np.int64]:
        """Indices in [chosen] of the last token of each response that has any."""
        return self.offsets[1:][self.counts > 0] - 1

    def select(self, column: Jagged) -> Floats:
        """Take the chosen tokens of a column: [response tokens] to [chosen]."""
        return column.values[self.positions].astype(np.float64)

    def scatter(self, values: Floats) -> Jagged:
        """Put values at the chosen tokens and 0 elsewhere: [chosen] to [response tokens]."""
        tokens = np.zeros(len(self._responses.values))
        tokens[self.positions] = values
        return self._responses.with_values(tokens)


def whiten(values: Floats) -> Floats:
    """Subtract the mean and divide by the square root of the sample variance + 1e-8."""
    centered = values - values.sum() / max(len(values), 1)
    variance = (centered**2).sum() / max(len(values) - 1, 1)
    return np.asarray(centered / np.sqrt(variance + 1e-8))


def sum_to_go(values: Floats, offsets: npt.NDArray[np.int64], discount: float = 1.0) -> Floats:
    """Sum each value and those after it in its row, discounted by `discount` per step.

    Row i is values[offsets[i]:offsets[i + 1]]. Each step is vectorised over all rows.
    """
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")
    starts, shorter = offsets[:-1][order], -lengths[order]  # longest rows first
    sums = values.copy()
    for step in range(lengths.max(initial=0) - 2, -1, -1):
        num_rows = np.searchsorted(shorter, -step - 1)  # rows with a value after this step
        indices = starts[:num_rows] + step
        sums[indices] += discount * sums[indices + 1]
    return sums
