"""What n sampled responses to a prompt say of k of them: pass@k and majority@k; standard errors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

MAX_SAMPLES = 1000  # of a prompt: numbers of subsets of more are beyond float64

Floats = npt.NDArray[np.float64]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of k responses is correct, from n of which c are.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of arXiv:2107.03374, equation 1: the share of
    the subsets of k of the n responses with a correct one.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    wrong = num_samples - num_correct
    return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def majority_at_k(
    answers: Sequence[Hashable], correct: Sequence[bool], ks: Sequence[int]
) -> list[float]:
    """For each k the probability that the most frequent answer of k responses is correct.

    The mean over all subsets of k of the n responses, computed exactly (majority voting, or
    self-consistency: arXiv:2203.11171). Answers that are as frequent share the vote evenly. A
    response whose answer is None has no vote; without any vote the outcome is wrong. An answer
    that is correct in some responses only counts with the share of those.

    `correct` has an entry for each of `answers`; each k is 1 to n, and n up to MAX_SAMPLES.

    >>> majority_at_k(["4", "4", "5", None], [True, True, False, False], [1, 3])
    [0.5, 0.75]
    """
    votes = Counter(answer for answer in answers if answer is not None)
    num_correct: dict[Hashable, int] = defaultdict(int)
    for answer, is_correct in zip(answers, correct, strict=True):
        num_correct[answer] += bool(is_correct)
    counts = tuple(sorted(votes.values()))
    wins = _wins(counts, len(answers) - sum(counts))
    return [
        float(sum(wins[n][k] * num_correct[answer] / n for answer, n in votes.items())) for k in ks
    ]


@lru_cache(maxsize=1024)
def _wins(counts: tuple[int, ...], num_silent: int) -> dict[int, Floats]:
    """By the count of an answer, for each k from 0 to n: the share of the vote that it wins.

    The answer is drawn x times, `tied` others as often, and all others less. tables[drawn, tied]
    is the number of ways to that for the other answers.
    """
    total = sum(counts) + num_silent
    subsets = np.array([float(math.comb(total, k)) for k in range(total + 1)])
    found = {}
    for mine in set(counts):
        others = list(counts)
        others.remove(mine)
        shares = np.zeros(total + 1)
        for x in range(1, mine + 1):
            ways = _ways(tuple(others), x, total)
            ways = _times(ways, [math.comb(num_silent, y) for y in range(num_silent + 1)])
            shared = ways @ (1.0 / np.arange(1, ways.shape[1] + 1))
            shares[x:] += math.comb(mine, x) * shared[: total + 1 - x]
        found[mine] = shares / subsets
    return found


def _ways(others: tuple[int, ...], x: int, total: int) -> Floats:
    """How the others are drawn up to x times each: [number drawn, answers drawn x times]."""
    most_tied = min(sum(count >= x for count in others), total // x)
    table = np.zeros((total + 1, most_tied + 1))
    table[0, 0] = 1.0
    for count in others:
        less = _times(table, [math.comb(count, y) for y in range(min(count, x - 1) + 1)])
        if count >= x:
            less[x:, 1:] += math.comb(count, x) * table[:-x, :-1]
        table = less
    return table


def _times(table: Floats, ways: Sequence[int]) -> Floats:
    """The table after y more are drawn in ways[y] ways."""
    found = np.zeros_like(table)
    for y, factor in enumerate(ways):
        found[y:] += float(factor) * table[: len(table) - y]
    return found


def mean_and_error(values: npt.ArrayLike) -> tuple[float, float | None]:
    """The mean, and its standard error; None for one value.

    One value a prompt: responses to one prompt are not independent, prompts are.
    """
    found = np.asarray(values, np.float64)
    if len(found) < 2:
        return float(found.mean()), None
    return float(found.mean()), float(found.std(ddof=1) / math.sqrt(len(found)))


def ratio_error(sums: npt.ArrayLike, counts: npt.ArrayLike) -> float:
    """The standard error of sum(sums) / sum(counts) over rows; 0 for a single row.

    sqrt(J / (J - 1) * sum_j (s_j - mean * c_j)^2) / sum_j c_j for J rows: that of a mean over all
    tokens, where those of a row hang together. With counts of 1 it is std / sqrt(J).

    >>> round(ratio_error([1.0, 2.0, 3.0], [1, 1, 1]), 4)
    0.5774
    """
    total, num = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if len(total) < 2:
        return 0.0
    deviations = total - total.sum() / num.sum() * num
    factor = len(total) / (len(total) - 1)
    return math.sqrt(factor * float((deviations**2).sum())) / float(num.sum())
