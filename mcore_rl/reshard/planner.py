"""Reshard plans: which bytes go from which training rank into which parameter of vLLM. Pure.

Tensors that both sides shard in the same way (such as the experts of a layer on one rank) form a
group: their boxes are intersected once, and their sources are chosen once. So the plan of a large
model is small. It is made from the layouts alone, and is the same on every rank. A rank expands
only what it sends or receives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_rl.reshard.boxes import Box
from mcore_rl.reshard.placement import Devices
from mcore_rl.reshard.tensor_groups import Member, ShardingGroup, Side, group_by_sharding

IntArray = NDArray[np.int64]


class TransferOp(NamedTuple):
    """What a source parameter and a target parameter have in common, and who sends it to whom."""

    box: Box
    source: int  # place among the members' sources
    source_offset: tuple[int, ...]
    target: int  # place among the members' targets
    target_offset: tuple[int, ...]
    source_of: Mapping[int, int]  # training rank, by generation rank


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Logical tensors that both sides shard in the same way."""

    members: tuple[Member, ...]
    itemsize: int
    cuts: tuple[TransferOp, ...]


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

    kinds: tuple[TensorGroup, ...]
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

    def pairs(self) -> Iterator[tuple[int, int, int]]:
        """Training rank, generation rank and bytes of each box, in all tensors of its kind."""
        for kind in self.kinds:
            for cut in kind.cuts:
                num_bytes = cut.box.numel * kind.itemsize * len(kind.members)
                for target, source in cut.source_of.items():
                    yield source, target, num_bytes

    def totals(self) -> Totals:
        devices = self.devices
        training, generation, node = devices.training, devices.generation, devices.node
        received, local, sent = [0] * len(generation), [0] * len(generation), [0] * len(training)
        in_node = 0
        for source, target, num_bytes in self.pairs():
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


def _copy(kind: TensorGroup, member: Member, cut: TransferOp, source: int, target: int) -> Copy:
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


class TransferRequirements:
    """The boxes that the generation side needs, intersected with those of the training side.

    The largest part of making a plan, and the part that does not ask where ranks run.
    """

    def __init__(self, training: Side, generation: Side, itemsize: int) -> None:
        """`itemsize` is that of an element as it is sent, in bytes.

        Weights that are kept in float32 travel in it.

        Raises:
            ValueError: the training side does not cover a tensor of the generation side exactly
                once.
        """
        self.num_training = training[0].world_size
        self.num_generation = generation[0].world_size
        fits: dict[object, tuple[_Fit, ...]] = {}  # cut once for all kinds of the same shapes
        self._kinds, have = [], _Have()
        for kind in group_by_sharding(training, generation):
            places = (*kind.sources, *kind.targets)
            shapes = (len(kind.sources), *[place.shape for place in places])
            if shapes not in fits:
                fits[shapes] = tuple(_fits(kind))
            self._kinds.append(_OpenKind(kind, fits[shapes], itemsize, have))

    def needed(self) -> IntArray:
        """[generation ranks]: bytes that each needs, padding left out."""
        found = np.zeros(self.num_generation, np.int64)
        for choice in self._choices():
            found[list(choice.targets)] += choice.num_bytes
        return found

    def overlap(self) -> IntArray:
        """[generation ranks, training ranks]: bytes that the one needs and the other has."""
        # By identity, which is hashed faster than the ranks.
        targets: dict[int, tuple[int, ...]] = {}
        sources: dict[int, Mapping[int, int]] = {}
        num_bytes = Counter[tuple[int, int]]()
        for choice in self._choices():
            pair = id(choice.targets), id(choice.sources)
            targets[pair[0]], sources[pair[1]] = choice.targets, choice.sources
            num_bytes[pair] += choice.num_bytes
        rows = {target: np.zeros(self.num_training, np.int64) for target in targets}
        for (target, source), shared in num_bytes.items():
            rows[target][list(sources[source])] += shared
        found = np.zeros((self.num_generation, self.num_training), np.int64)
        for target, row in rows.items():
            found[list(targets[target])] += row
        return found

    def plan(self, devices: Devices) -> Plan:
        """With a source for every box: the own device, else the own node, else the least loaded."""
        sources = _SourceChooser(devices)
        # The largest first, so that what is left to choose evens the load out.
        chosen = {
            id(kind): [sources.choose(choice) for choice in kind.choices]
            for kind in sorted(self._kinds, key=lambda kind: -kind.num_bytes)
        }
        return Plan(tuple(kind.closed(chosen[id(kind)]) for kind in self._kinds), devices)

    def _choices(self) -> Iterator[_Choice]:
        for kind in self._kinds:
            yield from kind.choices


@dataclass(frozen=True, slots=True)
class _Fit:
    """A box that a shard of a target needs, and its place on both sides, on any rank."""

    box: Box
    target: tuple[int, int, tuple[int, ...]]  # parameter, shard, offset in it
    sources: tuple[tuple[int, int, tuple[int, ...]], ...]


