"""Buckets: a plan as messages of bounded size, and the schedule of their exchange. No torch.

A generation rank receives one stream of bytes, parameter by parameter in vLLM's order, and
bucket k is the k-th `bucket_bytes` of it. Offsets in a stream are prefix sums over the tensor
groups of the plan. So a sender computes the messages of its tensors without those of other senders,
and both sides compute the same messages without communication.

Each receiver starts its stream at another layer, and in a layer at another expert, and wraps
around. If all started at the first, all would receive from the same few ranks at a time:
DeepSeek-V3 from PP16xEP16 to TP32 would take 84 times as long as its receivers need at full speed;
this way it takes 2.9 times (busiest sender of each round, 128 MiB buckets). The tensors of a layer
stay together, and so do the experts of a layer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.planner import Member, Plan, TransferOp

ALIGNMENT = 16  # bytes; of boxes in a stream, and of messages in a bucket
_GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly
Offset = tuple[int, ...]


class Part(NamedTuple):  # many are created: faster than a dataclass
    """A box in a message: contiguous rows, `start` bytes from the beginning of the message."""

    source: str
    source_offset: Offset
    target: str
    target_offset: Offset
    sizes: tuple[int, ...]
    itemsize: int
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """The parts of a generation rank's bucket that a training rank sends, without gaps."""

    bucket: int
    source_rank: int
    target_rank: int
    parts: tuple[Part, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReceiveSlot:
    """A message, and its offset in the bucket, in bytes."""

    message: Message
    offset: int


@dataclass(frozen=True, slots=True)
class Step:
    """Concurrent transfers of a device: at most one message sent and one received."""

    send: tuple[int, Message] | None  # peer device, message
    receive: tuple[int, ReceiveSlot] | None


@dataclass(frozen=True, slots=True)
class Round:
    """Transfers of a device for the buckets with one index.

    In step n each device sends to the n-th device after it. All devices take rounds and steps in
    this order: the peers of the first step that is not complete have begun it, so no order of
    arrival leads to a deadlock.
    """

    steps: tuple[Step, ...]
    local: tuple[ReceiveSlot, ...]  # copied on the device
    num_bytes: int  # size of the bucket that this device receives; 0: none

    @property
    def slots(self) -> tuple[ReceiveSlot, ...]:
        """Messages of the bucket, in the order of their offsets."""
        received = [step.receive[1] for step in self.steps if step.receive is not None]
        return tuple(sorted((*self.local, *received), key=lambda slot: slot.offset))


def list_peers(rounds: Sequence[Round]) -> list[int]:
    """Return the devices that a device exchanges messages with in these rounds, ascending."""
    steps = [step for round_ in rounds for step in round_.steps]
    return sorted({end[0] for step in steps for end in (step.send, step.receive) if end})


class Streams:
    """Streams of all generation ranks of a plan, split into buckets."""

    def __init__(self, plan: Plan, bucket_bytes: int) -> None:
        """Raise ConfigError if `bucket_bytes` is no multiple of ALIGNMENT."""
        if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
            raise ConfigError(
                f"buckets of {bucket_bytes} bytes; allowed: multiples of {ALIGNMENT}, at least one"
            )
        self.plan, self.bucket_bytes = plan, bucket_bytes
        positions = sorted(
            (member.order, number, index)
            for number, group in enumerate(plan.groups)
            for index, member in enumerate(group.members)
        )
        self._group_of_position = np.array([number for _, number, _ in positions], np.int64)
        # Per group, the position of each of its members in every stream.
        self._positions = [np.empty(len(group.members), np.int64) for group in plan.groups]
        for position, (_, number, index) in enumerate(positions):
            self._positions[number][index] = position
        targets = [plan.groups[number].members[i].targets[0] for _, number, i in positions]
        self._layers = np.unique(_find_runs([_get_layer_name(target) for target in targets])[0])
        experts = [_get_layer_name(t) if t.endswith("]") else str(n) for n, t in enumerate(targets)]
        self._firsts, self._run_lengths = _find_runs(experts)
        # [groups, generation ranks]: bytes of a member, its boxes aligned.
        self._sizes = np.zeros((len(plan.groups), len(plan.devices.generation)), np.int64)
        for number, group in enumerate(plan.groups):
            for op in group.ops:
                size = align(op.box.numel * group.itemsize)
                self._sizes[number, list(op.source_of)] += size

    def list_sent(self, training_rank: int) -> list[Message]:
        """Return all messages that a rank sends, those to its device included."""
        return self._build_messages(self._list_ops(source=training_rank))

    def list_received(self, generation_rank: int) -> list[Message]:
        """Return all messages that a rank receives, those from its device included."""
        return self._build_messages(self._list_ops(target=generation_rank))

    def _list_ops(
        self, source: int | None = None, target: int | None = None
    ) -> Iterator[_RoutedOp]:
        """Yield the ops from a training rank, or to a generation rank."""
        for number, group in enumerate(self.plan.groups):
            ends = [0] * len(self.plan.devices.generation)
            for op in group.ops:
                num_bytes = op.box.numel * group.itemsize
                size = align(num_bytes)
                for receiver, sender in op.source_of.items():
                    if sender == source or receiver == target:
                        yield _RoutedOp(number, op, sender, receiver, ends[receiver], num_bytes)
                    ends[receiver] += size

    def _compute_starts(self, generation_rank: int) -> NDArray[np.int64]:
        """Return [positions], the first byte of each tensor in the rank's stream."""
        sizes = self._sizes[self._group_of_position, generation_rank]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        # Rotate the experts of each layer, which are in [begins, begins + lengths).
        begins = starts[self._firsts]
        lengths = ends[self._firsts + self._run_lengths - 1] - begins
        rotation = generation_rank * _GOLDEN_RATIO % 1
        firsts = starts[self._firsts + (rotation * self._run_lengths).astype(np.int64)]
        starts = begins + (starts - firsts) % np.maximum(lengths, 1)
        # Rotate the layers.
        rotation = generation_rank / len(self.plan.devices.generation)
        first = begins[self._layers[int(rotation * len(self._layers))]]
        rotated: NDArray[np.int64] = (starts - first) % max(1, ends[-1])
        return rotated

    def _build_messages(self, ops: Iterable[_RoutedOp]) -> list[Message]:
        ops_by_target: dict[int, list[_RoutedOp]] = defaultdict(list)
        for routed in ops:
            ops_by_target[routed.target].append(routed)
        parts: dict[tuple[int, int, int], list[_MessagePart]] = defaultdict(list)
        for target, routed_ops in ops_by_target.items():
            starts = self._compute_starts(target)
            for routed in routed_ops:
                begins = starts[self._positions[routed.group]] + routed.start
                for bucket, part in self._split_op(routed, begins):
                    parts[bucket, routed.source, target].append(part)
        return [_build_message(*key, parts[key]) for key in sorted(parts)]

    def _split_op(
        self, routed: _RoutedOp, begins: NDArray[np.int64]
    ) -> Iterator[tuple[int, _MessagePart]]:
        """Split an op, for every member of its group, by bucket."""
        op, num_bytes, group = routed.op, routed.num_bytes, self.plan.groups[routed.group]
        itemsize, box_sizes = group.itemsize, op.box.sizes
        firsts = begins // self.bucket_bytes
        lasts = (begins + num_bytes - 1) // self.bucket_bytes
        columns = (begins.tolist(), firsts.tolist(), lasts.tolist())
        for member, begin, first, last in zip(group.members, *columns, strict=True):
            if first == last:
                yield first, (-itemsize, begin, op, member, None, box_sizes)
                continue
            for bucket in range(first, last + 1):
                start = max(0, bucket * self.bucket_bytes - begin)
                stop = min(num_bytes, (bucket + 1) * self.bucket_bytes - begin)
                for offset, sizes in split_range(box_sizes, start // itemsize, stop // itemsize):
                    yield bucket, (-itemsize, begin + start, op, member, offset, sizes)
                    start += math.prod(sizes) * itemsize


class _RoutedOp(NamedTuple):
    """An op between two ranks."""

    group: int
    op: TransferOp
    source: int
    target: int
    start: int  # offset among the bytes of a member that go to this target
    num_bytes: int  # of a member


# A box of a member: (-itemsize, offset in the stream, op, member, offset in the op's box or None
# for all of it, sizes). In a message they are sorted: larger items first, so that all are aligned.
_MessagePart = tuple[int, int, TransferOp, Member, Offset | None, tuple[int, ...]]


def _build_message(
    bucket: int, source: int, target: int, message_parts: list[_MessagePart]
) -> Message:
    message_parts.sort(key=lambda part: part[:2])
    parts: list[Part] = []
    end = 0
    for minus_itemsize, _, op, member, offset, sizes in message_parts:
        source_offset, target_offset = op.source_offset, op.target_offset
        if offset is not None:
            source_offset = tuple(map(int.__add__, source_offset, offset))
            target_offset = tuple(map(int.__add__, target_offset, offset))
        names = member.sources[op.source], member.targets[op.target]
        part = Part(names[0], source_offset, names[1], target_offset, sizes, -minus_itemsize, end)
        if parts and _is_continuation(part, parts[-1]):  # as rows of up after those of gate
            rows = parts[-1].sizes[0] + sizes[0]
            parts[-1] = parts[-1]._replace(sizes=(rows, *sizes[1:]))
        else:
            parts.append(part)
        end += part.num_bytes
    return Message(bucket, source, target, tuple(parts), end)


def _is_continuation(part: Part, before: Part) -> bool:
    """Return whether two parts form one box, in the source and in the target."""
    if (part.source, part.target, part.itemsize) != (before.source, before.target, before.itemsize):
        return False
    if not part.sizes or part.sizes[1:] != before.sizes[1:]:
        return False
    offsets = (before.source_offset, part.source_offset), (before.target_offset, part.target_offset)
    return all(new[0] == old[0] + before.sizes[0] and new[1:] == old[1:] for old, new in offsets)


def align(num_bytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _get_layer_name(target: str) -> str:
    """Return a parameter's name up to its layer number; all of it without a number."""
    words = target.split(".")
    end = next((n for n, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[: end + 1])


def _find_runs(names: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [names], the first index of the run of equal names, and the length of that run."""
    first_indices: list[int] = []
    for index, name in enumerate(names):
        is_same = index > 0 and names[index - 1] == name
        first_indices.append(first_indices[-1] if is_same else index)
    firsts = np.array(first_indices, np.int64)
    _, inverse, lengths = np.unique(firsts, return_inverse=True, return_counts=True)
    return firsts, lengths[inverse]


def split_range(
    sizes: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split elements [start, stop) of a box, in row-major order, into (offset, sizes) of boxes.

    At most two per dim and one more.

    >>> list(split_range((4, 8), 5, 24))
    [((0, 5), (1, 3)), ((1, 0), (2, 8))]
    """
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _split_row_range(first, sizes[1:], head, tail)
        return
    if head:
        yield from _split_row_range(first, sizes[1:], head, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    yield from _split_row_range(last, sizes[1:], 0, tail)


def _split_row_range(
    row: int, sizes: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, part in split_range(sizes, start, stop):
        yield (row, *offset), (1, *part)


def schedule(plan: Plan, device: int, bucket_bytes: int) -> tuple[Round, ...]:
    """Return the rounds of a device in an exchange, as a sender, a receiver or both.

    Args:
        bucket_bytes: Maximum size of a bucket and of a message; the same on all devices.

    Raises:
        ConfigError: `bucket_bytes` is no multiple of ALIGNMENT.
    """
    streams, devices = Streams(plan, bucket_bytes), plan.devices
    num_devices = max(*devices.training, *devices.generation) + 1
    sent: list[Message] = []
    received: list[Message] = []
    if device in devices.training:
        sent = streams.list_sent(devices.training.index(device))
    if device in devices.generation:
        received = streams.list_received(devices.generation.index(device))
    sends: dict[int, dict[int, tuple[int, Message]]] = defaultdict(dict)
    receives: dict[int, dict[int, tuple[int, ReceiveSlot]]] = defaultdict(dict)
    local: dict[int, list[ReceiveSlot]] = defaultdict(list)
    ends: dict[int, int] = defaultdict(int)
    for message in sent:
        if (peer := devices.generation[message.target_rank]) != device:
            sends[message.bucket][(peer - device) % num_devices] = peer, message
    for message in received:
        slot = ReceiveSlot(message, ends[message.bucket])
        ends[message.bucket] += align(message.num_bytes)
        if (peer := devices.training[message.source_rank]) != device:
            receives[message.bucket][(device - peer) % num_devices] = peer, slot
        else:
            local[message.bucket].append(slot)
    num_rounds = 1 + max((*sends, *receives, *local), default=-1)
    return tuple(
        Round(
            tuple(
                Step(sends[n].get(distance), receives[n].get(distance))
                for distance in sorted({*sends[n], *receives[n]})
            ),
            tuple(local[n]),
            ends[n],
        )
        for n in range(num_rounds)
    )
