"""Executing a plan: pack, exchange and unpack buckets, in bounded memory.

Training devices and generation devices run the same loop; a device that has a rank of each runs it
once. It needs no collective. While a bucket is consumed, the next one is exchanged.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from mcore_rl.config.errors import PeerError
from mcore_rl.reshard import ops
from mcore_rl.reshard.buckets import Message, Part, ReceiveSlot, Round, Step, align
from mcore_rl.reshard.float8 import BLOCK, SCALE_SUFFIX, add_scale_suffix

c10d: Any = torch.distributed  # its groups have no type stubs
Allocate = Callable[[int], torch.Tensor]  # bytes -> [bytes] uint8 on the device
IsChecked = Callable[[str], bool]  # whether a parameter of a generation rank is verified, by name
Group = Any  # a dist.ProcessGroup, or a bare ProcessGroupGloo or ProcessGroupNCCL


class ReshardError(PeerError):
    """An exchange that failed; the message names rank, peer and bucket."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message to or from a device, in memory of this device."""

    peer: int  # device
    data: torch.Tensor  # [bytes] uint8, contiguous
    bucket: int
    is_send: bool
    is_checksums: bool = False  # of the bucket's message; not counted as weights


class Pending(Protocol):
    """A transfer in progress; its memory must not be used until wait() has returned."""

    def wait(self) -> None:
        """Wait for the transfer; raise ReshardError if the peer is gone or makes no progress."""


class MessageTransport(Protocol):
    """Point-to-point messages. Device d of a plan is rank d. Messages of two devices stay in order.

    Attributes:
        is_ordered: Whether a transfer waits for those started before it. Then the transfers of a
            step must start together, in the order of the schedule, or devices deadlock.
    """

    is_ordered: bool
    sent_bytes: int
    received_bytes: int

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        """Start transfers that must run concurrently."""


def check_nothing(_: str) -> bool:
    """Verify no parameter."""
    return False


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """Parameters of a training rank, by the names of TrainingRanks: "chunk:name".

    Attributes:
        stored: Parameters in memory.
        computed: Parameters that are computed on demand and released: weights merged with their
            LoRA adapters. Each is computed once per message that contains a part of it; one is in
            memory at a time.
    """

    stored: dict[str, torch.Tensor]
    computed: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReceivedSlice:
    """A received box, for `offset` of a parameter of this generation rank."""

    target: str
    offset: tuple[int, ...]
    data: torch.Tensor  # a view into the bucket
    source_rank: int  # training rank
    checksum: int | None = None  # of the box on the training rank; None: not verified

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box of the parameter that the data is for."""
        pairs = zip(self.offset, self.data.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Received boxes. Copy them before the next bucket, which overwrites the memory.

    Over all buckets each element of a parameter occurs exactly once, except for padding of the
    vocabulary: the consumer sets rows without a box to zero.
    """

    index: int
    memory: torch.Tensor  # [bytes] uint8
    slots: tuple[ReceiveSlot, ...]
    dtype: torch.dtype
    is_checked: IsChecked
    checksums: dict[int, torch.Tensor]  # by training rank: [verified parts of its message] int64

    @property
    def parts(self) -> Iterator[Part]:
        """Parts of all messages, in the order of their slots."""
        return itertools.chain.from_iterable(slot.message.parts for slot in self.slots)

    def __iter__(self) -> Iterator[ReceivedSlice]:
        values = [
            self.checksums[slot.message.source_rank]
            for slot in self.slots
            if slot.message.source_rank in self.checksums
        ]
        checksums = iter(torch.cat(values).tolist() if values else ())  # one copy from the GPU
        for slot in self.slots:
            source = slot.message.source_rank
            memory = _get_slot_memory(slot, self.memory)
            for part in slot.message.parts:
                data = _view_part(memory, part, self.dtype)
                checksum = next(checksums) if self.is_checked(part.target) else None
                yield ReceivedSlice(part.target, part.target_offset, data, source, checksum)


