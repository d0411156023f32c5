"""Splitting work of known cost evenly."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_partition(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of `costs` in parts of nearly equal cost, each part in ascending order.

    Longest-processing-time first (Graham 1969): at most 4/3 of the best possible maximum. Parts may
    be empty when there are fewer costs than parts. Of equal loads the part with the fewest items is
    filled first.

    >>> balanced_partition([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    heap = [(0, 0, part) for part in range(num_parts)]  # cost, items, part
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost, items, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (cost + costs[index], items + 1, part))
    return [sorted(part) for part in parts]


def num_parts_within(costs: Sequence[int], budget: int) -> int:
    """The fewest parts for which `balanced_partition` keeps every part within the budget.

    An item above the budget gets a part that no larger item needs: the budget is then its cost.
    """
    if not costs:
        return 1
    budget = max(budget, *costs)
    parts = max(1, -(-sum(costs) // budget))
    while parts < len(costs):
        loads = (sum(costs[i] for i in part) for part in balanced_partition(costs, parts))
        if max(loads) <= budget:
            break
        parts += 1
    return parts
