"""A weight transport of one's own: messages are files in a folder that all ranks share.

    mcore-rl rl recipe=quickstart weight_sync.method=disaggregated \
        weight_sync.transport=examples/file_transport.py:FileTransport

For machines that share nothing but a file system: FILE_TRANSPORT_DIR names a folder of it. Each
rank has two buckets there at most, until the servers have read them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mcore_rl.models.base import HFConfig
from mcore_rl.parallel.rendezvous import WAITS_ENDED_KEY, RendezvousEndpoint
from mcore_rl.parallel.store import RendezvousStore
from mcore_rl.reshard.executor import MessageTransport, Pending, Transfer
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import ExchangeTransport, StreamError, WeightUpdate

_POLL_S = 0.005


class FileTransport(ExchangeTransport):
    """Each rank has a folder for what it sends, in that of rank 0."""

    def __init__(
        self,
        spec: TransferSpec,
        endpoint: RendezvousEndpoint,
        model: HFConfig,
        rank: int,
        device: torch.device,
    ) -> None:
        super().__init__(spec, model, rank, device)
        self.rank, self.timeout_s = rank, spec.settings.timeout_s
        try:
            self.store = RendezvousStore(endpoint, rank, spec.world_size, self.timeout_s)
            self.store.barrier("connected")  # its error names the ranks that are missing
            if rank == 0:
                parent = os.environ.get("FILE_TRANSPORT_DIR")
                self.store.set("folder", tempfile.mkdtemp(prefix="weights-", dir=parent))
            self.folder = Path(self.store.get("folder").decode())
            (self.folder / str(rank)).mkdir(parents=True)
        except RuntimeError as error:
            raise StreamError(f"rank {rank} of the file transport: {error}") from error

    @contextmanager
    def _open_messages(self, update: WeightUpdate) -> Iterator[MessageTransport]:
        yield FileMessages(self, update)

    def has_lost_peer(self) -> bool:
        """Return whether the trainer knows that a server has died, or is gone itself."""
        try:
            return self.store.check([WAITS_ENDED_KEY])
        except RuntimeError:  # the rendezvous is in the trainer's first rank
            return True

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder / str(self.rank), ignore_errors=True)
        with contextlib.suppress(OSError):  # other ranks still send
            self.folder.rmdir()


class FileMessages:
    """The messages of one update."""

    is_ordered = False

    def __init__(self, transport: FileTransport, update: WeightUpdate) -> None:
        self.transport, self.update = transport, update
        self.sent_bytes = self.received_bytes = 0

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        for transfer in transfers:
            if transfer.is_send:
                self._write(transfer)
        return [_FileTransfer(self, transfer) for transfer in transfers]

    def _get_path(self, transfer: Transfer) -> Path:
        ends = self.transport.rank, transfer.peer
        source, target = ends if transfer.is_send else ends[::-1]
        name = f"{self.update.format}-{self.update.version}-to-{target}-bucket-{transfer.bucket}"
        return self.transport.folder / str(source) / (name + ".sums" * transfer.is_checksums)

    def _write(self, transfer: Transfer) -> None:
        path = self._get_path(transfer)
        try:
            transfer.data.cpu().numpy().tofile(f"{path}.partial")
            os.replace(f"{path}.partial", path)  # a reader sees the whole file, or none
        except OSError as error:
            raise StreamError(f"{self.update}: {path.name} is not written: {error}") from error
        self.sent_bytes += transfer.data.numel()

    def wait(self, transfer: Transfer) -> None:
        """Read a message and remove its file, or wait until the peer has."""
        path, timeout_s = self._get_path(transfer), self.transport.timeout_s
        deadline = time.monotonic() + timeout_s
        while path.exists() == transfer.is_send:
            if time.monotonic() > deadline or self.transport.has_lost_peer():
                way = "read" if transfer.is_send else "written"
                raise StreamError(
                    f"{self.update}: rank {transfer.peer} has not {way} {path.name}, and has died "
                    f"or made no move for {timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        if transfer.is_send:
            return
        transfer.data.copy_(torch.from_numpy(np.fromfile(path, np.uint8)))
        path.unlink()
        self.received_bytes += transfer.data.numel()


@dataclass(frozen=True, slots=True)
class _FileTransfer:
    messages: FileMessages
    transfer: Transfer

    def wait(self) -> None:
        self.messages.wait(self.transfer)
