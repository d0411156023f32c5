"""Every advantage against its paper, worked out in plain loops, on 1,000 random ragged cases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mcore_rl.algorithms import group_advantages, reductions, token_level_advantages
from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.inputs import AdvantageInputs, Estimates
from mcore_rl.data.batch import Batch, Jagged
from tests.unit.algorithms import advantage_oracles as oracles

CHECKED = [
    pytest.param(*pair, id=f"{pair[0].__name__}-{n}") for n, pair in enumerate(oracles.CHECKED)
]
Oracle = Callable[..., Any]


def found_for(name: str, batch: Batch, settings: oracles.Settings) -> Any:
    return ADVANTAGES.bound(name, settings)(AdvantageInputs(batch))


def numbers(found: Any) -> np.ndarray:
    """All numbers that a function or an oracle gave, in order."""
    if isinstance(found, Estimates):
        return np.concatenate([numbers(found.advantages), numbers(found.returns)])
    if isinstance(found, Jagged):
        return found.values
    if isinstance(found, np.ndarray):
        return found
    if isinstance(found, tuple):
        return np.concatenate([numbers(part) for part in found])
    if found and isinstance(found[0], list):
        return np.array([number for row in found for number in row], np.float64)
    return np.array(found, np.float64)


def assert_equals_oracle(oracle: Oracle, settings: oracles.Settings) -> None:
    for case, batch in oracles.random_cases(nonnegative=oracle is oracles.maxrl):
        found = numbers(found_for(oracle.__name__, batch, settings))
        np.testing.assert_allclose(found, numbers(oracle(case, settings)), 1e-6, 1e-7)


def test_every_advantage_has_an_oracle():
    assert {oracle.__name__ for oracle, _ in oracles.CHECKED} == set(ADVANTAGES.names)


@pytest.mark.parametrize(("oracle", "settings"), CHECKED)
def test_it_equals_the_oracle(oracle, settings):
    assert_equals_oracle(oracle, settings)


@functools.cache
def permuted_cases(*, nonnegative: bool) -> list[tuple[Batch, list[int], Batch]]:
    """A batch, an order, and the batch in that order with other ids of its groups."""
    found, rng = [], np.random.default_rng(0)
    for _, batch in oracles.random_cases(nonnegative=nonnegative)[:100]:
        order = rng.permutation(len(batch)).tolist()
        taken = batch.take(order)
        names, index = np.unique(taken.array("group_ids"), return_inverse=True)
        others = rng.permutation(10**6)[: len(names)] - 500_000
        found.append((batch, order, taken.with_columns(group_ids=others[index])))
    return found


def rows_of(found: Any) -> list[list[float]]:
    """All numbers of each sample."""
    if isinstance(found, Estimates):
        pairs = zip(rows_of(found.advantages), rows_of(found.returns), strict=True)
        return [[*advantages, *returns] for advantages, returns in pairs]
    return [np.atleast_1d(row).tolist() for row in found]


@pytest.mark.parametrize(("oracle", "settings"), CHECKED)
def test_the_order_of_samples_and_the_names_of_groups_change_nothing(oracle, settings):
    for batch, order, permuted in permuted_cases(nonnegative=oracle is oracles.maxrl):
        found = rows_of(found_for(oracle.__name__, permuted, settings))
        in_order = rows_of(found_for(oracle.__name__, batch, settings))
        wanted = [number for place in order for number in in_order[place]]
        np.testing.assert_allclose([n for row in found for n in row], wanted, 1e-6, 1e-6)


def by_position(self: reductions.Groups, ids: np.ndarray) -> None:
    """Takes pairs of neighbours for groups."""
    self.index = np.arange(len(ids)) // 2
    self.sizes = np.bincount(self.index)[self.index].astype(np.float64)


def population_std(self: reductions.Groups, values: np.ndarray) -> np.ndarray:
    return np.sqrt(self.mean(self.centered(values) ** 2))


def of_the_whole_batch(self: reductions.Groups, values: np.ndarray) -> np.ndarray:
    return np.full(len(values), values.mean())


def without_bessel(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / np.sqrt(values.var() + 1e-8) if len(values) else values


def not_centered(values: np.ndarray) -> np.ndarray:
    return values / np.sqrt(values.var(ddof=1) + 1e-8) if len(values) > 1 else values * 0


def not_discounted(values: np.ndarray, offsets: np.ndarray, discount: float = 1) -> np.ndarray:
    return reductions.sums_to_go(values, offsets)


def through_responses(values: np.ndarray, offsets: np.ndarray, discount: float = 1) -> np.ndarray:
    return reductions.sums_to_go(values, np.array([0, len(values)]), discount)


ALL_RIGHT = reductions.ChosenTokens.__init__


def mask_ignored(self: reductions.ChosenTokens, mask: Jagged) -> None:
    ALL_RIGHT(self, mask.with_values(np.ones(len(mask.values))))


CLASSES = {"Groups": reductions.Groups, "ChosenTokens": reductions.ChosenTokens}
FAULTS = [
    ("Groups.__init__", by_position, {"grpo", "gdpo", "gpg", "opo", "rloo", "maxrl", "grpo_passk",
     "lite_ppo", "gigpo", "optimal_token_baseline", "reinforce_plus_plus_baseline"}),
    ("Groups.std", population_std, {"grpo", "gdpo", "gpg", "grpo_passk", "lite_ppo", "gigpo"}),
    ("Groups.mean", of_the_whole_batch, {"grpo", "gdpo", "gpg", "rloo", "maxrl", "lite_ppo",
     "gigpo", "reinforce_plus_plus_baseline"}),
    ("ChosenTokens.__init__", mask_ignored, {"gae", "gdpo", "gigpo", "opo", "remax",
     "optimal_token_baseline", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}),
    ("whitened", without_bessel, {"gae", "gdpo", "reinforce_plus_plus",
     "reinforce_plus_plus_baseline"}),
    ("whitened", not_centered, {"gae", "gdpo", "reinforce_plus_plus"}),
    ("sums_to_go", not_discounted, {"gae", "gigpo", "reinforce_plus_plus"}),
    ("sums_to_go", through_responses, {"gae", "gigpo", "reinforce_plus_plus", "remax",
     "optimal_token_baseline"}),
]  # fmt: skip
PLANTED = [
    pytest.param(where, fault, name, id=f"{fault.__name__}-{name}")
    for where, fault, names in FAULTS
    for name in sorted(names)
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("where", "fault", "name"), PLANTED)
def test_a_planted_fault_is_found(monkeypatch, where, fault, name):
    kind, _, attribute = where.partition(".")
    if attribute:
        monkeypatch.setattr(CLASSES[kind], attribute, fault)
    else:
        for module in (group_advantages, token_level_advantages):
            monkeypatch.setattr(module, where, fault, raising=False)
    checked = [pair for pair in oracles.CHECKED if pair[0].__name__ == name]
    with pytest.raises(AssertionError):
        for oracle, settings in checked:
            assert_equals_oracle(oracle, settings)
