"""Sums that advantages are made of: over groups of samples, and along the tokens of a response.

All in float64: the rounding of float32 means would be blown up by the division by a standard
deviation of almost 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mcore_rl.data.batch import Jagged

Floats = npt.NDArray[np.float64]
EPSILON = 1e-6  # keeps a group of equal rewards from dividing by zero


def totals(index: npt.NDArray[np.integer], values: Floats, num: int = 0) -> Floats:
    """[at least num]: the sum of the values of each index."""
    return np.asarray(np.bincount(index, weights=values, minlength=num), dtype=np.float64)


class Groups:
    """Numbers with the same id are a group, wherever they are and however many they are.

    Every result is [numbers]: at each number that of its group.
    """

    def __init__(self, ids: npt.NDArray[np.integer]) -> None:
        """`ids`: [numbers], or [numbers, parts] where all parts together are the id."""
        _, index, counts = np.unique(ids, return_inverse=True, return_counts=True, axis=0)
        self.index: npt.NDArray[np.int64] = index.reshape(-1)  # from 0 to the number of groups - 1
        self.sizes: Floats = counts[self.index].astype(np.float64)

    def sum(self, values: Floats) -> Floats:
        return totals(self.index, values)[self.index]

    def mean(self, values: Floats) -> Floats:
        return self.sum(values) / self.sizes

    def centered(self, values: Floats) -> Floats:
        """Less the mean. A group of one has nothing to be compared with: 0."""
        return values - self.mean(values)

    def std(self, values: Floats) -> Floats:
        """The sample standard deviation (n - 1); 0 in a group of one."""
        variance = self.sum(self.centered(values) ** 2) / np.maximum(self.sizes - 1, 1)
        return np.asarray(np.sqrt(variance))

    def normalized(self, values: Floats, *, by_std: bool) -> Floats:
        """Less the mean, and if `by_std` divided by the standard deviation + 1e-6."""
        centered = self.centered(values)
        return centered / (self.std(values) + EPSILON) if by_std else centered


class ChosenTokens:
    """The tokens that the policy chose (response_mask 1), as arrays of [chosen].

    Tokens of tools and environments are no steps: the next step of a token is the next chosen one.
    """

    def __init__(self, response_mask: Jagged) -> None:
        self._responses = response_mask
        self.at = np.flatnonzero(response_mask.values)  # where they are among the response tokens
        before = np.searchsorted(self.at, response_mask.offsets)  # chosen ones before each response
        self.offsets = before.astype(np.int64)  # row i is [offsets[i]:offsets[i + 1]]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[samples]"""
        return np.diff(self.offsets)

    @property
    def sample(self) -> npt.NDArray[np.int64]:
        """[chosen]: the row of the batch of each."""
        return np.repeat(np.arange(len(self._responses)), self.counts)

    @property
    def last(self) -> npt.NDArray[np.int64]:
        """Which of [chosen] are the last of their response."""
        return self.offsets[1:][self.counts > 0] - 1

    def of(self, column: Jagged) -> Floats:
        """The values of a column of [response tokens] at the chosen ones."""
        return column.values[self.at].astype(np.float64)

    def spread(self, values: Floats) -> Jagged:
        """[chosen] to [response tokens]: 0 at the others."""
        tokens = np.zeros(len(self._responses.values))
        tokens[self.at] = values
        return self._responses.with_values(tokens)


def whitened(values: Floats) -> Floats:
    """Less the mean, divided by the square root of the sample variance + 1e-8."""
    centered = values - values.sum() / max(len(values), 1)
    variance = (centered**2).sum() / max(len(values) - 1, 1)
    return np.asarray(centered / np.sqrt(variance + 1e-8))


def sums_to_go(values: Floats, offsets: npt.NDArray[np.int64], discount: float = 1.0) -> Floats:
    """At each value the sum of it and of those after it in its row, each step by `discount`.

    Row i is values[offsets[i]:offsets[i + 1]]. All rows take a step at once.
    """
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")
    starts, shorter = offsets[:-1][order], -lengths[order]  # longest rows first
    sums = values.copy()
    for step in range(lengths.max(initial=0) - 2, -1, -1):
        rows = np.searchsorted(shorter, -step - 1)  # how many have a value after this step
        at = starts[:rows] + step
        sums[at] += discount * sums[at + 1]
    return sums
