"""Executing a plan: pack, exchange and pass on buckets, in bounded memory.

Training devices and generation devices run the same loop; a device that does both runs it
once. It needs no collective. While a bucket is consumed, the next one is exchanged.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mcore_rl.reshard import ops
from mcore_rl.reshard.buckets import ALIGNMENT, Message, Part, ReceiveSlot, Round, Step
from mcore_rl.reshard.transport import Pending, Transfer, Transport

Allocate = Callable[[int], torch.Tensor]  # bytes -> [bytes] uint8 on the device
IsChecked = Callable[[str], bool]  # by the name of a generation rank's parameter


def unchecked(_: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """A training rank's parameters by the names of TrainingRanks: "chunk:name"."""

    stored: dict[str, torch.Tensor]
    # What is made when it is asked for, and dropped again: weights merged with their adapters.
    # Each is made once for every message that has a part of it; in memory is one at a time.
    formed: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReceivedSlice:
    """A box that has arrived: goes to `offset` of a parameter of this generation rank."""

    target: str
    offset: tuple[int, ...]
    data: torch.Tensor  # a view into the bucket
    source_rank: int  # training rank
    checksum: int | None = None  # of the box at its source; None: not requested


@dataclass(frozen=True, slots=True)
class Bucket:
    """Boxes to copy immediately: the next step of the iterator overwrites the memory.

    Over all buckets each element of a parameter comes exactly once, but for padding of the
    vocabulary: rows that no box covers are the consumer's to set to zero.
    """

    index: int
    memory: torch.Tensor  # [bytes] uint8
    slots: tuple[ReceiveSlot, ...]
    dtype: torch.dtype
    is_checked: IsChecked
    checksums: dict[int, torch.Tensor]  # by training rank: int64, of the parts of its message

    @property
    def parts(self) -> Iterator[Part]:
        """What it is made of, in the order of its arrivals."""
        return itertools.chain.from_iterable(slot.message.parts for slot in self.slots)

    def __iter__(self) -> Iterator[ReceivedSlice]:
        values = [
            self.checksums[slot.message.source_rank]
            for slot in self.slots
            if slot.message.source_rank in self.checksums
        ]
        checksums = iter(torch.cat(values).tolist() if values else ())  # a GPU is read once
        for slot in self.slots:
            source = slot.message.source_rank
            memory = _memory_of(slot, self.memory)
            for part in slot.message.parts:
                data = _view(memory, part, self.dtype)
                checksum = next(checksums) if self.is_checked(part.target) else None
                yield ReceivedSlice(part.target, part.target_offset, data, source, checksum)


