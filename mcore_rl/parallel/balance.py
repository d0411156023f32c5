"""Load balancing of items with known cost, and the cost of a sequence."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

Parts = list[list[int]]  # indices of the items, each part in ascending order


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """What a sequence costs: what each token costs alone, and each pair of tokens in attention.

    Only the ratio of the two matters to a split.
    """

    per_token: float
    per_token_pair: float

    def of(self, length: int) -> float:
        """The cost of `length` tokens; a causal model looks at half of the pairs.

        >>> SequenceCost(per_token=1.0, per_token_pair=0.5).of(4)
        8.0
        """
        return self.per_token * length + self.per_token_pair * length**2 / 2


# Without knowledge of the model: a dense one of hidden size 4096, with 12 hidden^2 weights a layer
# and 2 hidden multiplications a layer for a pair of tokens.
DEFAULT_SEQUENCE_COST = SequenceCost(per_token=1.0, per_token_pair=2 / (12 * 4096))


def sequence_cost(
    *,
    num_layers: int,
    hidden_size: int,
    attention_size: float,
    key_value_size: float,
    ffn_size: float,
    vocab_size: int,
) -> SequenceCost:
    """Multiplications of a forward pass; a backward pass is twice that, in the same proportion.

    Args:
        attention_size: columns of all query heads, heads * head_dim.
        key_value_size: columns of all keys, and of all values.
        ffn_size: columns of the (gated) MLP that a token uses, on average over the layers: those of
            its top-k experts and of shared experts, where there are experts.
    """
    projections = 2 * hidden_size * (attention_size + key_value_size)
    layer = projections + 3 * hidden_size * ffn_size
    return SequenceCost(
        per_token=num_layers * layer + hidden_size * vocab_size,
        per_token_pair=num_layers * 2.0 * attention_size,
    )


def balanced_partition(costs: Sequence[float], num_parts: int) -> Parts:
    """Indices of `costs` in `num_parts` parts of nearly equal cost.

    The largest differencing method for several parts (Karmarkar and Karp 1982; Korf 2009, section
    2.1.3): two partial splits are joined, the heaviest part of one with the lightest of the other,
    and those whose parts differ most come first. Parts differ in cost by no more than the largest
    item, and of equal items they hold equal numbers, give or take one. Parts are in the order of
    their first index; the empty ones, of fewer items than parts, come last.

    >>> balanced_partition([8, 7, 6, 5, 4], 2)
    [[0, 2], [1, 3, 4]]
    >>> balanced_partition([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    if not costs:
        return [[] for _ in range(num_parts)]
    if num_parts == 1:
        return [list(range(len(costs)))]
    # (-difference, order of making, split): the order makes ties deterministic.
    splits = [(-cost, index, [(-cost, -1, [index])]) for index, cost in enumerate(costs)]
    heapq.heapify(splits)
    made = len(costs)
    while len(splits) > 1:
        first, second = heapq.heappop(splits)[2], heapq.heappop(splits)[2]
        joined = _join(first, second, num_parts)
        lightest = -joined[-1][0] if len(joined) == num_parts else 0
        heapq.heappush(splits, (lightest + joined[0][0], made, joined))
        made += 1
    parts = sorted(sorted(items) for *_, items in splits[0][2])
    return parts + [[] for _ in range(num_parts - len(parts))]


# The parts of a split that are not empty, by falling cost: minus their cost, minus the number of
# their items, and these. Of equally heavy parts, the one with more items counts as heavier.
_Split = list[tuple[float, int, list[int]]]
_weight = itemgetter(0, 1)


def _join(first: _Split, second: _Split, num_parts: int) -> _Split:
    """Both as one, which is the larger of them: each part of the smaller is put in its place.

    So items are moved as often as the logarithm of the parts, whatever the number of parts is. Of
    equal parts, those of the first come first.
    """
    shared = max(0, len(first) + len(second) - num_parts)
    heavy, light = first[len(first) - shared :], second[len(second) - shared :]
    del first[len(first) - shared :], second[len(second) - shared :]
    if len(first) >= len(second):
        joined = first
        for part in second:
            joined.insert(bisect_right(joined, _weight(part), key=_weight), part)
    else:
        joined = second
        for part in reversed(first):
            joined.insert(bisect_left(joined, _weight(part), key=_weight), part)
    for (cost, num, items), (other_cost, other_num, other_items) in zip(
        heavy, reversed(light), strict=True
    ):
        small, large = sorted((items, other_items), key=len)
        large.extend(small)
        part = (cost + other_cost, num + other_num, large)
        joined.insert(bisect_right(joined, _weight(part), key=_weight), part)
    return joined


def num_parts_within(loads: Sequence[int], budget: int) -> int:
    """How many parts are needed for items of these loads within the budget; at least one.

    That of best-fit decreasing: at most 11/9 of the fewest possible, plus four (Johnson, Demers,
    Ullman, Garey and Graham 1974). An item above the budget has a separate part.
    """
    return max(1, len(_best_fit(loads, budget)))


def partition_within(
    loads: Sequence[int], costs: Sequence[float], budget: int, num_parts: int
) -> Parts:
    """Exactly `num_parts` parts, each within the budget of load, of nearly equal cost.

    An item above the budget is alone in its part. Where parts of equal cost do not fit, parts of
    equal load are taken, and where these do not fit either, those of `num_parts_within`.

    Raises:
        ValueError: `num_parts` is less than `num_parts_within` needs.
    """
    alone = [index for index, load in enumerate(loads) if load > budget]
    others = [index for index, load in enumerate(loads) if load <= budget]
    num_left = num_parts - len(alone)
    for weights in (costs, loads):
        if num_left < (1 if others else 0):
            break
        parts = balanced_partition([weights[index] for index in others], num_left)
        parts = [[others[place] for place in part] for part in parts]
        if all(sum(loads[index] for index in part) <= budget for part in parts):
            return _filled([[index] for index in alone] + parts, num_parts)
    parts = _best_fit(loads, budget)
    if len(parts) > num_parts:
        raise ValueError(f"loads need {len(parts)} parts within {budget}, not {num_parts}")
    return _filled(parts, num_parts)


def _best_fit(loads: Sequence[int], budget: int) -> Parts:
    """Best-fit decreasing: each item, the largest first, goes where the least space is left."""
    parts: Parts = []
    room: list[tuple[int, int]] = []  # of each part, ascending: (room, part)
    for index in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        place = bisect_left(room, (loads[index], -1))
        if place == len(room):
            parts.append([index])
            insort(room, (budget - loads[index], len(parts) - 1))
        else:
            left, part = room.pop(place)
            parts[part].append(index)
            insort(room, (left - loads[index], part))
    return parts


def _filled(parts: Parts, num_parts: int) -> Parts:
    """The parts in the order of their first index, then empty ones."""
    filled = sorted(sorted(part) for part in parts if part)
    return filled + [[] for _ in range(num_parts - len(filled))]
