"""Compares a vLLM worker's parameters with the rules that plans are made from.

A plan trusts the rules for the names, shapes and dtypes that vLLM has. Each worker compares them as
it connects, so that a version with another layout of weights is refused by name. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.layout import GenerationRanks
from mcore_rl.reshard.rules import Shard, Weight

Parameters = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype by name


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """One vLLM worker's raw parameters."""

    parameters: Parameters
    experts: Mapping[str, tuple[int, ...]]  # by stacked parameter, the experts that are its rows


def check_layout(
    found: WorkerLayout, ranks: GenerationRanks, weights: Sequence[Weight], rank: int, dtype: str
) -> None:
    """Raise ConfigError for the first difference between generation rank `rank` and the rules."""
    tied = {weight.name for weight in weights if weight.replica and not ranks.holders(weight)}
    parameters, experts = expected(ranks, weights, rank, dtype)
    own = {name: what for name, what in found.parameters.items() if name not in tied}
    _compare(f"vLLM worker {rank}", "shape and dtype", own, parameters)
    rows = {name: rows for name, rows in found.experts.items() if name in experts}
    if rows:  # vLLM keeps no list where every rank has all experts
        _compare(f"vLLM worker {rank}", "experts", rows, experts)


def expected(
    ranks: GenerationRanks, weights: Sequence[Weight], rank: int, dtype: str
) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, tuple[int, ...]]]:
    """Parameters and experts that the rules give to a rank; weights are in `dtype`."""
    parameters: dict[str, tuple[tuple[int, ...], str]] = {}
    experts: dict[str, tuple[int, ...]] = {}
    for weight in weights:
        holders = ranks.holders(weight)
        shard = next((n for n, members in enumerate(holders) if rank in members), None)
        if shard is None:
            continue
        shape = weight.rule.local_shape(Shard(shard, len(holders)))
        name = ranks.local_name(weight)
        if weight.expert is not None:
            name = name.partition("[")[0]
            experts[name] = (*experts.get(name, ()), weight.expert)
            shape = (len(experts[name]), *shape)
        parameters[name] = shape, "float32" if weight.float32 else dtype
    return parameters, experts


def _compare(
    who: str, what: str, found: Mapping[str, object], expected: Mapping[str, object]
) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ConfigError(
                f"{who}: {what} of {name} are {found.get(name, 'missing')}, but the rules of the "
                f"model's family say {expected.get(name, 'that it does not exist')}; "
                "weight_sync.method=full_export does without these rules"
            )
