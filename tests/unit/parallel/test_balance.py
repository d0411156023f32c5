"""Work is dealt evenly, all of it, and within a budget where one is given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.parallel.balance import balanced_partition, num_parts_within

COSTS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


@given(COSTS, st.integers(1, 8))
def test_every_index_is_in_one_part_and_no_part_outweighs_another_by_more_than_one_item(
    costs, num_parts
):
    parts = balanced_partition(costs, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs)


@given(COSTS, st.integers(1, 200))
def test_parts_fit_the_budget_unless_one_item_alone_does_not(costs, budget):
    num_parts = num_parts_within(costs, budget)
    loads = [sum(costs[i] for i in p) for p in balanced_partition(costs, num_parts)]
    assert max(loads) <= max(budget, max(costs))


def test_equal_rows_are_dealt_in_equal_numbers():
    assert [len(part) for part in balanced_partition([3] * 6, 3)] == [2, 2, 2]


def test_one_item_above_the_budget_does_not_scatter_the_others():
    assert num_parts_within([100, 1, 1, 1, 1], 10) == 2


def test_no_work_is_one_empty_part():
    assert num_parts_within([], 10) == 1