class Exchange:
    """One device's share of a plan, to be run once a version.

    Memory: two buckets that are filled in turn, and as much again for outgoing messages.
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        bucket_bytes: int,
        dtype: torch.dtype,
        transport: Transport,
        allocate: Allocate,
    ) -> None:
        """
        Args:
            rounds: of buckets.schedule, with the same `bucket_bytes`.
            dtype: in which weights are sent. Those kept in float32 are sent in float32.
            allocate: called at the beginning of each run for the outbox, unless there is nothing to
                send.
        """
        self._rounds, self._bucket_bytes = rounds, bucket_bytes
        self._dtype, self._transport, self._allocate = dtype, transport, allocate
        self._layouts: dict[tuple[int, int, int], ops.BoxLayout] = {}  # of the messages packed here

    def run(
        self,
        weights: LocalWeights,
        allocate_bucket: Allocate,
        is_checked: IsChecked = unchecked,
    ) -> Iterator[Bucket]:
        """Send what others lack, and yield what this device's generation rank needs.

        `allocate_bucket` is called for the two buckets, unless there is nothing to receive: where
        another process reads them, it gives memory that both share. Boxes of the parameters that
        `is_checked` names come with the checksum of what they were made from; all devices must
        be given the same.

        The iterator must be exhausted, on devices without a generation rank too, where it is empty.
        Peers of a device that stops early run into their timeouts.

        Raises:
            ReshardError: a peer is gone, or made no move in the transport's time.
            KeyError: the rules name a parameter that `weights` lack.
        """
        buckets, outbox = self._buckets(allocate_bucket), self._outbox()
        before = None
        for index, current in enumerate(self._rounds):
            memory = buckets[index % 2][: current.num_bytes]
            bucket = Bucket(index, memory, current.slots, self._dtype, is_checked, {})
            begun = bucket, self._begin(current, bucket, outbox, weights)
            if before is not None:
                yield from _arrived(*before)
            before = begun
        if before is not None:
            yield from _arrived(*before)
        outbox.wait()

    def _buckets(self, allocate: Allocate) -> list[torch.Tensor]:
        sizes = [0, 0]
        for index, current in enumerate(self._rounds):
            sizes[index % 2] = max(sizes[index % 2], current.num_bytes)
        return [allocate(size) if size else torch.empty(0) for size in sizes]

    def _outbox(self) -> _Outbox:
        steps = [step for current in self._rounds for step in current.steps]
        total = sum(_aligned(step.send[1].num_bytes) for step in steps if step.send is not None)
        size = min(total, 2 * self._bucket_bytes)
        return _Outbox(self._allocate(size) if size else torch.empty(0))

    def _begin(
        self, current: Round, bucket: Bucket, outbox: _Outbox, weights: LocalWeights
    ) -> list[Pending]:
        """Begin all transfers of a round; the incoming messages of its bucket."""
        arriving: list[Pending] = []
        receives = [self._receive(step, bucket) for step in current.steps]
        if not self._transport.is_ordered:  # peers need not wait until we have sent
            arriving += self._transport.start([one for some in receives for one in some])
        for step, receive in zip(current.steps, receives, strict=True):
            transfers = list(receive) if self._transport.is_ordered else []
            if step.send is not None:
                peer, message = step.send
                data = outbox.room(message.num_bytes)
                checksums = self._pack(message, data, weights, bucket.is_checked)
                transfers.append(Transfer(peer, data, message.bucket, is_send=True))
                if checksums is not None:
                    data = checksums.view(torch.uint8)
                    transfers.append(Transfer(peer, data, message.bucket, True, is_checksums=True))
            for transfer, pending in zip(transfers, self._transport.start(transfers), strict=True):
                if transfer.is_send:
                    outbox.leaving(transfer, pending)
                else:
                    arriving.append(pending)
        for slot in current.own:
            memory = _memory_of(slot, bucket.memory)
            checksums = self._pack(slot.message, memory, weights, bucket.is_checked)
            if checksums is not None:
                bucket.checksums[slot.message.source_rank] = checksums
        return arriving

    def _receive(self, step: Step, bucket: Bucket) -> list[Transfer]:
        if step.receive is None:
            return []
        peer, slot = step.receive
        message = slot.message
        data = _memory_of(slot, bucket.memory)
        transfers = [Transfer(peer, data, message.bucket, is_send=False)]
        if num_checked := sum(bucket.is_checked(part.target) for part in message.parts):
            checksums = torch.empty(num_checked, dtype=torch.int64, device=data.device)
            bucket.checksums[message.source_rank] = checksums
            data = checksums.view(torch.uint8)
            transfers.append(Transfer(peer, data, message.bucket, False, is_checksums=True))
        return transfers

    def _pack(
        self,
        message: Message,
        memory: torch.Tensor,
        weights: LocalWeights,
        is_checked: IsChecked,
    ) -> torch.Tensor | None:
        """Cast and copy the parts of a message, one behind the other.

        Returns:
            The checksums of the sources, int64 on their device; None if no part is checked.
        """
        self._pack_stored(message, memory, weights)
        checksums: list[torch.Tensor] = []
        stored: list[tuple[torch.Tensor, torch.dtype]] = []  # boxes for one launch
        for name, group in itertools.groupby(message.parts, key=lambda part: part.source):
            parts = list(group)
            is_formed = name in weights.formed
            checked = [part for part in parts if is_checked(part.target)]
            if not is_formed and not checked:
                continue
            tensor = weights.formed[name]() if is_formed else weights.stored[name]
            boxes = [(_box(tensor, part), _dtype_of(part, self._dtype)) for part in checked]
            if not is_formed:
                stored += boxes
                continue
            ops.copy_boxes((_box(tensor, p), _view(memory, p, self._dtype)) for p in parts)
            if boxes:  # while the tensor is there, and in the order of the parts
                checksums += [ops.compute_checksums(some) for some in (stored, boxes) if some]
                stored = []
        if stored:
            checksums.append(ops.compute_checksums(stored))
        return torch.cat(checksums) if checksums else None

    def _pack_stored(self, message: Message, memory: torch.Tensor, weights: LocalWeights) -> None:
        parts = [part for part in message.parts if part.source not in weights.formed]
        names = dict.fromkeys(part.source for part in parts)
        tensors = [memory, *(weights.stored[name] for name in names)]
        key = message.bucket, message.source_rank, message.target_rank
        if key not in self._layouts:
            pairs = [
                (_box(weights.stored[part.source], part), _view(memory, part, self._dtype))
                for part in parts
            ]
            self._layouts[key] = ops.BoxLayout(pairs, tensors)
        self._layouts[key].run(tensors)


def _arrived(bucket: Bucket, arriving: list[Pending]) -> Iterator[Bucket]:
    for pending in arriving:
        pending.wait()
    if bucket.memory.numel():
        yield bucket


class _Outbox:
    """A ring buffer for outgoing messages: the oldest is reused."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._end = 0  # of the newest
        self._leaving: deque[tuple[int, int, Pending]] = deque()

    def room(self, num_bytes: int) -> torch.Tensor:
        """Memory for a message; waits until the ones that were there have left."""
        start = self._end if self._end + num_bytes <= self._memory.numel() else 0
        stop = start + num_bytes
        while any(first < stop and start < last for first, last, _ in self._leaving):
            self._leaving.popleft()[2].wait()
        self._end = _aligned(stop)
        return self._memory[start:stop]

    def leaving(self, transfer: Transfer, pending: Pending) -> None:
        start, end = 0, 0  # of checksums, which use separate memory
        if not transfer.is_checksums:
            start = transfer.data.data_ptr() - self._memory.data_ptr()
            end = start + transfer.data.numel()
        self._leaving.append((start, end, pending))

    def wait(self) -> None:
        while self._leaving:
            self._leaving.popleft()[2].wait()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _box(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return ops.box_of(tensor, part.source_offset, part.sizes)


def _view(memory: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """The place of a part in the memory of its message."""
    bytes_of_part = memory[part.start : part.start + part.num_bytes]
    return bytes_of_part.view(_dtype_of(part, dtype)).view(part.sizes)


def _dtype_of(part: Part, dtype: torch.dtype) -> torch.dtype:
    """On its way, where weights travel in `dtype`."""
    return dtype if part.itemsize == dtype.itemsize else torch.float32


def _memory_of(slot: ReceiveSlot, bucket: torch.Tensor) -> torch.Tensor:
    return bucket[slot.offset : slot.offset + slot.message.num_bytes]
