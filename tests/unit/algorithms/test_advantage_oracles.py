"""Every advantage against its paper, worked out in plain loops, on 1,000 random ragged cases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mcore_rl.algorithms import advantages, reductions
from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.inputs import AdvantageInputs, Estimates
from mcore_rl.data.batch import Batch, Jagged
from tests.nightly import nightly
from tests.unit.algorithms import advantage_oracles as oracles

CHECKED = [
    pytest.param(*pair, id=f"{pair[0].__name__}-{n}") for n, pair in enumerate(oracles.CHECKED)
]
PARTS = [slice(0, None, 5), nightly(slice(0, None))]  # of the random cases
Oracle = Callable[..., Any]


def compute(name: str, batch: Batch, settings: oracles.Settings) -> Any:
    return ADVANTAGES.bind(name, settings)(AdvantageInputs(batch))


def flatten(result: Any) -> np.ndarray:
    """Return all numbers of a result, in order."""
    if isinstance(result, Estimates):
        return np.concatenate([flatten(result.advantages), flatten(result.returns)])
    if isinstance(result, Jagged):
        return result.values
    if isinstance(result, np.ndarray):
        return result
    if isinstance(result, tuple):
        return np.concatenate([flatten(part) for part in result])
    if result and isinstance(result[0], list):
        return np.array([number for row in result for number in row], np.float64)
    return np.array(result, np.float64)


def assert_equals_oracle(oracle: Oracle, settings: oracles.Settings, part: slice) -> None:
    for case, batch in oracles.random_cases(nonnegative=oracle is oracles.maxrl)[part]:
        result = flatten(compute(oracle.__name__, batch, settings))
        np.testing.assert_allclose(result, flatten(oracle(case, settings)), 1e-6, 1e-7)


def test_every_advantage_has_an_oracle():
    assert {oracle.__name__ for oracle, _ in oracles.CHECKED} == set(ADVANTAGES.names)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize(("oracle", "settings"), CHECKED)
def test_it_equals_the_oracle(oracle, settings, part):
    assert_equals_oracle(oracle, settings, part)


@functools.cache
def permuted_cases(*, nonnegative: bool) -> list[tuple[Batch, list[int], Batch]]:
    """Return a batch, an order, and the batch in that order with other ids of its groups."""
    cases, rng = [], np.random.default_rng(0)
    for _, batch in oracles.random_cases(nonnegative=nonnegative)[:100]:
        order = rng.permutation(len(batch)).tolist()
        taken = batch.take(order)
        names, index = np.unique(taken.array("group_ids"), return_inverse=True)
        ids = rng.permutation(10**6)[: len(names)] - 500_000
        cases.append((batch, order, taken.with_columns(group_ids=ids[index])))
    return cases


def split_rows(result: Any) -> list[list[float]]:
    """Return the numbers of each sample."""
    if isinstance(result, Estimates):
        pairs = zip(split_rows(result.advantages), split_rows(result.returns), strict=True)
        return [[*advantages, *returns] for advantages, returns in pairs]
    return [np.atleast_1d(row).tolist() for row in result]


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize(("oracle", "settings"), CHECKED)
def test_the_order_of_samples_and_the_names_of_groups_change_nothing(oracle, settings, part):
    for batch, order, permuted in permuted_cases(nonnegative=oracle is oracles.maxrl)[part]:
        result = split_rows(compute(oracle.__name__, permuted, settings))
        in_order = split_rows(compute(oracle.__name__, batch, settings))
        expected = [number for place in order for number in in_order[place]]
        np.testing.assert_allclose([n for row in result for n in row], expected, 1e-6, 1e-6)


def group_by_position(self: reductions.Groups, ids: np.ndarray) -> None:
    """Group pairs of neighbours."""
    self.index = np.arange(len(ids)) // 2
    self.sizes = np.bincount(self.index)[self.index].astype(np.float64)


def population_std(self: reductions.Groups, values: np.ndarray) -> np.ndarray:
    return np.sqrt(self.mean(self.center(values) ** 2))


def batch_mean(self: reductions.Groups, values: np.ndarray) -> np.ndarray:
    return np.full(len(values), values.mean())


def whiten_without_bessel(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / np.sqrt(values.var() + 1e-8) if len(values) else values


def whiten_without_center(values: np.ndarray) -> np.ndarray:
    return values / np.sqrt(values.var(ddof=1) + 1e-8) if len(values) > 1 else values * 0


def sum_without_discount(
    values: np.ndarray, offsets: np.ndarray, discount: float = 1
) -> np.ndarray:
    return reductions.sum_to_go(values, offsets)


def sum_through_responses(
    values: np.ndarray, offsets: np.ndarray, discount: float = 1
) -> np.ndarray:
    return reductions.sum_to_go(values, np.array([0, len(values)]), discount)


CHOSEN_TOKENS_INIT = reductions.ChosenTokens.__init__


def ignore_mask(self: reductions.ChosenTokens, mask: Jagged) -> None:
    CHOSEN_TOKENS_INIT(self, mask.with_values(np.ones(len(mask.values))))


CLASSES = {"Groups": reductions.Groups, "ChosenTokens": reductions.ChosenTokens}
FAULTS = [
    ("Groups.__init__", group_by_position, {"grpo", "gdpo", "gpg", "opo", "rloo", "maxrl",
     "grpo_passk", "lite_ppo", "gigpo", "optimal_token_baseline", "reinforce_plus_plus_baseline"}),
    ("Groups.std", population_std, {"grpo", "gdpo", "gpg", "grpo_passk", "lite_ppo", "gigpo"}),
    ("Groups.mean", batch_mean, {"grpo", "gdpo", "gpg", "rloo", "maxrl", "lite_ppo",
     "gigpo", "reinforce_plus_plus_baseline"}),
    ("ChosenTokens.__init__", ignore_mask, {"gae", "gdpo", "gigpo", "opo", "remax",
     "optimal_token_baseline", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}),
    ("whiten", whiten_without_bessel, {"gae", "gdpo", "reinforce_plus_plus",
     "reinforce_plus_plus_baseline"}),
    ("whiten", whiten_without_center, {"gae", "gdpo", "reinforce_plus_plus"}),
    ("sum_to_go", sum_without_discount, {"gae", "gigpo", "reinforce_plus_plus"}),
    ("sum_to_go", sum_through_responses, {"gae", "gigpo", "reinforce_plus_plus", "remax",
     "optimal_token_baseline"}),
]  # fmt: skip
PLANTED = [
    pytest.param(where, fault, name, id=f"{fault.__name__}-{name}")
    for where, fault, names in FAULTS
    for name in sorted(names)
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("where", "fault", "name"), PLANTED)
def test_oracle_detects_a_planted_fault(monkeypatch, where, fault, name):
    kind, _, attribute = where.partition(".")
    monkeypatch.setattr(CLASSES[kind] if attribute else advantages, attribute or where, fault)
    checked = [pair for pair in oracles.CHECKED if pair[0].__name__ == name]
    with pytest.raises(AssertionError):
        for oracle, settings in checked:
            assert_equals_oracle(oracle, settings, slice(None))