class Exchange:
    """A device's part of a plan, run once per version.

    Memory: two buckets, filled alternately, and as much again for messages to send.
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        bucket_bytes: int,
        dtype: torch.dtype,
        transport: MessageTransport,
        allocate: Allocate,
    ) -> None:
        """Prepare an exchange.

        Args:
            rounds: Result of buckets.schedule with the same `bucket_bytes`.
            dtype: Dtype in which weights are sent; float32 parameters are sent in float32, float8
                parameters as codes and scales.
            allocate: Called at the beginning of each run for the send buffer, if there is anything
                to send.
        """
        self._rounds, self._bucket_bytes = rounds, bucket_bytes
        self._dtype, self._transport, self._allocate = dtype, transport, allocate
        self._layouts: dict[tuple[int, int, int], ops.BoxLayout] = {}  # of messages packed here

    def run(
        self,
        weights: LocalWeights,
        allocate_bucket: Allocate,
        is_checked: IsChecked = check_nothing,
    ) -> Iterator[Bucket]:
        """Send this device's parts, and yield the buckets of its generation rank.

        The iterator must be exhausted, also on devices without a generation rank, where it is
        empty. Peers of a device that stops early run into their timeouts.

        Args:
            allocate_bucket: Called for the two buckets, if there is anything to receive; memory
                that is shared with the process that reads them.
            is_checked: Parameters whose boxes come with a checksum; the same on all devices.

        Raises:
            ReshardError: A peer is gone, or made no progress within the transport's timeout.
            KeyError: The rules name a parameter that `weights` lack.
            ValueError: A parameter that is sent in float8 has values that it cannot represent.
        """
        sources = _Sources(weights)
        buckets, send_buffer = self._allocate_buckets(allocate_bucket), self._allocate_send_buffer()
        previous = None
        for index, current in enumerate(self._rounds):
            memory = buckets[index % 2][: current.num_bytes]
            bucket = Bucket(index, memory, current.slots, self._dtype, is_checked, {})
            started = bucket, self._start_round(current, bucket, send_buffer, sources)
            if previous is not None:
                yield from _wait_for_bucket(*previous)
            previous = started
        if previous is not None:
            yield from _wait_for_bucket(*previous)
        send_buffer.wait()
        sources.check()

    def _allocate_buckets(self, allocate: Allocate) -> list[torch.Tensor]:
        sizes = [0, 0]
        for index, current in enumerate(self._rounds):
            sizes[index % 2] = max(sizes[index % 2], current.num_bytes)
        return [allocate(size) if size else torch.empty(0) for size in sizes]

    def _allocate_send_buffer(self) -> _SendBuffer:
        steps = [step for current in self._rounds for step in current.steps]
        total = sum(align(step.send[1].num_bytes) for step in steps if step.send is not None)
        size = min(total, 2 * self._bucket_bytes)
        return _SendBuffer(self._allocate(size) if size else torch.empty(0))

    def _start_round(
        self, current: Round, bucket: Bucket, send_buffer: _SendBuffer, sources: _Sources
    ) -> list[Pending]:
        """Start all transfers of a round; return those that receive its bucket."""
        receiving: list[Pending] = []
        receives = [self._build_receives(step, bucket) for step in current.steps]
        if not self._transport.is_ordered:  # peers need not wait until this device has sent
            receiving += self._transport.start([*itertools.chain.from_iterable(receives)])
        for step, receive in zip(current.steps, receives, strict=True):
            transfers = list(receive) if self._transport.is_ordered else []
            if step.send is not None:
                peer, message = step.send
                data = send_buffer.allocate(message.num_bytes)
                checksums = self._pack(message, data, sources, bucket.is_checked)
                transfers.append(Transfer(peer, data, message.bucket, is_send=True))
                if checksums is not None:
                    data = checksums.view(torch.uint8)
                    transfers.append(Transfer(peer, data, message.bucket, True, is_checksums=True))
            for transfer, pending in zip(transfers, self._transport.start(transfers), strict=True):
                if transfer.is_send:
                    send_buffer.add_transfer(transfer, pending)
                else:
                    receiving.append(pending)
        for slot in current.local:
            memory = _get_slot_memory(slot, bucket.memory)
            checksums = self._pack(slot.message, memory, sources, bucket.is_checked)
            if checksums is not None:
                bucket.checksums[slot.message.source_rank] = checksums
        return receiving

    def _build_receives(self, step: Step, bucket: Bucket) -> list[Transfer]:
        """Return the transfers that receive the message of a step, and its checksums if any."""
        if step.receive is None:
            return []
        peer, slot = step.receive
        message = slot.message
        data = _get_slot_memory(slot, bucket.memory)
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
        sources: _Sources,
        is_checked: IsChecked,
    ) -> torch.Tensor | None:
        """Quantise or cast the parts of a message, and copy them into memory.

        Returns:
            [verified parts] int64, checksums of the sources on their device, or None.
        """
        quantized = sources.quantize(message)
        self._pack_stored(message, memory, sources, quantized)
        checksums: list[torch.Tensor] = []
        stored: list[tuple[torch.Tensor, torch.dtype]] = []  # boxes for one launch
        for (name, _), group in itertools.groupby(message.parts, key=_get_key):
            parts = list(group)
            is_computed = sources.is_computed(parts[0])
            checked = [part for part in parts if is_checked(part.target)]
            if not is_computed and not checked:
                continue
            tensor = sources.weights.computed[name]() if is_computed else None
            boxes = [
                (
                    sources.get_box(part, quantized, tensor),
                    _get_wire_dtype(part, self._dtype),
                )
                for part in checked
            ]
            if not is_computed:
                stored += boxes
                continue
            ops.copy_boxes(
                (sources.get_box(p, quantized, tensor), _view_part(memory, p, self._dtype))
                for p in parts
            )
            if boxes:  # before the tensor is released, and in the order of the parts
                if stored:
                    checksums.append(ops.compute_checksums(stored))
                checksums.append(ops.compute_checksums(boxes))
                stored = []
        if stored:
            checksums.append(ops.compute_checksums(stored))
        return torch.cat(checksums) if checksums else None

    def _pack_stored(
        self, message: Message, memory: torch.Tensor, sources: _Sources, quantized: _QuantizedBoxes
    ) -> None:
        """Copy the parts of tensors in memory, in one launch per pair of dtypes."""
        parts = [part for part in message.parts if not sources.is_computed(part)]
        names = dict.fromkeys(p.source for p in parts if _get_key(p) not in quantized)
        stored = sources.weights.stored
        boxes = [box for box, _ in quantized.values()]
        tensors = [memory, *(stored[name] for name in names), *boxes]
        key = message.bucket, message.source_rank, message.target_rank
        if key not in self._layouts:
            pairs = [
                (sources.get_box(part, quantized), _view_part(memory, part, self._dtype))
                for part in parts
            ]
            self._layouts[key] = ops.BoxLayout(pairs, tensors)
        self._layouts[key].run(tensors)


# Codes or scales of parameters by _get_key of their parts, and the offset of the first element
# among all codes or scales of the parameter.
_QuantizedBoxes = dict[tuple[str, bool], tuple[torch.Tensor, tuple[int, ...]]]


class _Sources:
    """The tensors of a run that its messages are copied from: parameters, or their float8."""

    def __init__(self, weights: LocalWeights) -> None:
        self.weights = weights
        # Parameters of a message, and whether all of their scales are finite: [] bool.
        self._checks: list[tuple[list[str], torch.Tensor]] = []

    def is_computed(self, part: Part) -> bool:
        """Return whether the part is copied out of a parameter that is computed on demand."""
        return part.source in self.weights.computed and part.itemsize > 1

    def quantize(self, message: Message) -> _QuantizedBoxes:
        """Quantise the blocks of parameters that the float8 parts of a message are in.

        Their memory is that of the parts, and the rest of the blocks that a bucket cuts off.

        Raises:
            KeyError: There is no such parameter.
        """
        quantized: _QuantizedBoxes = {}
        pairs: list[tuple[torch.Tensor, ops.Quantized]] = []
        covers = _cover_parts(message)
        for name, (starts, ends) in covers.items():
            is_computed = name in self.weights.computed
            tensor = self.weights.computed[name]() if is_computed else self.weights.stored[name]
            sizes = [min(e, n) - s for s, e, n in zip(starts, ends, tensor.shape, strict=True)]
            source = ops.narrow_box(tensor, starts, sizes)
            into = ops.allocate_quantized(source)
            if is_computed:  # only one is in memory at a time
                ops.BoxQuantize([(source, into)]).run()
            else:
                pairs.append((source, into))
            quantized[name, True] = into.values, starts
            origin = tuple(start // BLOCK for start in starts)
            quantized[add_scale_suffix(name), False] = into.scales, origin
        if covers:
            ops.BoxQuantize(pairs).run()
            scales = [box.view(-1) for (_, is_codes), (box, _) in quantized.items() if not is_codes]
            self._checks.append((list(covers), torch.cat(scales).isfinite().all()))
        return quantized

    def get_box(
        self, part: Part, quantized: _QuantizedBoxes, tensor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the box of a part; `tensor`: the parameter if it is computed."""
        if (entry := quantized.get(_get_key(part))) is not None:
            box, origin = entry
            offsets = [o - start for o, start in zip(part.source_offset, origin, strict=True)]
            return ops.narrow_box(box, offsets, part.sizes)
        tensor = self.weights.stored[part.source] if tensor is None else tensor
        return ops.narrow_box(tensor, part.source_offset, part.sizes)

    def check(self) -> None:
        """Wait, and raise ValueError if float8 blocks cannot represent a parameter."""
        if not self._checks or all(torch.stack([flag for _, flag in self._checks]).tolist()):
            return
        names = next(names for names, is_finite in self._checks if not is_finite)
        raise ValueError(
            f"one of {', '.join(names)} has a NaN, an infinity or a value too large for float8 "
            "blocks"
        )


