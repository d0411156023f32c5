"""How messages of a reshard cross devices: point to point in a torch process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


class ReshardError(RuntimeError):
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
    """A transfer under way; its memory belongs to it until wait() has returned."""

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
        """Begin transfers that must go on side by side."""


class GroupTransport:
    """Over gloo or NCCL. The group's ranks are the devices of the plan.

    On NCCL wait() orders the current stream behind the transfer, as torch's own does. The host is
    not blocked, and the group's watchdog stands in for the timeout.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """All ranks of the group must call it together: NCCL connects them here."""
        self.rank = dist.get_rank(group)
        self.is_ordered = dist.get_backend(group) != "gloo"
        self.sent_bytes = self.received_bytes = 0
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        dist.barrier(group=group)

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        operations: list[dist.P2POp] = []
        for transfer in transfers:
            call = dist.isend if transfer.is_send else dist.irecv
            operations.append(
                dist.P2POp(
                    call,
                    transfer.data,
                    group=self._group,
                    tag=2 * transfer.bucket + transfer.is_checksums,
                    group_peer=transfer.peer,
                )
            )
            if transfer.is_checksums:
                continue
            if transfer.is_send:
                self.sent_bytes += transfer.data.numel()
            else:
                self.received_bytes += transfer.data.numel()
        if not operations:
            return []
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.failure(transfers[0], error) from error
        if len(works) != len(operations):  # NCCL: one for all of them
            works = works * len(operations)
        return [_Work(self, *pair) for pair in zip(transfers, works, strict=True)]

    def wait(self, transfer: Transfer, work: Any) -> None:
        try:
            work.wait(self._timeout)
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
