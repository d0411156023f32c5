"""Work is dealt evenly, all of it, and within a budget where one is given."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.parallel.balance import (
    SequenceCost,
    count_parts_within,
    estimate_sequence_cost,
    partition_evenly,
    partition_within,
)
from tests.operations import growth

COSTS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def loads_of(parts, loads):
    return [sum(loads[index] for index in part) for part in parts]


@given(COSTS, st.integers(1, 8))
def test_every_index_is_in_one_part_and_no_part_outweighs_another_by_more_than_one_item(
    costs, num_parts
):
    parts = partition_evenly(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    loads = loads_of(parts, costs)
    assert max(loads) - min(loads) <= max(costs)
    assert parts == partition_evenly(list(costs), num_parts)


def test_differencing_reaches_the_splits_of_the_literature():
    """Korf 2009, section 2.1: 16 and 14 where longest-first takes 17 and 13."""
    assert loads_of(partition_evenly([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4]) == [14, 16]


@pytest.mark.parametrize("num_parts", [2, 3, 8])
def test_many_items_leave_next_to_no_difference(num_parts):
    """Longest-first leaves about one of the smallest items; differencing far less."""
    rng = random.Random(num_parts)
    costs = [rng.uniform(500, 1000) for _ in range(50 * num_parts)]
    loads = loads_of(partition_evenly(costs, num_parts), costs)
    assert max(loads) - min(loads) < 1


def test_ten_thousand_items_are_dealt_within_a_second():
    rng = random.Random(0)
    costs = [rng.lognormvariate(6, 1) for _ in range(10_000)]
    start = time.process_time()
    loads = loads_of(partition_evenly(costs, 64), costs)
    assert time.process_time() - start < 1.0
    assert max(loads) / min(loads) < 1.000001


def equal_costs(num: int) -> list[float]:
    return [1.0] * num


def random_costs(num: int) -> list[float]:
    rng = random.Random(0)
    return [rng.lognormvariate(6, 1) for _ in range(num)]


def rising_costs(num: int) -> list[float]:
    return [float(index) for index in range(num)]


def costs_with_a_giant(num: int) -> list[float]:
    """Return costs with one item whose split is merged with every other item."""
    return [1e9, *random_costs(num - 1)]


@pytest.mark.parametrize("costs_of", [equal_costs, random_costs, rising_costs, costs_with_a_giant])
def test_a_split_takes_almost_linear_work_in_the_parts(costs_of):
    """Compare costs in Python, where the work is counted."""

    class Cost(float):
        def __lt__(self, other: float) -> bool:
            return float(self) < float(other)

        def __neg__(self) -> Cost:
            return Cost(-float(self))

        def __add__(self, other: float) -> Cost:
            return Cost(float(self) + float(other))

    def split(num_parts: int) -> None:
        partition_evenly([Cost(cost) for cost in costs_of(4 * num_parts)], num_parts)

    assert growth(split, 32, 512) < 3


def test_equal_rows_are_dealt_in_equal_numbers():
    assert [len(part) for part in partition_evenly([3] * 6, 3)] == [2, 2, 2]
    assert sorted(len(part) for part in partition_evenly([1] * 100, 7)) == [14] * 5 + [15] * 2


def test_fewer_items_than_parts_leave_empty_parts():
    assert partition_evenly([4, 9], 4) == [[0], [1], [], []]
    assert partition_evenly([], 2) == [[], []]


@given(COSTS, st.integers(1, 200), st.integers(0, 3))
def test_parts_fit_the_budget_and_only_what_is_above_it_is_alone(loads, budget, extra):
    num_parts = count_parts_within(loads, budget) + extra
    costs = [load**2 for load in loads]
    parts = partition_within(loads, costs, budget, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(loads)))
    assert all(len(p) == 1 for p in parts if sum(loads[i] for i in p) > budget)


@given(COSTS, st.integers(1, 200))
def test_no_more_than_one_part_is_half_empty(loads, budget):
    """Merge any two half-empty parts: so there are fewer than twice the minimum, plus one."""
    within = sum(load for load in loads if load <= budget)
    above = sum(load > budget for load in loads)
    assert count_parts_within(loads, budget) - above < 2 * within / budget + 1 or not within


def test_one_item_above_the_budget_does_not_scatter_the_others():
    loads = [100, 5, 1, 4, 1, 90, 9]
    assert count_parts_within(loads, 10) == 4
    assert partition_within(loads, loads, 10, 4) == [[0], [1, 3, 4], [2, 6], [5]]


def test_cost_is_balanced_where_the_budget_leaves_room_and_tokens_where_it_does_not():
    loads, costs = [8, 4, 4, 4, 4], [64, 16, 16, 16, 16]
    assert partition_within(loads, costs, 100, 2) == [[0], [1, 2, 3, 4]]
    assert loads_of(partition_within(loads, costs, 12, 2), loads) == [12, 12]


def test_a_tight_budget_that_no_even_split_fits_takes_the_best_fit():
    loads = [6, 6, 5, 5, 4, 4]  # differencing gives 11, 10 and 9
    assert count_parts_within(loads, 10) == 3
    assert loads_of(partition_within(loads, loads, 10, 3), loads) == [10, 10, 10]


def test_too_few_parts_for_the_budget_are_an_error():
    with pytest.raises(ValueError, match="loads need 3 parts within 10, not 2"):
        partition_within([6, 6, 6], [6, 6, 6], 10, 2)


def test_no_work_is_one_empty_part():
    assert count_parts_within([], 10) == 1
    assert partition_within([], [], 10, 2) == [[], []]


def test_a_sequence_costs_its_tokens_and_half_of_its_pairs():
    assert SequenceCost(per_token=3.0, per_token_pair=2.0).estimate(10) == 3 * 10 + 2 * 100 / 2


def test_the_cost_of_a_model_is_its_matrix_multiplications():
    """Count by hand for two layers: 4 heads and 2 groups of 8, MLP of 20, 50 ids."""
    cost = estimate_sequence_cost(
        num_layers=2, hidden_size=16, attention_size=32, key_value_size=16, ffn_size=20,
        vocab_size=50,
    )  # fmt: skip
    queries, outputs, keys, values = 16 * 32, 32 * 16, 16 * 16, 16 * 16
    assert cost.per_token == 2 * (queries + outputs + keys + values + 3 * 16 * 20) + 16 * 50
    assert cost.per_token_pair == 2 * (32 + 32)  # scores, and sums of values
