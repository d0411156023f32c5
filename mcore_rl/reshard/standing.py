"""Which logical tensors stand alike: in the same way under both sides' rules and ranks. Pure.

A large model has tens of thousands of tensors and a few dozen ways to stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mcore_rl.reshard.boxes import Box, LogicalTensor
from mcore_rl.reshard.layout import Holders, Ranks
from mcore_rl.reshard.rules import Rule, Shard, Weight

Side = tuple[Ranks, Sequence[Weight]]  # an engine's ranks, and the rules of its parameters


class Member(NamedTuple):
    """One logical tensor of a kind, and the parameters that hold it, by their place in the kind."""

    tensor: str
    order: int  # place of its parameter among the rules of the generation side
    sources: tuple[str, ...]
    targets: tuple[str, ...]


class Place(NamedTuple):
    """Where one parameter holds a logical tensor, apart from the names of both."""

    rule: Rule
    position: int  # of the tensor among those of the rule
    holders: Holders
    float32: bool

    def pieces(self) -> Iterator[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
        """(box of the tensor, offset in the parameter, ranks) for each block of each shard."""
        tensor = self.rule.tensors[self.position]
        for index, ranks in enumerate(self.holders):
            for block in self.rule.blocks(Shard(index, len(self.holders))):
                if block.tensor is tensor:
                    yield block.box, block.local_offset, ranks


@dataclass(slots=True)
class Standing:
    """All parameters of one side that hold a logical tensor."""

    order: int  # of the first of them among the rules
    key: tuple[int, ...] = ()  # equal for tensors that stand alike
    places: tuple[Place, ...] = ()
    names: tuple[str, ...] = ()


def alike(training: Side, generation: Side) -> list[tuple[Standing, Standing, list[Member]]]:
    """The tensors of the generation side, those together that stand alike on both sides.

    The two places are those of the first of them.
    """
    sources, targets = _standing(*training), _standing(*generation)
    found: dict[tuple[object, object], tuple[Standing, Standing, list[Member]]] = {}
    for name, target in targets.items():
        source = sources.get(name)
        if source is None:
            raise ValueError(f"the training side has no {name}")
        kind = found.setdefault((source.key, target.key), (source, target, []))
        kind[2].append(Member(name, target.order, source.names, target.names))
    return list(found.values())


def _standing(ranks: Ranks, weights: Sequence[Weight]) -> dict[str, Standing]:
    """By logical tensor: where it stands."""
    found: dict[str, Standing] = {}
    numbers: dict[object, int] = {}  # they are hashed faster than what they stand for
    for order, weight in enumerate(weights):
        holders = ranks.holders(weight)
        if not holders:
            continue
        name, rule = ranks.local_name(weight), weight.rule
        # By identity: the same ranks are the same object, and may be a thousand.
        stands = (*_signature(rule), id(holders), weight.float32)
        number = numbers.setdefault(stands, len(numbers))
        for position, tensor in enumerate(rule.tensors):
            if (at := found.get(tensor.name)) is None:
                at = found[tensor.name] = Standing(order)
            at.key += (number, position)
            at.places += (Place(rule, position, holders, weight.float32),)
            at.names += (name,)
    return found


def _signature(rule: Rule) -> tuple[object, ...]:
    """Type and sizes of a rule, without the names of its tensors."""
    fields = type(rule).__dataclass_fields__  # type: ignore[attr-defined]
    return (type(rule), *[_nameless(getattr(rule, name)) for name in fields])


def _nameless(value: object) -> object:
    if isinstance(value, LogicalTensor):
        return value.shape
    return tuple(_nameless(part) for part in value) if isinstance(value, tuple) else value
