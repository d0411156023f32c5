"""Reshard plans: which bytes go from which training rank into which parameter of vLLM. No torch.

A large model has tens of thousands of tensors and a few dozen ways to shard them. Tensors that both
sides shard in the same way (such as the experts of a layer on a rank) form a group: their boxes are
intersected once, and their sources are chosen once. So the plan of a large model is small. It is
computed from the layouts alone, the same on every rank. A rank expands only what it sends or
receives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast, get_origin, get_type_hints

import lap
import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.layout import Holders, Ranks
from mcore_rl.reshard.rules import Block, Box, LogicalTensor, Rule, Shard, Weight

IntArray = NDArray[np.int64]
Side = tuple[Ranks, Sequence[Weight]]  # an engine's ranks, and the rules of its parameters


class Member(NamedTuple):
    """A logical tensor of a group, and the names of the parameters that contain it."""

    tensor: str
    order: int  # index of its parameter in the rules of the generation side
    sources: tuple[str, ...]
    targets: tuple[str, ...]


class Sharding(NamedTuple):
    """A logical tensor in a parameter: shards and ranks, without the names of both."""

    rule: Rule
    position: int  # index of the tensor in the rule
    holders: Holders
    itemsize: int | None  # of Weight

    @property
    def signature(self) -> tuple[object, ...]:
        """Value that is equal for tensors that are sharded in the same way, on any ranks."""
        return (*_get_signature(self.rule), self.position, len(self.holders), self.itemsize)

    def list_blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield each block of the tensor, with the index of its shard."""
        tensor = self.rule.tensors[self.position]
        for index in range(len(self.holders)):
            for block in self.rule.get_blocks(Shard(index, len(self.holders))):
                if block.tensor is tensor:
                    yield index, block


