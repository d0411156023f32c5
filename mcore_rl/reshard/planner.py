"""Reshard plans: which bytes go from which training rank into which parameter of vLLM. Pure.

Tensors that stand in the same way on both sides (the experts of a layer that one rank holds, say)
make a *kind*: their boxes are cut once for all of them, and their sources are chosen once. So the
plan of a large model is small, is made from the layouts alone, and is the same on every rank; a
rank expands only what it sends or receives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_rl.reshard.boxes import Box
from mcore_rl.reshard.placement import Devices
from mcore_rl.reshard.standing import Member, Place, Side, alike

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """What a source parameter and a target parameter have in common, and who sends it to whom."""

    box: Box
    source: int  # place among the members' sources
    source_offset: tuple[int, ...]
    target: int  # place among the members' targets
    target_offset: tuple[int, ...]
    source_of: Mapping[int, int]  # training rank, by generation rank


@dataclass(frozen=True, slots=True)
class Kind:
    """Logical tensors that stand alike on both sides."""

    members: tuple[Member, ...]
    itemsize: int
    cuts: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """One box on its way: from a training rank's parameter into a generation rank's."""

    tensor: str
    box: Box
    source_rank: int
    source: str
    source_offset: tuple[int, ...]
    target_rank: int
    target: str
    target_offset: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes of a plan."""

    received: tuple[int, ...]  # by generation rank, from other devices
    local: tuple[int, ...]  # by generation rank, from its own device
    sent: tuple[int, ...]  # by training rank, to other devices
    in_node: int  # of the received ones, those that stay inside a node


@dataclass(frozen=True, slots=True)
class Plan:
    """Data: equal on all ranks that make it from the same layouts."""

    kinds: tuple[Kind, ...]
    devices: Devices

    def received_by(self, generation_rank: int) -> list[Copy]:
        """All copies into a rank's parameters, from its own device too, parameter by parameter."""
        found = []
        for kind in self.kinds:
            for cut in kind.cuts:
                source = cut.source_of.get(generation_rank)
                if source is not None:
                    pair = (source, generation_rank)
                    found += [(m.order, _copy(kind, m, cut, *pair)) for m in kind.members]
        return _in_order(found)

    def sent_by(self, training_rank: int) -> list[Copy]:
        """All copies out of a rank's parameters, in the order in which targets take them."""
        found = []
        for kind in self.kinds:
            for cut in kind.cuts:
                for target, source in cut.source_of.items():
                    if source == training_rank:
                        pair = (source, target)
                        found += [(m.order, _copy(kind, m, cut, *pair)) for m in kind.members]
        return _in_order(found)

    def totals(self) -> Totals:
        devices = self.devices
        training, generation, node = devices.training, devices.generation, devices.node
        received, local, sent = [0] * len(generation), [0] * len(generation), [0] * len(training)
        in_node = 0
        for kind in self.kinds:
            for cut in kind.cuts:
                num_bytes = cut.box.numel * kind.itemsize * len(kind.members)
                for target, source in cut.source_of.items():
                    here, there = generation[target], training[source]
                    if here == there:
                        local[target] += num_bytes
                        continue
                    received[target] += num_bytes
                    sent[source] += num_bytes
                    in_node += num_bytes * (node(here) == node(there))
        return Totals(tuple(received), tuple(local), tuple(sent), in_node)


def _in_order(found: list[tuple[int, Copy]]) -> list[Copy]:
    found.sort(key=lambda pair: (pair[0], pair[1].target_rank, pair[1].target_offset))
    return [copy for _, copy in found]


def _copy(kind: Kind, member: Member, cut: Cut, source: int, target: int) -> Copy:
    return Copy(
        tensor=member.tensor,
        box=cut.box,
        source_rank=source,
        source=member.sources[cut.source],
        source_offset=cut.source_offset,
        target_rank=target,
        target=member.targets[cut.target],
        target_offset=cut.target_offset,
        num_bytes=cut.box.numel * kind.itemsize,
    )


class Demand:
    """What the generation side needs, cut against what the training side holds.

    The largest part of making a plan, and the part that does not ask where ranks run.
    """

    def __init__(self, training: Side, generation: Side, itemsize: int) -> None:
        """`itemsize` is that of an element on its way, in bytes.

        Weights that are kept in float32 travel in it.

        Raises:
            ValueError: the training side does not cover a tensor of the generation side exactly
                once.
        """
        self.num_training = training[0].world_size
        self.num_generation = generation[0].world_size
        self._kinds = [
            _OpenKind(source.places, target.places, members, itemsize)
            for source, target, members in alike(training, generation)
        ]

    def needed(self) -> IntArray:
        """[generation ranks]: bytes that each needs, padding left out."""
        found = np.zeros(self.num_generation, np.int64)
        for choice, num_bytes in self._choices():
            found[list(choice.target_ranks)] += num_bytes
        return found

    def overlap(self) -> IntArray:
        """[generation ranks, training ranks]: bytes that the one needs and the other holds."""
        found = np.zeros((self.num_generation, self.num_training), np.int64)
        shared: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        for choice, num_bytes in self._choices():
            shared[choice.target_ranks, tuple(choice.sources)] += num_bytes
        for (targets, sources), num_bytes in shared.items():
            found[np.ix_(targets, sources)] += num_bytes
        return found

    def plan(self, devices: Devices) -> Plan:
        """With a source for every box: the own device, else the own node, else the least loaded."""
        sources = _SourceChooser(devices)
        # The largest first, so that what is left to choose evens the load out.
        chosen = {
            id(kind): sources.choose(kind)
            for kind in sorted(self._kinds, key=lambda kind: -kind.num_bytes)
        }
        return Plan(tuple(kind.closed(chosen[id(kind)]) for kind in self._kinds), devices)

    def _choices(self) -> Iterator[tuple[_Choice, int]]:
        """Each with its bytes in all tensors of its kind."""
        for kind in self._kinds:
            for choice in kind.choices:
                yield choice, choice.box.numel * kind.itemsize * len(kind.members)


