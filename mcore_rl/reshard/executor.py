"""Executing a plan: pack, exchange and hand over buckets, in memory that does not grow.

A device that trains and a device that generates run the same loop, and one that does both runs it
once. It needs no collective. While a bucket is with its consumer, the next one is on its way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from mcore_rl.reshard import ops
from mcore_rl.reshard.buckets import ALIGNMENT, Landing, Message, Part, Round, Step
from mcore_rl.reshard.transport import Pending, Transfer, Transport

Allocate = Callable[[int], torch.Tensor]  # bytes -> [bytes] uint8 on the device


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """A training rank's parameters by the names of TrainingRanks: "chunk:name"."""

    stored: dict[str, torch.Tensor]
    # What is made when it is asked for, and dropped again: weights merged with their adapters.
    # Each is made once for every message that has a part of it; in memory is one at a time.
    formed: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A box that has arrived: goes to `offset` of a parameter of this generation rank."""

    target: str
    offset: tuple[int, ...]
    data: torch.Tensor  # a view into the bucket


@dataclass(frozen=True, slots=True)
class Bucket:
    """Boxes to be placed at once: the memory is overwritten after the next step of the iterator.

    Over all buckets each element of a parameter comes exactly once, but for padding of the
    vocabulary: rows that no box covers are the consumer's to set to zero.
    """

    index: int
    memory: torch.Tensor  # [bytes] uint8
    landings: tuple[Landing, ...]
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Arrival]:
        for landing in self.landings:
            for part in landing.message.parts:
                data = _view(self.memory, landing.offset, part, self.dtype)
                yield Arrival(part.target, part.target_offset, data)


class Exchange:
    """One device's share of a plan, to be run once a version.

    Memory: two buckets that are filled in turn, and as much again for messages on their way out.
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
            dtype: of weights on their way. Those kept in float32 travel in that.
            allocate: called at the beginning of each run: for the outbox, unless there is nothing
                to send; for the two buckets, unless there is nothing to receive. Where another
                process reads the buckets, the memory that it shares.
        """
        self._rounds, self._bucket_bytes = rounds, bucket_bytes
        self._dtype, self._transport, self._allocate = dtype, transport, allocate

    def run(self, weights: LocalWeights) -> Iterator[Bucket]:
        """Send what others lack, and yield what this device's generation rank needs.

        The iterator must be exhausted, on devices without a generation rank too, where it is empty.
        Peers of a device that stops early run into their timeouts.

        Raises:
            ReshardError: a peer is gone, or made no move in the transport's time.
            KeyError: the rules name a parameter that `weights` lack.
        """
        buckets, outbox = self._buckets(), self._outbox()
        arriving: list[Pending] = []
        for index, current in enumerate(self._rounds):
            begun = self._begin(current, buckets[index % 2], outbox, weights)
            if index:
                yield from self._arrived(index - 1, arriving, buckets)
            arriving = begun
        if self._rounds:
            yield from self._arrived(len(self._rounds) - 1, arriving, buckets)
        outbox.wait()

    def _buckets(self) -> list[torch.Tensor]:
        sizes = [0, 0]
        for index, current in enumerate(self._rounds):
            sizes[index % 2] = max(sizes[index % 2], current.num_bytes)
        return [self._allocate(size) if size else torch.empty(0) for size in sizes]

    def _outbox(self) -> _Outbox:
        steps = [step for current in self._rounds for step in current.steps]
        total = sum(_aligned(step.send[1].num_bytes) for step in steps if step.send is not None)
        size = min(total, 2 * self._bucket_bytes)
        return _Outbox(self._allocate(size) if size else torch.empty(0))

    def _begin(
        self, current: Round, memory: torch.Tensor, outbox: _Outbox, weights: LocalWeights
    ) -> list[Pending]:
        """Begin all transfers of a round; the messages into its bucket that are on their way."""
        arriving: list[Pending] = []
        receives = [self._receive(step, memory) for step in current.steps]
        if not self._transport.is_ordered:  # peers need not wait until we have sent
            arriving += self._transport.start([one for one in receives if one is not None])
        for step, receive in zip(current.steps, receives, strict=True):
            transfers = []
            if self._transport.is_ordered and receive is not None:
                transfers.append(receive)
            if step.send is not None:
                peer, message = step.send
                data = outbox.room(message.num_bytes)
                self._pack(message, data, weights)
                transfers.append(Transfer(peer, data, message.bucket, is_send=True))
            for transfer, pending in zip(transfers, self._transport.start(transfers), strict=True):
                if transfer.is_send:
                    outbox.leaving(transfer.data, pending)
                else:
                    arriving.append(pending)
        for landing in current.own:
            self._pack(landing.message, memory[landing.offset :], weights)
        return arriving

    def _receive(self, step: Step, memory: torch.Tensor) -> Transfer | None:
        if step.receive is None:
            return None
        peer, landing = step.receive
        message = landing.message
        data = memory[landing.offset : landing.offset + message.num_bytes]
        return Transfer(peer, data, message.bucket, is_send=False)

    def _pack(self, message: Message, memory: torch.Tensor, weights: LocalWeights) -> None:
        """Cast and copy the parts of a message, one behind the other."""
        stored = []
        for name, parts in itertools.groupby(message.parts, key=lambda part: part.source):
            if name in weights.formed:
                formed = weights.formed[name]()
                with plain_torch():
                    ops.copy_boxes(self._pairs(formed, parts, memory))
            else:
                with plain_torch():
                    stored += self._pairs(weights.stored[name], parts, memory)
        with plain_torch():
            ops.copy_boxes(stored)

    def _pairs(
        self, tensor: torch.Tensor, parts: Iterator[Part], memory: torch.Tensor
    ) -> list[ops.Pair]:
        return [
            (_box(tensor, part.source_offset, part.sizes), _view(memory, 0, part, self._dtype))
            for part in parts
        ]

    def _arrived(
        self, index: int, arriving: list[Pending], buckets: list[torch.Tensor]
    ) -> Iterator[Bucket]:
        current = self._rounds[index]
        for pending in arriving:
            pending.wait()
        if current.num_bytes:
            memory = buckets[index % 2][: current.num_bytes]
            yield Bucket(index, memory, current.landings, self._dtype)


def plain_torch() -> AbstractContextManager[None]:
    """Without torch function modes, which look at each of the thousands of views of an exchange.

    On the CPU the engine has one that lets "cuda" mean the CPU: three quarters of a rank's time.
    """
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


class _Outbox:
    """Memory for messages on their way out, used in a ring: the oldest makes room."""

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

    def leaving(self, data: torch.Tensor, pending: Pending) -> None:
        start = data.data_ptr() - self._memory.data_ptr()
        self._leaving.append((start, start + data.numel(), pending))

    def wait(self) -> None:
        while self._leaving:
            self._leaving.popleft()[2].wait()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _box(tensor: torch.Tensor, offset: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]


def _view(memory: torch.Tensor, offset: int, part: Part, dtype: torch.dtype) -> torch.Tensor:
    start = offset + part.start
    kept = dtype if part.itemsize == dtype.itemsize else torch.float32
    return memory[start : start + part.num_bytes].view(kept).view(part.sizes)
