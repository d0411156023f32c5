"""Which logical tensors are sharded in the same way by both sides' rules and ranks. Pure.

A large model has tens of thousands of tensors and a few dozen ways to shard them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import NamedTuple, get_origin, get_type_hints

from mcore_rl.reshard.boxes import Block, LogicalTensor
from mcore_rl.reshard.layout import Holders, Ranks
from mcore_rl.reshard.rules import Rule, Shard, Weight

Side = tuple[Ranks, Sequence[Weight]]  # an engine's ranks, and the rules of its parameters


class Member(NamedTuple):
    """One logical tensor of a group, and the parameters that contain it, by index in the group."""

    tensor: str
    order: int  # place of its parameter among the rules of the generation side
    sources: tuple[str, ...]
    targets: tuple[str, ...]


class Sharding(NamedTuple):
    """Where one parameter contains a logical tensor, apart from the names of both."""

    rule: Rule
    position: int  # of the tensor among those of the rule
    holders: Holders
    float32: bool

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for places that are sharded in the same way, on any ranks."""
        return (*_signature(self.rule), self.position, len(self.holders), self.float32)

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Each block of the tensor, with the shard that it is in."""
        tensor = self.rule.tensors[self.position]
        for index in range(len(self.holders)):
            for block in self.rule.blocks(Shard(index, len(self.holders))):
                if block.tensor is tensor:
                    yield index, block


class ShardingGroup(NamedTuple):
    """Tensors sharded in the same way, and where the first of them is in each of its parameters."""

    sources: tuple[Sharding, ...]
    targets: tuple[Sharding, ...]
    members: list[Member]


def group_by_sharding(training: Side, generation: Side) -> list[ShardingGroup]:
    """The tensors of the generation side, grouped by how both sides shard them."""
    sources, targets = _Locations(*training), _Locations(*generation)
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Member]] = defaultdict(list)
    for name, target in targets.of_tensor.items():
        source = sources.of_tensor.get(name)
        if source is None:
            raise ValueError(f"the training side has no {name}")
        member = Member(name, target.order, source.names, target.names)
        found[source.places, target.places].append(member)
    return [
        ShardingGroup(sources.places_of(here), targets.places_of(there), members)
        for (here, there), members in found.items()
    ]


class _Location(NamedTuple):
    """Where a side has a logical tensor: in one parameter, or in a few."""

    order: int  # of the first of them among the rules
    places: tuple[int, ...]  # numbers, the same for those that are sharded in the same way
    names: tuple[str, ...]


class _Locations:
    """Where a side has each logical tensor."""

    def __init__(self, ranks: Ranks, weights: Sequence[Weight]) -> None:
        self.of_tensor: dict[str, _Location] = {}
        self._places: list[Sharding] = []
        numbers: dict[object, range] = {}
        for order, weight in enumerate(weights):
            holders = ranks.holders(weight)
            if not holders:
                continue
            # Holders by identity: the same ranks are the same object, and may be a thousand.
            how = (*_signature(weight.rule), id(holders), weight.float32)
            if (found := numbers.get(how)) is None:
                found = numbers[how] = self._new_places(weight, holders)
            names = (ranks.local_name(weight),)
            for number, tensor in zip(found, weight.rule.tensors, strict=True):
                at = _Location(order, (number,), names)
                if (first := self.of_tensor.get(tensor.name)) is not None:
                    at = _Location(first.order, first.places + at.places, first.names + names)
                self.of_tensor[tensor.name] = at

    def places_of(self, numbers: tuple[int, ...]) -> tuple[Sharding, ...]:
        return tuple(self._places[number] for number in numbers)

    def _new_places(self, weight: Weight, holders: Holders) -> range:
        """Their numbers: one for each tensor of the weight's rule."""
        first = len(self._places)
        for position in range(len(weight.rule.tensors)):
            self._places.append(Sharding(weight.rule, position, holders, weight.float32))
        return range(first, len(self._places))


def _signature(rule: Rule) -> tuple[object, ...]:
    """Type and sizes of a rule, without the names of its tensors."""
    return _signature_of(type(rule))(rule)


@cache
def _signature_of(kind: type) -> Callable[[object], tuple[object, ...]]:
    """Shapes in the place of tensors. By attrgetter, which is fast: there are many rules."""
    hints = get_type_hints(kind)
    types = {f.name: hints[f.name] for f in fields(kind)}
    names = [f"{name}.shape" if of is LogicalTensor else name for name, of in types.items()]
    read = attrgetter("__class__", *names)
    if any(get_origin(of) is tuple for of in types.values()):
        return lambda rule: tuple(_nameless(value) for value in read(rule))
    return read


def _nameless(value: object) -> object:
    if isinstance(value, LogicalTensor):
        return value.shape
    return tuple(_nameless(part) for part in value) if isinstance(value, tuple) else value