def _get_key(part: Part) -> tuple[str, bool]:
    """Return the source of a part, and whether the part is its codes in float8."""
    return part.source, part.itemsize == 1


def _cover_parts(message: Message) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return, by parameter, start and end of a box of complete blocks around its float8 parts.

    An end may be behind that of the parameter.
    """
    covers: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for part in message.parts:
        ends = tuple(o + n for o, n in zip(part.source_offset, part.sizes, strict=True))
        if part.itemsize == 1:
            name = part.source
            starts = tuple(offset // BLOCK * BLOCK for offset in part.source_offset)
            ends = tuple(-(-end // BLOCK) * BLOCK for end in ends)
        elif (name := part.source.removesuffix(SCALE_SUFFIX)) != part.source:
            starts = tuple(offset * BLOCK for offset in part.source_offset)
            ends = tuple(end * BLOCK for end in ends)
        else:
            continue
        if name in covers:
            first, last = covers[name]
            starts, ends = tuple(map(min, first, starts)), tuple(map(max, last, ends))
        covers[name] = starts, ends
    return covers


def _wait_for_bucket(bucket: Bucket, receiving: list[Pending]) -> Iterator[Bucket]:
    """Wait for the transfers of a bucket; yield it unless this device receives nothing in it."""
    for pending in receiving:
        pending.wait()
    if bucket.memory.numel():
        yield bucket


class _SendBuffer:
    """A ring buffer for messages to send."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._end = 0  # of the newest message
        self._transfers: deque[tuple[int, int, Pending]] = deque()  # start, end, transfer

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory for a message; wait until the previous messages in it are sent."""
        start = self._end if self._end + num_bytes <= self._memory.numel() else 0
        stop = start + num_bytes
        while any(first < stop and start < last for first, last, _ in self._transfers):
            self._transfers.popleft()[2].wait()
        self._end = align(stop)
        return self._memory[start:stop]

    def add_transfer(self, transfer: Transfer, pending: Pending) -> None:
        """Add a transfer to wait for before its memory is reused."""
        start, end = 0, 0  # checksums use separate memory
        if not transfer.is_checksums:
            start = transfer.data.data_ptr() - self._memory.data_ptr()
            end = start + transfer.data.numel()
        self._transfers.append((start, end, pending))

    def wait(self) -> None:
        """Wait until all messages are sent."""
        while self._transfers:
            self._transfers.popleft()[2].wait()


def _view_part(memory: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory of a part, in the memory of its message."""
    bytes_of_part = memory[part.start : part.start + part.num_bytes]
    return bytes_of_part.view(_get_wire_dtype(part, dtype)).view(part.sizes)