class _Choice(NamedTuple):
    """Which ranks need a box, and which have it."""

    num_bytes: int  # in all tensors of the kind
    targets: tuple[int, ...]
    sources: Mapping[int, int]  # by training rank: which of the fit's sources it has


class _Have:
    """Which training ranks have a box: one object for all boxes that the same ranks have."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], dict[int, int]] = {}

    def one_of(self, *holders: tuple[int, ...]) -> Mapping[int, int]:
        """By rank: the first of these that it is in."""
        key = tuple(map(id, holders))
        if (found := self._found.get(key)) is None:
            found = {}
            for number, ranks in enumerate(holders):
                for rank in ranks:
                    found.setdefault(rank, number)
            self._found[key] = found
        return found


class _OpenKind:
    """A kind whose sources are still to be chosen: for each fit a choice."""

    def __init__(
        self, kind: ShardingGroup, fits: tuple[_Fit, ...], itemsize: int, have: _Have
    ) -> None:
        self._members = kind.members
        self._itemsize = 4 if kind.targets[0].float32 else itemsize
        self._fits = fits
        self.choices = []
        for fit in fits:
            target, target_shard, _ = fit.target
            held = have.one_of(*[kind.sources[n].holders[shard] for n, shard, _ in fit.sources])
            num_bytes = fit.box.numel * self._itemsize * len(kind.members)
            targets = kind.targets[target].holders[target_shard]
            self.choices.append(_Choice(num_bytes, targets, held))
        self.num_bytes = sum(choice.num_bytes for choice in self.choices)

    def closed(self, chosen: Sequence[Mapping[int, int]]) -> TensorGroup:
        """With the training rank that serves each generation rank, choice by choice."""
        cuts = []
        for fit, choice, source_of in zip(self._fits, self.choices, chosen, strict=True):
            target, _, target_offset = fit.target
            for number, (source, _, offset) in enumerate(fit.sources):
                served = source_of
                if len(fit.sources) > 1:
                    served = {t: s for t, s in source_of.items() if choice.sources[s] == number}
                if served:
                    cuts.append(TransferOp(fit.box, source, offset, target, target_offset, served))
        return TensorGroup(tuple(self._members), self._itemsize, tuple(cuts))


def _fits(kind: ShardingGroup) -> Iterator[_Fit]:
    """TransferOp each block of the targets against those of the sources."""
    held = [(n, *piece) for n, place in enumerate(kind.sources) for piece in place.blocks()]
    for number, place in enumerate(kind.targets):
        for shard, block in place.blocks():
            found: dict[Box, list[tuple[int, int, tuple[int, ...]]]] = {}
            for source, source_shard, piece in held:
                if (box := overlap(piece.box, block.box)) is not None:
                    at = (source, source_shard, _moved(piece.local_offset, piece.box, box))
                    found.setdefault(box, []).append(at)
            if sum(box.numel for box in found) != block.box.numel:
                raise ValueError(
                    f"{kind.members[0].tensor}: the training side does not cover {block.box} "
                    "exactly once"
                )
            for box, places in found.items():
                offset = _moved(block.local_offset, block.box, box)
                yield _Fit(box, (number, shard, offset), tuple(places))


class _SourceChooser:
    """Own device first, then own node, then the rank that has sent the least so far."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._sent = [0] * len(devices.training)
        self._guest = {device: rank for rank, device in enumerate(devices.generation)}
        self._host = {device: rank for rank, device in enumerate(devices.training)}
        self._hosts = defaultdict[int, list[int]](list)  # by node
        for device, rank in self._host.items():
            self._hosts[devices.node(device)].append(rank)
        self._near: dict[tuple[int, int], Collection[int]] = {}

    def choose(self, choice: _Choice) -> dict[int, int]:
        """The training rank that serves each generation rank."""
        devices, num_bytes = self._devices, choice.num_bytes
        if len(choice.sources) == 1:  # as for most experts
            (only,) = choice.sources
            source_of = dict.fromkeys(choice.targets, only)
            at_home = self._guest.get(devices.training[only]) in source_of
            self._sent[only] += num_bytes * (len(source_of) - at_home)
            return source_of
        source_of = {}
        for target in choice.targets:
            device = devices.generation[target]
            own = self._host.get(device)
            if own is not None and own in choice.sources:
                source_of[target] = own
                continue
            near = self._nearest(choice.sources, devices.node(device))
            source = source_of[target] = min(near, key=self._sent.__getitem__)
            self._sent[source] += num_bytes
        return source_of

    def _nearest(self, sources: Mapping[int, int], node: int) -> Collection[int]:
        """Those on the node, or else all."""
        key = id(sources), node
        if (found := self._near.get(key)) is None:
            found = [rank for rank in self._hosts[node] if rank in sources] or sources
            self._near[key] = found
        return found


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
    """The offset of a part of a box when the box is at `offset`."""
    return tuple(at + p - w for at, p, w in zip(offset, part.offsets, whole.offsets, strict=True))
