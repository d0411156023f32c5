"""What servers say about their parameters, compared with the rules that plans are made from.

A plan trusts the rules for the names, shapes and dtypes that vLLM has. vLLM is asked once, before
the first update, so that a version that lays weights out in another way is refused by name. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.layout import GenerationRanks
from mcore_rl.reshard.rules import Shard, Weight

Parameters = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype by name


@dataclass(frozen=True, slots=True)
class Announced:
    """One vLLM worker's raw parameters, and where it runs."""

    site: str  # see shared_memory.site_of
    parameters: Parameters
    experts: Mapping[str, tuple[int, ...]]  # by stacked parameter, the experts that are its rows

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Announced:
        found = json.loads(text)
        parameters = {n: (tuple(shape), dtype) for n, (shape, dtype) in found["parameters"].items()}
        experts = {name: tuple(rows) for name, rows in found["experts"].items()}
        return cls(found["site"], parameters, experts)


def check_announced(
    announced: Sequence[Announced], ranks: GenerationRanks, weights: Sequence[Weight], dtype: str
) -> None:
    """Raise ConfigError for the first difference between workers, by rank, and the rules."""
    if len(announced) != ranks.world_size:
        raise ConfigError(f"{len(announced)} vLLM workers for {ranks.world_size} generation ranks")
    tied = {weight.name for weight in weights if weight.replica and not ranks.holders(weight)}
    for rank, worker in enumerate(announced):
        parameters, experts = expected(ranks, weights, rank, dtype)
        own = {name: what for name, what in worker.parameters.items() if name not in tied}
        _compare(f"vLLM worker {rank}", "shape and dtype", own, parameters)
        found = {name: rows for name, rows in worker.experts.items() if name in experts}
        if found:  # vLLM keeps no list where every rank has all experts
            _compare(f"vLLM worker {rank}", "experts", found, experts)


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
                f"{who}: {what} of {name} are {found.get(name, 'not there')}, but the rules of the "
                f"model's family say {expected.get(name, 'that it is not there')}; "
                "weight_sync.method=full_export does without these rules"
            )
