"""pass@k, majority@k and standard errors, against all subsets of the responses."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from mcore_rl.algorithms.estimates import (
    compute_mean_and_error,
    majority_at_k,
    pass_at_k,
)
from mcore_rl.config.allowed import MAX_N


def cases(num_cases: int):
    """Yield answers of up to 8 responses, and whether each is correct."""
    rng = random.Random(0)
    for _ in range(num_cases):
        n = rng.randint(1, 8)
        answers = [rng.choice([None, "a", "b", "c", "d"][: rng.randint(1, 5)]) for _ in range(n)]
        yield answers, [rng.random() < 0.4 for _ in range(n)]


def average_over_subsets(value, *columns, k: int) -> float:
    """Average value(*columns, subset) over all subsets of k of the responses."""
    subsets = list(itertools.combinations(range(len(columns[0])), k))
    return float(sum(Fraction(value(*columns, subset)) for subset in subsets) / len(subsets))


def any_of(correct, subset) -> bool:
    return any(correct[i] for i in subset)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response():
    for _, correct in cases(300):
        n = len(correct)
        for k in range(1, n + 1):
            result = pass_at_k(n, sum(correct), k)
            assert result == pytest.approx(average_over_subsets(any_of, correct, k=k))


def test_pass_at_k_by_hand():
    # Of 4 responses one is correct: 3 of the 6 pairs have it.
    assert [pass_at_k(4, 1, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)


def majority_of(answers, correct, subset) -> Fraction:
    """Compute the majority of one subset from the definition."""
    votes: dict[str, int] = {}
    for i in subset:
        if answers[i] is not None:
            votes[answers[i]] = votes.get(answers[i], 0) + 1
    winners = [answer for answer in votes if votes[answer] == max(votes.values())]
    shares = Fraction(0)
    for winner in winners:
        given = [correct[i] for i in range(len(answers)) if answers[i] == winner]
        shares += Fraction(sum(given), len(given)) / len(winners)
    return shares


def test_majority_at_k_is_the_mean_over_all_subsets():
    for answers, correct in cases(1000):
        ks = range(1, len(answers) + 1)
        expected = [average_over_subsets(majority_of, answers, correct, k=k) for k in ks]
        assert majority_at_k(answers, correct, ks) == pytest.approx(expected, abs=1e-12)


def test_majority_at_k_by_hand():
    answers, correct = ["4", "4", "5", None], [True, True, False, False]
    # Of one: 2 of 4. Of pairs: 44, 4-, 4- win, two ties of 4 and 5 are worth a half each, 5- loses.
    result = majority_at_k(answers, correct, [1, 2, 4])
    assert result == pytest.approx([1 / 2, (3 + 2 / 2) / 6, 1.0])
    assert majority_at_k([None, None], [True, False], [1, 2]) == [0.0, 0.0]


def test_majority_at_k_holds_for_as_many_responses_as_are_allowed():
    half = MAX_N // 2
    answers = ["a"] * half + ["b"] * half
    result = majority_at_k(answers, [True] * half + [False] * half, [1, half, MAX_N])
    assert result == pytest.approx([0.5, 0.5, 0.5])
    sure = majority_at_k(["a"] * MAX_N, [True] * MAX_N, [1, half])
    assert sure == pytest.approx([1.0, 1.0])


def test_the_standard_error_is_that_of_a_mean():
    values = [0.0, 1.0, 0.5, 0.25]
    mean = sum(values) / 4
    variance = sum((value - mean) ** 2 for value in values) / 3
    assert compute_mean_and_error(values) == pytest.approx((mean, math.sqrt(variance / 4)))
    assert compute_mean_and_error([0.5]) == (0.5, None)


def test_the_standard_error_is_the_spread_of_the_mean_over_many_draws():
    rng = np.random.default_rng(0)
    draws = rng.binomial(8, rng.beta(1, 2, (2000, 50))) / 8  # 50 prompts, 8 responses each
    errors = [compute_mean_and_error(row)[1] for row in draws]
    assert np.mean(errors) == pytest.approx(draws.mean(1).std(ddof=1), rel=0.05)