def _get_wire_dtype(part: Part, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a part is sent, if weights are sent in `dtype`."""
    if part.itemsize == 1:
        return torch.float8_e4m3fn
    return dtype if part.itemsize == dtype.itemsize else torch.float32


def _get_slot_memory(slot: ReceiveSlot, bucket: torch.Tensor) -> torch.Tensor:
    return bucket[slot.offset : slot.offset + slot.message.num_bytes]


class GroupTransport:
    """Messages over gloo or NCCL. The group's ranks are the devices of the plan.

    With NCCL wait() makes the current stream wait for the transfer, not the host; the timeout is
    that of the group's watchdog.
    """

    def __init__(self, group: Group, timeout_s: float, device: torch.device) -> None:
        """Connect all ranks of the group. Collective; `device` is that of this rank."""
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self.rank = self._group.rank()
        self._is_nccl = self._group.name() == "nccl"
        self.is_ordered = self._is_nccl
        self.sent_bytes = self.received_bytes = 0
        # Without, NCCL guesses the device from the rank (ProcessGroupNCCL.cpp, barrier).
        options = c10d.BarrierOptions()
        if self._is_nccl:
            options.device_ids = [device.index or 0]
        self._group.barrier(options).wait()

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        if not transfers:
            return []
        for transfer in transfers:
            if transfer.is_send and not transfer.is_checksums:
                self.sent_bytes += transfer.data.numel()
            elif not transfer.is_checksums:
                self.received_bytes += transfer.data.numel()
        try:
            if self._is_nccl:
                works = self._start_coalesced(transfers)
            else:
                works = [*map(self._start_transfer, transfers)]
        except RuntimeError as error:
            raise self.build_error(transfers[0], error) from error
        return [_Work(self, *pair) for pair in zip(transfers, works, strict=True)]

    def _start_transfer(self, transfer: Transfer) -> Any:
        start = self._group.send if transfer.is_send else self._group.recv
        return start([transfer.data], transfer.peer, 2 * transfer.bucket + transfer.is_checksums)

    def _start_coalesced(self, transfers: Sequence[Transfer]) -> list[Any]:
        """Start one NCCL operation, as torch's batch_isend_irecv does (distributed_c10d.py)."""
        # A dist.ProcessGroup needs the device of its backend; a bare group is a backend.
        is_bare = not isinstance(self._group, c10d.ProcessGroup)
        backend = () if is_bare else (transfers[0].data.device,)
        self._group._start_coalescing(*backend)
        for transfer in transfers:
            self._start_transfer(transfer)
        return [self._group._end_coalescing(*backend)] * len(transfers)

    def wait(self, transfer: Transfer, work: Any) -> None:
        """Wait for a transfer that `start` started."""
        try:
            # With a timeout, NCCL's wait blocks the host until the transfer is done
            # (ProcessGroupNCCL.cpp, WorkNCCL::synchronizeInternal).
            work.wait() if self._is_nccl else work.wait(self._timeout)
        except RuntimeError as error:
            raise self.build_error(transfer, error) from error

    def build_error(self, transfer: Transfer, error: RuntimeError) -> ReshardError:
        """Return the error of a transfer that failed."""
        way = "sending to" if transfer.is_send else "receiving from"
        reason = str(error).splitlines()[0]
        return ReshardError(
            f"rank {self.rank}, {way} rank {transfer.peer}, bucket {transfer.bucket}, "
            f"{transfer.data.numel()} bytes: {reason}"
        )


@dataclass(frozen=True, slots=True)
class _Work:
    transport: GroupTransport
    transfer: Transfer  # keeps the memory alive
    work: Any

    def wait(self) -> None:
        self.transport.wait(self.transfer, self.work)
