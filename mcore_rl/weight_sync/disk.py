"""A CheckpointEngine through files in a folder that training ranks and vLLM workers share.

A training rank writes one safetensors file a version, with a tensor for each message: the boxes
that it adds to one bucket of one generation rank, one behind the other. So the files hold what the
servers lack and no more. Ranks need not be able to connect. A version's files stand there until
every receiver has told, by a file of its own, that it has taken it, and its rank sends the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from mcore_rl.checkpoint.hf_writer import ShardWriter, TensorPlan, plan_shards, writing_shard
from mcore_rl.checkpoint.safetensors_file import SafetensorsFile
from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import HFConfig
from mcore_rl.reshard.executor import IsChecked
from mcore_rl.reshard.transport import Pending, Transfer, Transport
from mcore_rl.weight_sync.checkpoint_engine import CheckpointEngine, RoutePlan
from mcore_rl.weight_sync.connection import StreamError

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class FolderEndpoint:
    """Where the files of one job are; plain fields, so that it crosses any process boundary."""

    path: str
    timeout_s: float  # how long a receiver waits for a training rank's file


class DiskEngine(CheckpointEngine):
    """Each rank has the folder in its file system."""

    def __init__(
        self,
        endpoint: FolderEndpoint,
        plan: RoutePlan,
        model: HFConfig,
        rank: int,
        device: torch.device,
    ) -> None:
        """
        Raises:
            ConfigError: the layouts do not fit the model, buckets are too small, or there is no
                such folder on this machine.
        """
        super().__init__(plan, model, rank, device)
        self._folder, self._timeout_s = Path(endpoint.path), endpoint.timeout_s
        if not self._folder.is_dir():
            raise ConfigError(
                f"weight_sync.transport='disk': there is no folder {self._folder} on the machine "
                f"of rank {rank}; allowed: an output_dir that all machines share"
            )
        self._num_training = plan.training.world_size
        self._last: int | None = None  # version that this rank has sent

    @contextmanager
    def _transport(self, version: int, checked: IsChecked) -> Iterator[Transport]:
        planned = self._planned(checked)
        if not planned:  # a generation rank, or a training rank whose weights others send
            yield _Read(self._folder, version, self._rank, self._timeout_s)
            if self._rank >= self._num_training:
                self._tell_taken(version)
            return
        if self._last is not None:
            self._remove(self._last)
        [shard] = plan_shards(planned, sum(tensor.nbytes for tensor in planned))
        shard = replace(shard, file=_file_name(version, self._rank))
        with writing_shard(self._folder, shard) as writer:
            yield _Written(writer)
        self._last = version

    def _tell_taken(self, version: int) -> None:
        file = self._folder / _taken(self._rank)
        aside = file.with_name(f".{file.name}.partial")
        aside.write_text(str(version))
        aside.rename(file)

    def _remove(self, version: int) -> None:
        """The file of a version, once all to whom it goes have taken it."""
        for peer in sorted({step.send[0] for r in self._rounds for step in r.steps if step.send}):
            rank = f"generation rank {peer - self._num_training}"
            is_taken = partial(_is_taken, self._folder / _taken(peer), version)
            _wait(is_taken, self._timeout_s, f"version {version} was not taken by {rank}")
        (self._folder / _file_name(version, self._rank)).unlink()

    def _planned(self, checked: IsChecked) -> list[TensorPlan]:
        """All that this rank sends."""
        steps = (step for current in self._rounds for step in current.steps)
        planned: list[tuple[str, int]] = []
        for peer, message in (step.send for step in steps if step.send is not None):
            planned.append((_name(peer, message.bucket), message.num_bytes))
            if size := 8 * sum(checked(part.target) for part in message.parts):
                planned.append((_name(peer, message.bucket, is_checksums=True), size))
        return [TensorPlan(name, (size,), torch.uint8) for name, size in planned]


def _wait(condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise StreamError(f"{otherwise} within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _taken(rank: int) -> str:
    """The file in which a receiver keeps the last version that it has taken."""
    return f"taken-by-{rank}"


def _is_taken(file: Path, version: int) -> bool:
    return file.exists() and int(file.read_text()) >= version


def _file_name(version: int, rank: int) -> str:
    return f"version-{version}-from-{rank}.safetensors"


def _name(peer: int, bucket: int, is_checksums: bool = False) -> str:
    """A message in the file of its sender."""
    return f"to-{peer}.bucket-{bucket}" + ".crc32" * is_checksums


class _Written:
    """Messages into the file of this rank: they have left when they are written."""

    is_ordered = False
    received_bytes = 0

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self.sent_bytes = 0

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        for transfer in transfers:
            name = _name(transfer.peer, transfer.bucket, transfer.is_checksums)
            self._writer.write(name, transfer.data)
            self.sent_bytes += transfer.data.numel() * (not transfer.is_checksums)
        return [self] * len(transfers)

    def wait(self) -> None:
        """For a message that has left."""
        return


class _Read:
    """Messages out of the files of their senders, each of which is awaited when it is needed."""

    is_ordered = False
    sent_bytes = 0

    def __init__(self, folder: Path, version: int, rank: int, timeout_s: float) -> None:
        self._folder, self._version = folder, version
        self._rank, self._timeout_s = rank, timeout_s
        self._files: dict[int, SafetensorsFile] = {}  # by sender
        self.received_bytes = 0

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        return [_Reading(self, transfer) for transfer in transfers]

    def read(self, transfer: Transfer) -> None:
        file = self._file_of(transfer.peer)
        name = _name(self._rank, transfer.bucket, transfer.is_checksums)
        found = file.entries.get(name)
        if found is None or found.nbytes != transfer.data.numel():
            raise StreamError(
                f"{file.path}: {name} is not there with {transfer.data.numel()} bytes: its sender "
                "has another plan"
            )
        on_cpu = transfer.data.device.type == "cpu"
        memory = transfer.data if on_cpu else torch.empty(found.shape, dtype=torch.uint8)
        file.read_into(name, None, memory)  # compares its checksum
        if not on_cpu:
            transfer.data.copy_(memory)
        self.received_bytes += transfer.data.numel() * (not transfer.is_checksums)

    def _file_of(self, sender: int) -> SafetensorsFile:
        if sender not in self._files:
            path = self._folder / _file_name(self._version, sender)
            _wait(path.exists, self._timeout_s, f"{path} of training rank {sender} did not come")
            self._files[sender] = SafetensorsFile(path)
        return self._files[sender]


@dataclass(frozen=True, slots=True)
class _Reading:
    route: _Read
    transfer: Transfer

    def wait(self) -> None:
        self.route.read(self.transfer)
