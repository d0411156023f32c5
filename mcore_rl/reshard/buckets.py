"""Buckets: a plan as messages of bounded bytes, and the order in which devices exchange them. Pure.

A generation rank receives one stream of bytes, parameter by parameter in vLLM's order, and
bucket k is the k-th `bucket_bytes` of it. Offsets in a stream are prefix sums over the tensor
groups of the plan. So a sender finds the messages of its own tensors without
expanding what others send, and both sides compute the same messages without communication.

Receivers take the model in different orders. Each starts at another layer, and in a layer at
another expert, and wraps around. If all started at the first, all would receive from the same few
ranks at a time: DeepSeek-V3 from PP16xEP16 to TP32 would take 84 times as long as its receivers
need at full speed; this way it takes 2.9 times (busiest sender of each round, 128 MiB buckets).
The tensors of a layer stay together, and so do the experts of a layer.
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
from mcore_rl.reshard.planner import Plan, TransferOp
from mcore_rl.reshard.tensor_groups import Member

ALIGNMENT = 16  # bytes; of copies in a stream, and of messages in a bucket
_GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples, without whole turns, spread evenly
Offset = tuple[int, ...]


class Part(NamedTuple):  # of which there are many: cheaper to make than a dataclass
    """One box in a message: rows one behind the other, `start` bytes from the message's begin."""

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
    """What one training rank adds to one bucket of a generation rank. No bytes between parts."""

    bucket: int
    source_rank: int
    target_rank: int
    parts: tuple[Part, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReceiveSlot:
    """A message, and the byte of its bucket at which it begins."""

    message: Message
    offset: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a device does at the same time: at most one message out and one message in."""

    send: tuple[int, Message] | None  # the other device, and what goes there
    receive: tuple[int, ReceiveSlot] | None


@dataclass(frozen=True, slots=True)
class Round:
    """What a device does for all buckets of one number.

    In step n each device sends to the n-th device after it. Devices take rounds and steps in this
    order, so whatever the first step is that is not done, all that it needs of others has begun:
    no order of arrival leads to a deadlock.
    """

    steps: tuple[Step, ...]
    own: tuple[ReceiveSlot, ...]  # from the device itself: never on a network
    num_bytes: int  # of the bucket that comes together here; 0: none

    @property
    def slots(self) -> tuple[ReceiveSlot, ...]:
        """All that the bucket is made of, in the order of their bytes."""
        received = [step.receive[1] for step in self.steps if step.receive is not None]
        return tuple(sorted((*self.own, *received), key=lambda slot: slot.offset))


def peers_of(rounds: Sequence[Round]) -> list[int]:
    """The other devices that a device exchanges messages with in these rounds, ascending."""
    steps = [step for round_ in rounds for step in round_.steps]
    return sorted({end[0] for step in steps for end in (step.send, step.receive) if end})


class Streams:
    """The streams of all generation ranks of a plan, cut into buckets."""

    def __init__(self, plan: Plan, bucket_bytes: int) -> None:
        """Raises ConfigError for a size of buckets that nothing fits into."""
        if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
            raise ConfigError(
                f"buckets of {bucket_bytes} bytes; allowed: multiples of {ALIGNMENT}, at least one"
            )
        self.plan, self.bucket_bytes = plan, bucket_bytes
        places = sorted(
            (member.order, number, index)
            for number, kind in enumerate(plan.kinds)
            for index, member in enumerate(kind.members)
        )
        self._kind_of_place = np.array([number for _, number, _ in places], np.int64)
        # By kind, the place of each of its members in every stream.
        self._places = [np.empty(len(kind.members), np.int64) for kind in plan.kinds]
        for place, (_, number, index) in enumerate(places):
            self._places[number][index] = place
        targets = [plan.kinds[number].members[i].targets[0] for _, number, i in places]
        self._layers = np.unique(_runs([_layer(target) for target in targets])[0])
        experts = [_layer(t) if t.endswith("]") else str(n) for n, t in enumerate(targets)]
        self._firsts, self._run_lengths = _runs(experts)
        # [kinds, generation ranks]: bytes of one member, with those that align its copies.
        self._sizes = np.zeros((len(plan.kinds), len(plan.devices.generation)), np.int64)
        for number, kind in enumerate(plan.kinds):
            for cut in kind.cuts:
                size = _aligned(cut.box.numel * kind.itemsize)
                self._sizes[number, list(cut.source_of)] += size

    def messages_from(self, training_rank: int) -> list[Message]:
        """All that the rank sends, to its own device too."""
        return self._messages(self._cuts(source=training_rank))

    def messages_into(self, generation_rank: int) -> list[Message]:
        """All that the rank receives, from its own device too."""
        return self._messages(self._cuts(target=generation_rank))

    def _cuts(self, source: int | None = None, target: int | None = None) -> Iterator[_PlacedCut]:
        """Those out of a training rank, or into a generation rank."""
        for number, kind in enumerate(self.plan.kinds):
            ends = [0] * len(self.plan.devices.generation)
            for cut in kind.cuts:
                num_bytes = cut.box.numel * kind.itemsize
                size = _aligned(num_bytes)
                for to, by in cut.source_of.items():
                    if by == source or to == target:
                        yield _PlacedCut(number, cut, by, to, ends[to], num_bytes)
                    ends[to] += size

    def _starts(self, generation_rank: int) -> NDArray[np.int64]:
        """[places]: first byte of each tensor in the rank's stream."""
        sizes = self._sizes[self._kind_of_place, generation_rank]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        # The experts of a layer, which are in [begins, begins + lengths), turned around.
        begins = starts[self._firsts]
        lengths = ends[self._firsts + self._run_lengths - 1] - begins
        turn = generation_rank * _GOLDEN_RATIO % 1
        firsts = starts[self._firsts + (turn * self._run_lengths).astype(np.int64)]
        starts = begins + (starts - firsts) % np.maximum(lengths, 1)
        # All layers, turned around.
        share = generation_rank / len(self.plan.devices.generation)
        first = begins[self._layers[int(share * len(self._layers))]]
        turned: NDArray[np.int64] = (starts - first) % max(1, ends[-1])
        return turned

    def _messages(self, cuts: Iterable[_PlacedCut]) -> list[Message]:
        by_target: dict[int, list[_PlacedCut]] = defaultdict(list)
        for placed in cuts:
            by_target[placed.target].append(placed)
        found: dict[tuple[int, int, int], list[_Piece]] = defaultdict(list)
        for target, wanted in by_target.items():
            starts = self._starts(target)
            for placed in wanted:
                begins = starts[self._places[placed.kind]] + placed.start
                for bucket, piece in self._pieces(placed, begins):
                    found[bucket, placed.source, target].append(piece)
        return [_message(*key, pieces) for key, pieces in sorted(found.items())]

    def _pieces(
        self, placed: _PlacedCut, begins: NDArray[np.int64]
    ) -> Iterator[tuple[int, _Piece]]:
        """One cut of every member of its kind, by bucket."""
        cut, num_bytes, kind = placed.cut, placed.num_bytes, self.plan.kinds[placed.kind]
        itemsize, whole = kind.itemsize, cut.box.sizes
        firsts = begins // self.bucket_bytes
        lasts = (begins + num_bytes - 1) // self.bucket_bytes
        columns = (begins.tolist(), firsts.tolist(), lasts.tolist())
        for member, begin, first, last in zip(kind.members, *columns, strict=True):
            if first == last:
                yield first, (-itemsize, begin, cut, member, None, whole)
                continue
            for bucket in range(first, last + 1):
                start = max(0, bucket * self.bucket_bytes - begin)
                stop = min(num_bytes, (bucket + 1) * self.bucket_bytes - begin)
                for offset, sizes in boxes_of(whole, start // itemsize, stop // itemsize):
                    yield bucket, (-itemsize, begin + start, cut, member, offset, sizes)
                    start += math.prod(sizes) * itemsize


class _PlacedCut(NamedTuple):
    """A cut on its way between two ranks."""

    kind: int
    cut: TransferOp
    source: int
    target: int
    start: int  # its byte among those of a member that go to this target
    num_bytes: int  # of one member


# A box of a member: (minus the size of an element, byte in the stream, cut, member, offset in the
# cut or None for all of it, sizes). In a message they are sorted: wider elements first, so that all
# are aligned to their size.
_Piece = tuple[int, int, TransferOp, Member, Offset | None, tuple[int, ...]]


def _message(bucket: int, source: int, target: int, pieces: list[_Piece]) -> Message:
    pieces.sort(key=lambda piece: piece[:2])
    parts: list[Part] = []
    end = 0
    for minus_itemsize, _, cut, member, offset, sizes in pieces:
        source_offset, target_offset = cut.source_offset, cut.target_offset
        if offset is not None:
            source_offset = tuple(map(int.__add__, source_offset, offset))
            target_offset = tuple(map(int.__add__, target_offset, offset))
        names = member.sources[cut.source], member.targets[cut.target]
        part = Part(names[0], source_offset, names[1], target_offset, sizes, -minus_itemsize, end)
        if parts and _continues(part, parts[-1]):  # as rows of up do those of gate
            rows = parts[-1].sizes[0] + sizes[0]
            parts[-1] = parts[-1]._replace(sizes=(rows, *sizes[1:]))
        else:
            parts.append(part)
        end += part.num_bytes
    return Message(bucket, source, target, tuple(parts), end)


def _continues(part: Part, before: Part) -> bool:
    """Whether the two are one box, at both ends."""
    if (part.source, part.target, part.itemsize) != (before.source, before.target, before.itemsize):
        return False
    if not part.sizes or part.sizes[1:] != before.sizes[1:]:
        return False
    offsets = (before.source_offset, part.source_offset), (before.target_offset, part.target_offset)
    return all(new[0] == old[0] + before.sizes[0] and new[1:] == old[1:] for old, new in offsets)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _layer(target: str) -> str:
    """The name up to the number of the layer; all of it outside of the layers."""
    words = target.split(".")
    end = next((n for n, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[: end + 1])


def _runs(names: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[places]: the first place of its run of equal names, and the places in that run."""
    firsts: list[int] = []
    for place, name in enumerate(names):
        is_same = place > 0 and names[place - 1] == name
        firsts.append(firsts[-1] if is_same else place)
    found = np.array(firsts, np.int64)
    _, of_place, lengths = np.unique(found, return_inverse=True, return_counts=True)
    return found, lengths[of_place]


def boxes_of(
    sizes: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, sizes) of boxes that together are elements [start, stop) of a box, row by row.

    At most two for each dim and one more.

    >>> list(boxes_of((4, 8), 5, 24))
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
        yield from _in_row(first, sizes[1:], head, tail)
        return
    if head:
        yield from _in_row(first, sizes[1:], head, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    yield from _in_row(last, sizes[1:], 0, tail)


def _in_row(
    row: int, sizes: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, part in boxes_of(sizes, start, stop):
        yield (row, *offset), (1, *part)


def schedule(plan: Plan, device: int, bucket_bytes: int) -> tuple[Round, ...]:
    """What a device does in an exchange, as a sender, a receiver or both.

    `bucket_bytes` bounds a bucket and a message. All devices must be given the same.

    Raises:
        ConfigError: nothing fits into such a bucket.
    """
    streams, devices = Streams(plan, bucket_bytes), plan.devices
    num_devices = max(*devices.training, *devices.generation) + 1
    out: list[Message] = []
    into: list[Message] = []
    if device in devices.training:
        out = streams.messages_from(devices.training.index(device))
    if device in devices.generation:
        into = streams.messages_into(devices.generation.index(device))
    sends: dict[int, dict[int, tuple[int, Message]]] = defaultdict(dict)
    receives: dict[int, dict[int, tuple[int, ReceiveSlot]]] = defaultdict(dict)
    own: dict[int, list[ReceiveSlot]] = defaultdict(list)
    ends: dict[int, int] = defaultdict(int)
    for message in out:
        if (there := devices.generation[message.target_rank]) != device:
            sends[message.bucket][(there - device) % num_devices] = there, message
    for message in into:
        slot = ReceiveSlot(message, ends[message.bucket])
        ends[message.bucket] += _aligned(message.num_bytes)
        if (there := devices.training[message.source_rank]) != device:
            receives[message.bucket][(device - there) % num_devices] = there, slot
        else:
            own[message.bucket].append(slot)
    num_rounds = 1 + max((*sends, *receives, *own), default=-1)
    return tuple(
        Round(
            tuple(
                Step(sends[n].get(distance), receives[n].get(distance))
                for distance in sorted({*sends[n], *receives[n]})
            ),
            tuple(own[n]),
            ends[n],
        )
        for n in range(num_rounds)
    )
