"""Moving new weights from a trainer into servers: WeightTransport, and how one is chosen.

    transport = connect(spec, endpoint, model, rank, device)   on every rank of both sides, together
    transport.send(weights, update)                            on every training rank
    for slices in transport.receive(update): ...               on every generation rank

Generation rank g is rank spec.num_training + g.
"""

from __future__ import annotations

import importlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mcore_rl.config.errors import PeerError
from mcore_rl.config.schema import WeightSyncConfig
from mcore_rl.models.base import HFConfig
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import Bucket, Exchange, LocalWeights, ReceivedSlice
from mcore_rl.reshard.transport import Transport
from mcore_rl.weight_sync.checksums import is_checked
from mcore_rl.weight_sync.connection import StreamError
from mcore_rl.weight_sync.spec import TransferSpec, plan_transfer

DENSE = "dense"  # every element of every weight


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What both sides know of an update."""

    version: int
    format: str = DENSE

    def __post_init__(self) -> None:
        if self.format != DENSE:
            raise StreamError(
                f"version {self.version} comes in the format {self.format!r}; known: {DENSE!r}"
            )

    def agree_with(self, peer: int, fields: Mapping[str, Any]) -> None:
        """Raises StreamError unless the update that `peer` tells of, by its fields, is this one."""
        if (theirs := WeightUpdate(fields["version"], fields["format"])) != self:
            raise StreamError(f"{self}, but rank {peer} of the transport is at {theirs}")

    def __str__(self) -> str:
        return f"version {self.version} ({self.format})"


class WeightTransport(ABC):
    """One rank's side. All ranks of both sides send and receive an update together.

    Where the plan lets a training rank host a generation rank, as shared memory does, both are
    devices of one exchange; else the generation ranks are devices after the training ranks.
    """

    @abstractmethod
    def send(self, weights: LocalWeights, update: WeightUpdate) -> None:
        """A training rank's part. Raises ReshardError, StreamError."""

    @abstractmethod
    def receive(self, update: WeightUpdate) -> Generator[list[ReceivedSlice], None, None]:
        """A generation rank's part: its slices, one bucket at a time, to be copied before the next.

        Ends normally only if the update is complete. Raises ReshardError, StreamError.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the transport holds: peers that wait for this rank fail."""


class ExchangeTransport(WeightTransport):
    """Messages go from training ranks to generation ranks, which share no device."""

    def __init__(
        self, spec: TransferSpec, model: HFConfig, rank: int, device: torch.device
    ) -> None:
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._half = spec.settings.bucket_bytes // 2  # as much again is for what leaves
        plan = plan_transfer(spec, model, self._dtype.itemsize)
        self._rounds = schedule(plan, rank, self._half)
        self._verify, self._rank, self._device = spec.settings.verify, rank, device

    def send(self, weights: LocalWeights, update: WeightUpdate) -> None:
        try:
            for _ in self._run(weights, update):
                raise RuntimeError("a bucket arrived on a training rank")
        except PeerError as error:
            _let_go(error)
            raise

    def receive(self, update: WeightUpdate) -> Generator[list[ReceivedSlice], None, None]:
        buckets = self._run(LocalWeights({}), update)
        try:
            for bucket in buckets:
                yield list(bucket)
        except PeerError as error:
            _let_go(error)
            raise
        finally:
            for _ in buckets:  # a consumer that stops must not stop the others' exchanges
                continue

    def _run(self, weights: LocalWeights, update: WeightUpdate) -> Iterator[Bucket]:
        def checked(name: str) -> bool:
            return is_checked(self._verify, name, update.version)

        with self._messages(update) as transport:
            exchange = Exchange(self._rounds, self._half, self._dtype, transport, self._allocate)
            yield from exchange.run(weights, self._allocate, checked)

    @abstractmethod
    def _messages(self, update: WeightUpdate) -> AbstractContextManager[Transport]:
        """The transport of an update's messages. No weights come before the ranks agree on it."""

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _let_go(error: PeerError) -> None:
    """Frees what the calls that failed hold on to: messages in flight, and so the connections.

    Else these stay open after `close` for as long as anybody has the error, and peers wait.
    """
    traceback.clear_frames(error.__traceback__)


# Imported when they are used: vLLM's workers start with this file.
_TRANSPORTS: Mapping[str, str] = MappingProxyType(
    {
        "shared_memory": "colocated:shared_memory_end",
        "process_group": "process_group:ProcessGroupTransport",
        "nixl": "nixl:NixlTransport",
    }
)


def transport_name(settings: WeightSyncConfig) -> str:
    return "shared_memory" if settings.method == "colocated" else settings.transport


def connect(
    spec: TransferSpec,
    endpoint: RendezvousEndpoint,
    model: HFConfig,
    rank: int,
    device: torch.device,
) -> WeightTransport:
    """One rank's side. All ranks of both sides connect together, at the rendezvous `endpoint`.

    `model` is the config.json that both sides started from.

    Raises:
        ConfigError: the layouts do not fit the model, buckets are too small, generation ranks find
            no training rank to share a device with, or the transport's package is not installed.
        StreamError: not all ranks connected in time.
    """
    module, name = _TRANSPORTS[transport_name(spec.settings)].split(":")
    make = getattr(importlib.import_module(f"mcore_rl.weight_sync.{module}"), name)
    transport: WeightTransport = make(spec, endpoint, model, rank, device)
    return transport