class ShardingGroup(NamedTuple):
    """Tensors that are sharded in the same way, and the shardings in their parameters."""

    sources: tuple[Sharding, ...]
    targets: tuple[Sharding, ...]
    members: list[Member]


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of the ranks of both sides. A device has one rank of each side, or of one side."""

    training: tuple[int, ...]  # device of each training rank
    generation: tuple[int, ...]  # device of each generation rank
    per_node: int

    @classmethod
    def disaggregated(cls, num_training: int, num_generation: int, per_node: int) -> Devices:
        """Place the generation ranks on devices after those of the training ranks."""
        devices = range(num_training + num_generation)
        return cls(tuple(devices[:num_training]), tuple(devices[num_training:]), per_node)

    @classmethod
    def colocated(cls, generation: tuple[int, ...], num_training: int, per_node: int) -> Devices:
        """Place the generation ranks on devices of training ranks.

        `generation`: for each generation rank the training rank whose device it shares.
        """
        return cls(tuple(range(num_training)), generation, per_node)

    def get_node(self, device: int) -> int:
        """Return the node of a device."""
        return device // self.per_node


class TransferOp(NamedTuple):
    """A box that source and target parameters have in common, and the ranks that transfer it."""

    box: Box
    source: int  # index in Member.sources
    source_offset: tuple[int, ...]
    target: int  # index in Member.targets
    target_offset: tuple[int, ...]
    source_of: Mapping[int, int]  # training rank by generation rank


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Logical tensors that both sides shard in the same way, and the ops of each of them."""

    members: tuple[Member, ...]
    itemsize: int
    ops: tuple[TransferOp, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A box, copied from a training rank's parameter to a generation rank's."""

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
class PlanTotals:
    """Bytes of a plan."""

    received: tuple[int, ...]  # by generation rank, from other devices
    local: tuple[int, ...]  # by generation rank, from its device
    sent: tuple[int, ...]  # by training rank, to other devices
    in_node: int  # received from a device of the same node


@dataclass(frozen=True, slots=True)
class Plan:
    """A reshard plan, equal on all ranks that compute it from the same layouts."""

    groups: tuple[TensorGroup, ...]
    devices: Devices

    def list_received(self, generation_rank: int) -> list[Copy]:
        """Return all copies to a rank, those from its device included, parameter by parameter."""
        copies = []
        for group in self.groups:
            for op in group.ops:
                source = op.source_of.get(generation_rank)
                if source is not None:
                    pair = (source, generation_rank)
                    copies += [(m.order, _build_copy(group, m, op, *pair)) for m in group.members]
        return _sort_copies(copies)

    def list_sent(self, training_rank: int) -> list[Copy]:
        """Return all copies from a rank, parameter by parameter of the targets."""
        copies = []
        for group in self.groups:
            for op in group.ops:
                for target, source in op.source_of.items():
                    if source == training_rank:
                        pair = (source, target)
                        copies += [
                            (m.order, _build_copy(group, m, op, *pair)) for m in group.members
                        ]
        return _sort_copies(copies)

    def list_transfers(self) -> Iterator[tuple[int, int, int]]:
        """Yield training rank, generation rank, and bytes in all tensors of a group, per op."""
        for group in self.groups:
            for op in group.ops:
                num_bytes = op.box.numel * group.itemsize * len(group.members)
                for target, source in op.source_of.items():
                    yield source, target, num_bytes

    def compute_totals(self) -> PlanTotals:
        """Sum the bytes that each rank sends and receives."""
        devices = self.devices
        training, generation, node = devices.training, devices.generation, devices.get_node
        received, local, sent = [0] * len(generation), [0] * len(generation), [0] * len(training)
        in_node = 0
        for source, target, num_bytes in self.list_transfers():
            target_device, source_device = generation[target], training[source]
            if target_device == source_device:
                local[target] += num_bytes
                continue
            received[target] += num_bytes
            sent[source] += num_bytes
            in_node += num_bytes * (node(target_device) == node(source_device))
        return PlanTotals(tuple(received), tuple(local), tuple(sent), in_node)


def _sort_copies(ordered_copies: list[tuple[int, Copy]]) -> list[Copy]:
    ordered_copies.sort(key=lambda pair: (pair[0], pair[1].target_rank, pair[1].target_offset))
    return [copy for _, copy in ordered_copies]


def _build_copy(
    group: TensorGroup, member: Member, op: TransferOp, source: int, target: int
) -> Copy:
    return Copy(
        tensor=member.tensor,
        box=op.box,
        source_rank=source,
        source=member.sources[op.source],
        source_offset=op.source_offset,
        target_rank=target,
        target=member.targets[op.target],
        target_offset=op.target_offset,
        num_bytes=op.box.numel * group.itemsize,
    )


class TransferRequirements:
    """The boxes of the generation side, intersected with those of the training side.

    It is the largest part of the work for a plan, and does not depend on devices.
    """

    def __init__(self, training: Side, generation: Side, itemsize: int) -> None:
        """Intersect the boxes of both sides.

        Args:
            itemsize: Bytes of an element as it is sent; float32 parameters are sent in float32.

        Raises:
            ValueError: The training side does not cover a tensor of the generation side exactly
                once.
        """
        self.num_training = training[0].world_size
        self.num_generation = generation[0].world_size
        boxes: dict[object, tuple[_SharedBox, ...]] = {}  # by the signatures of a group
        self._groups, index = [], _SourceIndex()
        for group in group_by_sharding(training, generation):
            shardings = (*group.sources, *group.targets)
            signatures = (len(group.sources), *[sharding.signature for sharding in shardings])
            if signatures not in boxes:
                boxes[signatures] = tuple(_intersect_blocks(group))
            self._groups.append(_OpenGroup(group, boxes[signatures], itemsize, index))

    def compute_needed(self) -> IntArray:
        """Return [generation ranks], the bytes that each needs, without padding."""
        num_bytes = np.zeros(self.num_generation, np.int64)
        for choice in self._iterate_choices():
            num_bytes[list(choice.targets)] += choice.num_bytes
        return num_bytes

    def compute_overlap(self) -> IntArray:
        """Return [generation ranks, training ranks], the bytes that one needs and the other has."""
        # Keyed by id(), which is hashed faster than the ranks.
        targets: dict[int, tuple[int, ...]] = {}
        sources: dict[int, Mapping[int, int]] = {}
        num_bytes = Counter[tuple[int, int]]()
        for choice in self._iterate_choices():
            pair = id(choice.targets), id(choice.sources)
            targets[pair[0]], sources[pair[1]] = choice.targets, choice.sources
            num_bytes[pair] += choice.num_bytes
        rows = {target: np.zeros(self.num_training, np.int64) for target in targets}
        for (target, source), shared in num_bytes.items():
            rows[target][list(sources[source])] += shared
        overlap = np.zeros((self.num_generation, self.num_training), np.int64)
        for target, row in rows.items():
            overlap[list(targets[target])] += row
        return overlap

    def plan(self, devices: Devices) -> Plan:
        """Choose a source for every box: on the same device, else node, else the least loaded."""
        chooser = _SourceChooser(devices)
        # Largest first: the later, smaller choices balance the load.
        sources = {
            id(group): [chooser.choose(choice) for choice in group.choices]
            for group in sorted(self._groups, key=lambda group: -group.num_bytes)
        }
        return Plan(tuple(group.close(sources[id(group)]) for group in self._groups), devices)

    def _iterate_choices(self) -> Iterator[_SourceChoice]:
        for group in self._groups:
            yield from group.choices


@dataclass(frozen=True, slots=True)
class _SharedBox:
    """A box of a shard of a target parameter, and its locations on both sides, for any rank."""

    box: Box
    target: tuple[int, int, tuple[int, ...]]  # parameter, shard, offset
    sources: tuple[tuple[int, int, tuple[int, ...]], ...]


class _SourceChoice(NamedTuple):
    """The ranks that need a box, and those that have it."""

    num_bytes: int  # in all tensors of the group
    targets: tuple[int, ...]
    sources: Mapping[int, int]  # by training rank: index in _SharedBox.sources


class _SourceIndex:
    """Mappings from training rank to source, one object for all boxes of the same ranks."""

    def __init__(self) -> None:
        self._sources: dict[tuple[int, ...], dict[int, int]] = {}

    def find_sources(self, *holders: tuple[int, ...]) -> Mapping[int, int]:
        """Return, by rank, the index of the first of `holders` that contains it."""
        key = tuple(map(id, holders))
        if (sources := self._sources.get(key)) is None:
            sources = {}
            for number, ranks in enumerate(holders):
                for rank in ranks:
                    sources.setdefault(rank, number)
            self._sources[key] = sources
        return sources


class _OpenGroup:
    """A group whose sources are not chosen yet: a choice for each box."""

    def __init__(
        self,
        group: ShardingGroup,
        boxes: tuple[_SharedBox, ...],
        itemsize: int,
        index: _SourceIndex,
    ) -> None:
        self._members = group.members
        self._itemsize = group.targets[0].itemsize or itemsize
        self._boxes = boxes
        self.choices = []
        for shared in boxes:
            target, target_shard, _ = shared.target
            holders = [group.sources[n].holders[shard] for n, shard, _ in shared.sources]
            num_bytes = shared.box.numel * self._itemsize * len(group.members)
            targets = group.targets[target].holders[target_shard]
            sources = index.find_sources(*holders)
            self.choices.append(_SourceChoice(num_bytes, targets, sources))
        self.num_bytes = sum(choice.num_bytes for choice in self.choices)

    def close(self, sources: Sequence[Mapping[int, int]]) -> TensorGroup:
        """Return the group with its ops.

        Args:
            sources: For each choice, the training rank of each generation rank.
        """
        ops = []
        for shared, choice, source_of in zip(self._boxes, self.choices, sources, strict=True):
            target, _, target_offset = shared.target
            for number, (source, _, offset) in enumerate(shared.sources):
                pairs = source_of
                if len(shared.sources) > 1:
                    pairs = {t: s for t, s in source_of.items() if choice.sources[s] == number}
                if pairs:
                    op = TransferOp(shared.box, source, offset, target, target_offset, pairs)
                    ops.append(op)
        return TensorGroup(tuple(self._members), self._itemsize, tuple(ops))


def _intersect_blocks(group: ShardingGroup) -> Iterator[_SharedBox]:
    """Intersect each block of the targets with those of the sources."""
    source_blocks = [
        (number, *block)
        for number, sharding in enumerate(group.sources)
        for block in sharding.list_blocks()
    ]
    for number, sharding in enumerate(group.targets):
        for shard, block in sharding.list_blocks():
            sources: dict[Box, list[tuple[int, int, tuple[int, ...]]]] = {}
            for source, source_shard, source_block in source_blocks:
                if (box := intersect(source_block.box, block.box)) is not None:
                    offset = _shift_offset(source_block.local_offset, source_block.box, box)
                    sources.setdefault(box, []).append((source, source_shard, offset))
            if sum(box.numel for box in sources) != block.box.numel:
                raise ValueError(
                    f"{group.members[0].tensor}: the training side does not cover {block.box} "
                    "exactly once"
                )
            for box, locations in sources.items():
                offset = _shift_offset(block.local_offset, block.box, box)
                yield _SharedBox(box, (number, shard, offset), tuple(locations))


class _SourceChooser:
    """Chooses sources: the same device first, then the same node, then the least loaded rank."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._sent = [0] * len(devices.training)
        self._generation_ranks = {device: rank for rank, device in enumerate(devices.generation)}
        self._training_ranks = {device: rank for rank, device in enumerate(devices.training)}
        self._ranks_of_node = defaultdict[int, list[int]](list)  # by node
        for device, rank in self._training_ranks.items():
            self._ranks_of_node[devices.get_node(device)].append(rank)
        self._nearest: dict[tuple[int, int], Collection[int]] = {}

    def choose(self, choice: _SourceChoice) -> dict[int, int]:
        """Return the training rank that sends to each generation rank."""
        devices, num_bytes = self._devices, choice.num_bytes
        if len(choice.sources) == 1:  # most experts
            (source,) = choice.sources
            source_of = dict.fromkeys(choice.targets, source)
            is_local = self._generation_ranks.get(devices.training[source]) in source_of
            self._sent[source] += num_bytes * (len(source_of) - is_local)
            return source_of
        source_of = {}
        for target in choice.targets:
            device = devices.generation[target]
            local = self._training_ranks.get(device)
            if local is not None and local in choice.sources:
                source_of[target] = local
                continue
            candidates = self._list_nearest(choice.sources, devices.get_node(device))
            source = source_of[target] = min(candidates, key=self._sent.__getitem__)
            self._sent[source] += num_bytes
        return source_of

    def _list_nearest(self, sources: Mapping[int, int], node: int) -> Collection[int]:
        """Return the sources on a node, or all if there are none."""
        key = id(sources), node
        if (nearest := self._nearest.get(key)) is None:
            nearest = [rank for rank in self._ranks_of_node[node] if rank in sources] or sources
            self._nearest[key] = nearest
        return nearest


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor, or None.

    >>> intersect(Box((0,), (4,)), Box((3,), (4,)))
    Box(offsets=(3,), sizes=(1,))
    """
    starts = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = (
        min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if min(sizes, default=1) > 0 else None


def _shift_offset(offset: tuple[int, ...], outer: Box, inner: Box) -> tuple[int, ...]:
    """Return the offset of a box inside another one that is at `offset`."""
    return tuple(o + i - w for o, i, w in zip(offset, inner.offsets, outer.offsets, strict=True))


def group_by_sharding(training: Side, generation: Side) -> list[ShardingGroup]:
    """Group the tensors of the generation side by their shardings on both sides."""
    sources, targets = _Locations(*training), _Locations(*generation)
    members: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Member]] = defaultdict(list)
    for name, target in targets.by_tensor.items():
        source = sources.by_tensor.get(name)
        if source is None:
            raise ValueError(f"the training side has no {name}")
        member = Member(name, target.order, source.names, target.names)
        members[source.shardings, target.shardings].append(member)
    return [
        ShardingGroup(
            sources.get_shardings(source_numbers), targets.get_shardings(target_numbers), group
        )
        for (source_numbers, target_numbers), group in members.items()
    ]


class _Location(NamedTuple):
    """The parameters of a side that contain a logical tensor."""

    order: int  # index of the first of them in the rules
    shardings: tuple[int, ...]  # numbers of _Locations, equal for equal shardings
    names: tuple[str, ...]


class _Locations:
    """The locations of all logical tensors of a side."""

    def __init__(self, ranks: Ranks, weights: Sequence[Weight]) -> None:
        self.by_tensor: dict[str, _Location] = {}
        self._shardings: list[Sharding] = []
        numbers: dict[object, range] = {}
        for order, weight in enumerate(weights):
            holders = ranks.get_holders(weight)
            if not holders:
                continue
            # Holders by id(): equal ones are the same object, and may have a thousand ranks.
            key = (*_get_signature(weight.rule), id(holders), weight.itemsize)
            if (sharding_numbers := numbers.get(key)) is None:
                sharding_numbers = numbers[key] = self._add_shardings(weight, holders)
            names = (ranks.get_local_name(weight),)
            for number, tensor in zip(sharding_numbers, weight.rule.tensors, strict=True):
                location = _Location(order, (number,), names)
                if (first := self.by_tensor.get(tensor.name)) is not None:
                    shardings = (*first.shardings, number)
                    location = _Location(first.order, shardings, first.names + names)
                self.by_tensor[tensor.name] = location

    def get_shardings(self, numbers: tuple[int, ...]) -> tuple[Sharding, ...]:
        """Return the shardings with these numbers."""
        return tuple(self._shardings[number] for number in numbers)

    def _add_shardings(self, weight: Weight, holders: Holders) -> range:
        """Add a sharding for each tensor of a weight's rule; return their numbers."""
        first = len(self._shardings)
        for position in range(len(weight.rule.tensors)):
            self._shardings.append(Sharding(weight.rule, position, holders, weight.itemsize))
        return range(first, len(self._shardings))


def _get_signature(rule: Rule) -> tuple[object, ...]:
    """Return type and sizes of a rule, without the names of its tensors."""
    return _build_signature_reader(type(rule))(rule)


@cache
def _build_signature_reader(rule_type: Any) -> Callable[[object], tuple[object, ...]]:
    """Return a function that reads a rule with shapes in place of tensors.

    attrgetter is fast: there are tens of thousands of rules.
    """
    hints = get_type_hints(rule_type)
    types = {f.name: hints[f.name] for f in fields(rule_type)}
    names = [f"{name}.shape" if hint is LogicalTensor else name for name, hint in types.items()]
    read = attrgetter("__class__", *names)
    if any(get_origin(hint) is tuple or hint is Rule for hint in types.values()):
        return lambda rule: _strip_names(read(rule), {})
    return read


def _strip_names(values: tuple[object, ...], positions: dict[LogicalTensor, int]) -> Any:
    """Replace tensors by their shapes, those of blocks also by the order of their first blocks.

    Args:
        positions: Index of each tensor of a block in the rule, filled on the way.
    """
    stripped: list[object] = []
    for value in values:
        if isinstance(value, LogicalTensor):
            stripped.append(value.shape)
        elif isinstance(value, Block):
            position = positions.setdefault(value.tensor, len(positions))
            stripped.append((position, value.tensor.shape, value.box, value.local_offset))
        elif hasattr(value, "get_blocks") and not isinstance(value, type):  # a rule in a rule
            stripped.append(_get_signature(cast(Rule, value)))
        else:
            stripped.append(_strip_names(value, positions) if isinstance(value, tuple) else value)
    return tuple(stripped)


def assign_hosts(
    overlap: NDArray[np.int64], allowed: NDArray[np.bool_] | None = None
) -> tuple[int, ...]:
    """Assign each generation rank the device of a training rank, so that most bytes stay local.

    Solves the maximum-weight assignment.

    Args:
        overlap: [generation ranks, training ranks], bytes of TransferRequirements.compute_overlap.
        allowed: [generation ranks, training ranks], pairs that may share a device.

    Returns:
        The training rank for each generation rank.

    Raises:
        ConfigError: There are fewer training ranks, or there is no assignment of allowed pairs.
    """
    num_generation, num_training = overlap.shape
    if num_generation > num_training:
        raise ConfigError(
            f"{num_generation} generation ranks on the devices of {num_training} training ranks; "
            "allowed: at most as many"
        )
    if allowed is not None:
        overlap = np.where(allowed, overlap, -1 - overlap.sum())
    # scipy is avoided: if it is installed, transformers and vLLM import much of it, a tenth of all
    # imports of a server's processes.
    _, columns, _ = lap.lapjv(-overlap.astype(np.float64), extend_cost=True)
    hosts = tuple(columns.tolist())
    for rank, host in enumerate(hosts):
        if allowed is not None and not allowed[rank, host]:
            raise ConfigError(
                f"generation rank {rank} runs where there are fewer training ranks than generation "
                "ranks; allowed: a training rank for each"
            )
    return hosts
