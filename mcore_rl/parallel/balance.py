"""Load balancing of items with known cost, and the cost of a sequence."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

Parts = list[list[int]]  # item indices, ascending in each part


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Cost of a sequence: per token, and per pair of tokens in attention.

    Only the ratio of the two matters to a partition.
    """

    per_token: float
    per_token_pair: float

    def estimate(self, length: int) -> float:
        """Return the cost of `length` tokens; causal attention computes half of the pairs.

        >>> SequenceCost(per_token=1.0, per_token_pair=0.5).estimate(4)
        8.0
        """
        return self.per_token * length + self.per_token_pair * length**2 / 2


# For an unknown model: a dense one of hidden size 4096, with 12 * hidden^2 weights per layer and
# 2 * hidden multiplications per layer and pair of tokens.
DEFAULT_SEQUENCE_COST = SequenceCost(per_token=1.0, per_token_pair=2 / (12 * 4096))


def estimate_sequence_cost(
    *,
    num_layers: int,
    hidden_size: int,
    attention_size: float,
    key_value_size: float,
    ffn_size: float,
    vocab_size: int,
    attention_share: float = 1.0,
) -> SequenceCost:
    """Estimate the multiplications of a forward pass. A backward pass has twice as many.

    Args:
        attention_size: Query heads * head_dim.
        key_value_size: Key/value heads * head_dim.
        ffn_size: Intermediate size of the gated MLP per token, averaged over the layers; with
            experts, of the top k and the shared experts.
        attention_share: Share of the layers that compute pairs of tokens. The others, of linear
            attention, count with the same projections.
    """
    projections = 2 * hidden_size * (attention_size + key_value_size)
    layer = projections + 3 * hidden_size * ffn_size
    return SequenceCost(
        per_token=num_layers * layer + hidden_size * vocab_size,
        per_token_pair=num_layers * attention_share * 2.0 * attention_size,
    )


def partition_evenly(costs: Sequence[float], num_parts: int) -> Parts:
    """Partition items into `num_parts` parts of nearly equal cost.

    Largest differencing method for several parts (Karmarkar and Karp 1982; Korf 2009, section
    2.1.3): merge the two partial splits whose parts differ most, the heaviest part of one with the
    lightest of the other. Costs of parts differ by at most the largest item; numbers of equal items
    differ by at most one.

    Returns:
        Item indices per part, in the order of their first index; empty parts come last.

    >>> partition_evenly([8, 7, 6, 5, 4], 2)
    [[0, 2], [1, 3, 4]]
    >>> partition_evenly([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    if not costs:
        return [[] for _ in range(num_parts)]
    if num_parts == 1:
        return [list(range(len(costs)))]
    # A split of one item differs by its cost. One of fewer items than parts differs by its first
    # item, and so is merged with the next ones: they are put into a split together.
    single = sorted((-cost, index) for index, cost in enumerate(costs))
    # (-difference, order of creation, split): the order makes ties deterministic.
    splits: list[tuple[float, int, _Split]] = []
    start = num_created = 0
    while start < len(single) or len(splits) > 1:
        if start < len(single) and (not splits or single[start][0] <= splits[0][0]):
            items = single[start : start + num_parts]
            if splits:
                items = items[: bisect_right(items, splits[0][0], key=itemgetter(0))]
            merged = [(cost, -1, [index]) for cost, index in items]
            start += len(items)
        else:
            first = heapq.heappop(splits)[2]
            if start < len(single) and (not splits or single[start][0] <= splits[0][0]):
                cost, index = single[start]
                second, start = [(cost, -1, [index])], start + 1
            else:
                second = heapq.heappop(splits)[2]
            merged = _merge_splits(first, second, num_parts)
        lightest = -merged[-1][0] if len(merged) == num_parts else 0
        heapq.heappush(splits, (lightest + merged[0][0], num_created, merged))
        num_created += 1
    parts = sorted(sorted(items) for *_, items in splits[0][2])
    return parts + [[] for _ in range(num_parts - len(parts))]


# Non-empty parts of a split by descending cost: (-cost, -number of items, items). Of parts with
# equal cost, the one with more items counts as heavier.
_Split = list[tuple[float, int, list[int]]]
_weight = itemgetter(0, 1)


def _merge_splits(first: _Split, second: _Split, num_parts: int) -> _Split:
    """Merge the smaller split into the larger one and return that.

    So an item is moved log(parts) times. Of equal parts, those of `first` come first.
    """
    shared = max(0, len(first) + len(second) - num_parts)
    heavy, light = first[len(first) - shared :], second[len(second) - shared :]
    del first[len(first) - shared :], second[len(second) - shared :]
    if len(first) >= len(second):
        merged = first
        for part in second:
            merged.insert(bisect_right(merged, _weight(part), key=_weight), part)
    else:
        merged = second
        for part in reversed(first):
            merged.insert(bisect_left(merged, _weight(part), key=_weight), part)
    for (cost, num, items), (other_cost, other_num, other_items) in zip(
        heavy, reversed(light), strict=True
    ):
        small, large = sorted((items, other_items), key=len)
        large.extend(small)
        part = (cost + other_cost, num + other_num, large)
        merged.insert(bisect_right(merged, _weight(part), key=_weight), part)
    return merged


def count_parts_within(loads: Sequence[int], budget: int) -> int:
    """Return the number of parts that best-fit decreasing needs within the budget; at least one.

    It is at most 11/9 of the fewest possible, plus four (Johnson, Demers, Ullman, Garey and Graham
    1974). An item above the budget has a separate part.
    """
    return max(1, len(_pack_best_fit(loads, budget)))


def partition_within(
    loads: Sequence[int], costs: Sequence[float], budget: int, num_parts: int
) -> Parts:
    """Partition items into exactly `num_parts` parts within the load budget, of nearly equal cost.

    An item above the budget is alone in its part. If parts of equal cost do not fit, parts of equal
    load are used; if these do not fit either, those of best-fit decreasing.

    Raises:
        ValueError: `num_parts` is less than `count_parts_within` returns.
    """
    oversized = [index for index, load in enumerate(loads) if load > budget]
    fitting = [index for index, load in enumerate(loads) if load <= budget]
    num_remaining = num_parts - len(oversized)
    for weights in (costs, loads):
        if num_remaining < (1 if fitting else 0):
            break
        parts = partition_evenly([weights[index] for index in fitting], num_remaining)
        parts = [[fitting[index] for index in part] for part in parts]
        if all(sum(loads[index] for index in part) <= budget for part in parts):
            return _sort_parts([[index] for index in oversized] + parts, num_parts)
    parts = _pack_best_fit(loads, budget)
    if len(parts) > num_parts:
        raise ValueError(f"loads need {len(parts)} parts within {budget}, not {num_parts}")
    return _sort_parts(parts, num_parts)


def _pack_best_fit(loads: Sequence[int], budget: int) -> Parts:
    """Pack by best-fit decreasing: each item, largest first, goes where the least space is left."""
    parts: Parts = []
    free: list[tuple[int, int]] = []  # ascending (space left, part)
    for index in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        position = bisect_left(free, (loads[index], -1))
        if position == len(free):
            parts.append([index])
            insort(free, (budget - loads[index], len(parts) - 1))
        else:
            space, part = free.pop(position)
            parts[part].append(index)
            insort(free, (space - loads[index], part))
    return parts


def _sort_parts(parts: Parts, num_parts: int) -> Parts:
    """Sort parts by their first index and append empty ones up to `num_parts`."""
    non_empty = sorted(sorted(part) for part in parts if part)
    return non_empty + [[] for _ in range(num_parts - len(non_empty))]