@dataclass(slots=True)
class _Choice:
    """A box that a target needs, and the source parameters that have it."""

    box: Box
    target: int
    target_offset: tuple[int, ...]
    target_ranks: tuple[int, ...]
    sources: dict[int, int]  # by training rank: which of the source parameters it has
    source_offsets: dict[int, tuple[int, ...]]  # by source parameter


class _OpenKind:
    """A kind whose sources are still to be chosen."""

    def __init__(
        self,
        sources: Sequence[Place],
        targets: Sequence[Place],
        members: list[Member],
        itemsize: int,
    ) -> None:
        self.members = members
        self.itemsize = 4 if targets[0].float32 else itemsize
        pieces = [(n, *piece) for n, place in enumerate(sources) for piece in place.pieces()]
        self.choices: list[_Choice] = []
        for number, place in enumerate(targets):
            for box, offset, ranks in place.pieces():
                self._cut(number, box, offset, ranks, pieces)

    @property
    def num_bytes(self) -> int:
        return sum(c.box.numel for c in self.choices) * self.itemsize * len(self.members)

    def _cut(
        self,
        number: int,
        wanted: Box,
        offset: tuple[int, ...],
        ranks: tuple[int, ...],
        pieces: Sequence[tuple[int, Box, tuple[int, ...], tuple[int, ...]]],
    ) -> None:
        """Cut one box of a target against all boxes of the sources."""
        choices: dict[Box, _Choice] = {}
        for source, held, source_offset, holders in pieces:
            if (box := overlap(held, wanted)) is None:
                continue
            at = _moved(offset, wanted, box)
            choice = choices.setdefault(box, _Choice(box, number, at, ranks, {}, {}))
            choice.source_offsets[source] = _moved(source_offset, held, box)
            for rank in holders:
                choice.sources.setdefault(rank, source)
        if sum(box.numel for box in choices) != wanted.numel:
            raise ValueError(
                f"{self.members[0].tensor}: the training side does not cover {wanted} exactly once"
            )
        self.choices += choices.values()

    def closed(self, chosen: Sequence[Mapping[int, int]]) -> Kind:
        """With the training rank that serves each generation rank, choice by choice."""
        cuts = []
        for choice, source_of in zip(self.choices, chosen, strict=True):
            for source, offset in choice.source_offsets.items():
                served = {t: s for t, s in source_of.items() if choice.sources[s] == source}
                if served:
                    at = (source, offset, choice.target, choice.target_offset)
                    cuts.append(Cut(choice.box, *at, served))
        return Kind(tuple(self.members), self.itemsize, tuple(cuts))


class _SourceChooser:
    """Own device first, then own node, then whoever has sent the least so far."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._sent = [0] * len(devices.training)

    def choose(self, kind: _OpenKind) -> list[dict[int, int]]:
        """For each choice of the kind, the training rank that serves each generation rank."""
        chosen = []
        for choice in kind.choices:
            num_bytes = choice.box.numel * kind.itemsize * len(kind.members)
            source_of, candidates = {}, tuple(choice.sources)
            for target in choice.target_ranks:
                source = source_of[target] = self._source(candidates, target)
                if self._devices.training[source] != self._devices.generation[target]:
                    self._sent[source] += num_bytes
            chosen.append(source_of)
        return chosen

    def _source(self, candidates: tuple[int, ...], target: int) -> int:
        if len(candidates) == 1:
            return candidates[0]
        devices, here = self._devices, self._devices.generation[target]
        node, near = devices.node(here), []
        for rank in candidates:
            there = devices.training[rank]
            if there == here:
                return rank
            if devices.node(there) == node:
                near.append(rank)
        return min(near or candidates, key=self._sent.__getitem__)


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common.

    >>> overlap(Box((0,), (4,)), Box((3,), (4,)))
    Box(offsets=(3,), sizes=(1,))
    """
    starts = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = (
        min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if min(sizes, default=1) > 0 else None


def _moved(offset: tuple[int, ...], whole: Box, part: Box) -> tuple[int, ...]:
    """Where a part of a box stands when the box stands at `offset`."""
    return tuple(at + p - w for at, p, w in zip(offset, part.offsets, whole.offsets, strict=True))
