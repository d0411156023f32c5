"""Metrics of parts (micro-batches, ranks, servers) into metrics of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Report = Callable[[int, dict[str, float]], None]  # takes a step, counted from 1, and its metrics


def of_sets(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics eval/SET/NAME, from those of held-out sets by name."""
    return {
        f"eval/{name}/{metric}": value
        for name, metrics in found.items()
        for metric, value in metrics.items()
    }


def merge(
    parts: Sequence[Mapping[str, float]], weights: Sequence[float] | None = None
) -> dict[str, float]:
    """One dict from the dicts of all parts; the last path component of a metric's name says how.

    `max_...` or `..._max` takes the highest and `min_...` or `..._min` the lowest; `num_...` (a
    count) and `..._sum` add up; all else is the mean weighted by `weights` (say, tokens of each
    part; equal by default), over the parts that have it. Where those weights are all 0, it is left
    out.

    >>> merge([{"loss": 1.0, "num_tokens": 3}, {"loss": 3.0, "num_tokens": 1}], weights=[3, 1])
    {'loss': 1.5, 'num_tokens': 4}
    """
    weights = [1.0] * len(parts) if weights is None else weights
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [(part[name], w) for part, w in zip(parts, weights, strict=True) if name in part]
        values = [value for value, _ in found]
        total = sum(weight for _, weight in found)
        leaf = name.rpartition("/")[2]
        if leaf.startswith("max_") or leaf.endswith("_max"):
            merged[name] = max(values)
        elif leaf.startswith("min_") or leaf.endswith("_min"):
            merged[name] = min(values)
        elif leaf.startswith("num_") or leaf.endswith("_sum"):
            merged[name] = sum(values)
        elif total > 0:
            merged[name] = sum(value * weight for value, weight in found) / total
    return merged
