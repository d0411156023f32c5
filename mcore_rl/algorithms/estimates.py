"""Estimates from n sampled responses per prompt: pass@k, majority@k, standard errors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate the probability that any of k responses is correct.

    1 - C(n - c, k) / C(n, k) for c correct ones of n samples, the unbiased estimator of
    arXiv:2107.03374, equation 1: the share of subsets of k responses with a correct one.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    wrong = num_samples - num_correct
    return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def majority_at_k(
    answers: Sequence[Hashable], correct: Sequence[bool], ks: Sequence[int]
) -> list[float]:
    """Estimate for each k the probability that the most frequent answer of k responses is correct.

    The exact mean over all subsets of k of the n responses (majority voting, or self-consistency:
    arXiv:2203.11171). Ties share the vote evenly. A response whose answer is None has no vote;
    without any vote the outcome is wrong. An answer that is correct in some responses only counts
    with the share of these.

    Args:
        answers: Answer of each response, of up to MAX_N (config/rules_train.py).
        correct: Whether each is correct.
        ks: Numbers from 1 to n.

    >>> majority_at_k(["4", "4", "5", None], [True, True, False, False], [1, 3])
    [0.5, 0.75]
    """
    votes = Counter(answer for answer in answers if answer is not None)
    num_correct: dict[Hashable, int] = defaultdict(int)
    for answer, is_correct in zip(answers, correct, strict=True):
        num_correct[answer] += bool(is_correct)
    counts = tuple(sorted(votes.values()))
    shares = _compute_vote_shares(counts, len(answers) - sum(counts))
    return [
        float(sum(shares[n][k] * num_correct[answer] / n for answer, n in votes.items()))
        for k in ks
    ]


@lru_cache(maxsize=1024)
def _compute_vote_shares(counts: tuple[int, ...], num_silent: int) -> dict[int, Floats]:
    """Compute the share of the vote that an answer wins, for each k from 0 to n, by its count.

    The answer is drawn x times, `tied` other answers as often, the rest less often. Row and column
    of a table are the number of responses drawn and `tied`; its values, numbers of ways.
    """
    total = sum(counts) + num_silent
    subsets = np.array([float(math.comb(total, k)) for k in range(total + 1)])
    vote_shares = {}
    for count in set(counts):
        other_counts = list(counts)
        other_counts.remove(count)
        shares = np.zeros(total + 1)
        for x in range(1, count + 1):
            ways = _count_draws(tuple(other_counts), x, total)
            ways = _convolve(ways, [math.comb(num_silent, y) for y in range(num_silent + 1)])
            shared = ways @ (1.0 / np.arange(1, ways.shape[1] + 1))
            shares[x:] += math.comb(count, x) * shared[: total + 1 - x]
        vote_shares[count] = shares / subsets
    return vote_shares


def _count_draws(counts: tuple[int, ...], x: int, total: int) -> Floats:
    """Count the ways to draw answers up to x times each: [number drawn, answers drawn x times]."""
    most_tied = min(sum(count >= x for count in counts), total // x)
    table = np.zeros((total + 1, most_tied + 1))
    table[0, 0] = 1.0
    for count in counts:
        extended = _convolve(table, [math.comb(count, y) for y in range(min(count, x - 1) + 1)])
        if count >= x:
            extended[x:, 1:] += math.comb(count, x) * table[:-x, :-1]
        table = extended
    return table


def _convolve(table: Floats, ways: Sequence[int]) -> Floats:
    """Extend a table by a draw of y more responses in ways[y] ways."""
    extended = np.zeros_like(table)
    for y, factor in enumerate(ways):
        extended[y:] += float(factor) * table[: len(table) - y]
    return extended


def compute_mean_and_error(values: npt.ArrayLike) -> tuple[float, float | None]:
    """Return the mean and its standard error, None for a single value.

    Values are per prompt: responses to one prompt are not independent, prompts are.
    """
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return float(array.mean()), None
    return float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array)))


def compute_ratio_error(sums: npt.ArrayLike, counts: npt.ArrayLike) -> float:
    """Return the standard error of sum(sums) / sum(counts) over rows; 0 for a single row.

    sqrt(J / (J - 1) * sum_j (s_j - mean * c_j)^2) / sum_j c_j for J rows: the error of a mean over
    tokens that are correlated within a row. With counts of 1 it is std / sqrt(J).

    >>> round(compute_ratio_error([1.0, 2.0, 3.0], [1, 1, 1]), 4)
    0.5774
    """
    total, num = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if len(total) < 2:
        return 0.0
    deviations = total - total.sum() / num.sum() * num
    factor = len(total) / (len(total) - 1)
    return math.sqrt(factor * float((deviations**2).sum())) / float(num.sum())
