"""Messages of a reshard between devices: point to point in a torch process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from mcore_rl.config.errors import PeerError

c10d: Any = torch.distributed  # whose groups have no type stubs


class ReshardError(PeerError):
    """An exchange that did not come to its end; the message names rank, peer and bucket."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message to or from a device, in memory of this device."""

    peer: int  # device
    data: torch.Tensor  # [bytes] uint8, contiguous
    bucket: int
    is_send: bool
    is_checksums: bool = False  # of the message of the same bucket, and not counted as weights


class Pending(Protocol):
    """A transfer in progress; its memory belongs to it until wait() has returned."""

    def wait(self) -> None:
        """Raises ReshardError when the peer is gone or makes no move."""


class Transport(Protocol):
    """Device d of a plan is rank d here. Transfers between two devices keep their order."""

    # Whether a transfer waits for those that were started before it. Then a message in and one out
    # must start together, in the order of the schedule's steps, or devices wait in a circle.
    is_ordered: bool
    sent_bytes: int
    received_bytes: int

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        """Begin transfers that must run in parallel."""


Group = Any  # a dist.ProcessGroup, or a bare ProcessGroupGloo or ProcessGroupNCCL


class GroupTransport:
    """Over gloo or NCCL. The group's ranks are the devices of the plan.

    On NCCL wait() orders the current stream behind the transfer, and the host goes on; the group's
    watchdog stands in for the timeout.
    """

    def __init__(self, group: Group, timeout_s: float, device: torch.device) -> None:
        """Connect all ranks of the group, which must call it together. `device` is this rank's."""
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self.rank = self._group.rank()
        self._is_nccl = self._group.name() == "nccl"
        self.is_ordered = self._is_nccl
        self.sent_bytes = self.received_bytes = 0
        # Else NCCL guesses the device by the number of the rank (ProcessGroupNCCL.cpp, barrier).
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
            works = self._together(transfers) if self._is_nccl else [*map(self._begin, transfers)]
        except RuntimeError as error:
            raise self.failure(transfers[0], error) from error
        return [_Work(self, *pair) for pair in zip(transfers, works, strict=True)]

    def _begin(self, transfer: Transfer) -> Any:
        begin = self._group.send if transfer.is_send else self._group.recv
        return begin([transfer.data], transfer.peer, 2 * transfer.bucket + transfer.is_checksums)

    def _together(self, transfers: Sequence[Transfer]) -> list[Any]:
        """As one operation of NCCL, as torch's batch_isend_irecv does it (distributed_c10d.py)."""
        # A dist.ProcessGroup asks for which of its backends; a bare group is one.
        is_bare = not isinstance(self._group, c10d.ProcessGroup)
        backend = () if is_bare else (transfers[0].data.device,)
        self._group._start_coalescing(*backend)
        for transfer in transfers:
            self._begin(transfer)
        return [self._group._end_coalescing(*backend)] * len(transfers)

    def wait(self, transfer: Transfer, work: Any) -> None:
        try:
            # With a timeout, NCCL's wait holds up the host until the transfer is done
            # (ProcessGroupNCCL.cpp, WorkNCCL::synchronizeInternal).
            work.wait() if self._is_nccl else work.wait(self._timeout)
        except RuntimeError as error:
            raise self.failure(transfer, error) from error

    def failure(self, transfer: Transfer, error: RuntimeError) -> ReshardError:
        way = "sending to" if transfer.is_send else "receiving from"
        reason = str(error).splitlines()[0]
        return ReshardError(
            f"rank {self.rank}, {way} rank {transfer.peer}, bucket {transfer.bucket}, "
            f"{transfer.data.numel()} bytes: {reason}"
        )


@dataclass(frozen=True, slots=True)
class _Work:
    transport: GroupTransport
    transfer: Transfer  # keeps the memory
    work: Any

    def wait(self) -> None:
        self.transport.wait(self.transfer, self.work)
