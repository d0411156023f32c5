"""Sending new weights from a trainer to servers: WeightTransport and its registry.

    transport = connect(spec, endpoint, model, rank, device)   on every rank of both sides, together
    transport.send(weights, update)                            on every training rank
    for slices in transport.receive(update): ...               on every generation rank

Generation rank g is rank spec.num_training + g.
"""

from __future__ import annotations

import importlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mcore_rl.config.allowed import TRANSPORTS
from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.config.import_path import is_import_path, load_user_class
from mcore_rl.config.python_objects import is_object_name
from mcore_rl.config.schema import WeightSyncConfig
from mcore_rl.models.base import HFConfig
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import (
    Bucket,
    Exchange,
    LocalWeights,
    MessageTransport,
    ReceivedSlice,
)
from mcore_rl.weight_sync.spec import TransferSpec, is_checked, plan_transfer

DENSE = "dense"  # every element of every weight
POLL_S = 0.5  # interval of calls of IsLost during a wait
IsLost = Callable[[], bool]  # whether a peer is known to be dead


class StreamError(PeerError):
    """An update that did not arrive completely; the message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Version and format of an update, known to both sides."""

    version: int
    format: str = DENSE

    def __post_init__(self) -> None:
        if self.format != DENSE:
            raise StreamError(
                f"version {self.version} comes in the format {self.format!r}; known: {DENSE!r}"
            )

    def check_equal(self, peer: int, fields: Mapping[str, Any]) -> None:
        """Raise StreamError unless the fields of `peer`'s update are those of this one."""
        if (update := WeightUpdate(fields["version"], fields["format"])) != self:
            raise StreamError(f"{self}, but rank {peer} of the transport is at {update}")

    def __str__(self) -> str:
        return f"version {self.version} ({self.format})"


class WeightTransport(ABC):
    """A rank's end of the transport. All ranks of both sides send and receive an update together.

    A class of a user's own (weight_sync.transport=path/to/file.py:Name) is called with the
    arguments of `connect`, on every rank, and returns when all ranks have connected. Most are an
    ExchangeTransport, which has only to move messages. `mcore_rl.testing.check_transport` puts one
    through its rules.

    With shared memory a training rank and a generation rank share a device of the plan; otherwise
    the devices of generation ranks follow those of training ranks.
    """

    @abstractmethod
    def send(self, weights: LocalWeights, update: WeightUpdate) -> None:
        """Send the parts of a training rank. Raises ReshardError, StreamError."""

    @abstractmethod
    def receive(self, update: WeightUpdate) -> Generator[list[ReceivedSlice], None, None]:
        """Yield the slices of a generation rank by bucket; copy them before the next bucket.

        Each element of a parameter is in one slice, except for padding of the vocabulary. A
        parameter that is verified in this version (`is_checked`) has the checksum that its training
        rank has computed (reshard.ops.compute_checksums) in each of its slices.

        Ends normally only if the update is complete. Raises ReshardError, StreamError, also when a
        peer makes no move for spec.settings.timeout_s, or is at another update.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections and memory; peers that wait for this rank fail."""


class ExchangeTransport(WeightTransport):
    """A transport between training ranks and generation ranks on separate devices.

    A subclass connects in its constructor and opens the messages of an update. Plan, buckets,
    packing and checksums are those of `Exchange`.
    """

    def __init__(
        self, spec: TransferSpec, model: HFConfig, rank: int, device: torch.device
    ) -> None:
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._half = spec.settings.bucket_bytes // 2  # the other half is for messages to send
        plan = plan_transfer(spec, model, self._dtype.itemsize)
        self._rounds = schedule(plan, rank, self._half)
        self._verify, self._rank, self._device = spec.settings.verify, rank, device

    def send(self, weights: LocalWeights, update: WeightUpdate) -> None:
        try:
            for _ in self._run(weights, update):
                raise RuntimeError("a bucket arrived on a training rank")
        except PeerError as error:
            _release_frames(error)
            raise

    def receive(self, update: WeightUpdate) -> Generator[list[ReceivedSlice], None, None]:
        buckets = self._run(LocalWeights({}), update)
        try:
            for bucket in buckets:
                yield list(bucket)
        except PeerError as error:
            _release_frames(error)
            raise
        finally:
            for _ in buckets:  # if the consumer stops, the exchanges of other ranks go on
                continue

    def _run(self, weights: LocalWeights, update: WeightUpdate) -> Iterator[Bucket]:
        def is_verified(name: str) -> bool:
            return is_checked(self._verify, name, update.version)

        with self._open_messages(update) as transport:
            exchange = Exchange(self._rounds, self._half, self._dtype, transport, self._allocate)
            yield from exchange.run(weights, self._allocate, is_verified)

    @abstractmethod
    def _open_messages(self, update: WeightUpdate) -> AbstractContextManager[MessageTransport]:
        """Open the transport of an update's messages, after all ranks agree on the update."""

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _release_frames(error: PeerError) -> None:
    """Clear the frames of an error: messages in flight, and with them the connections.

    Otherwise these stay open after `close` while the error is referenced, and peers wait.
    """
    traceback.clear_frames(error.__traceback__)


# Imported on use: vLLM's workers import this file at start.
_TRANSPORTS: Mapping[str, str] = MappingProxyType(
    {
        "shared_memory": "shared_memory:connect_shared_memory",
        "process_group": "process_group:ProcessGroupTransport",
        "nixl": "nixl:NixlTransport",
    }
)


def load_transport_class(name: str) -> type[WeightTransport]:
    """Return the class of an import path in weight_sync.transport.

    Raises:
        ConfigError: it leads nowhere, or to no subclass of WeightTransport with all of its methods.
    """
    loaded: type[WeightTransport] = load_user_class(
        "weight_sync.transport", name, WeightTransport, TRANSPORTS
    )
    return loaded


def check_transport(name: str) -> None:
    """Import the packages of a transport; raise ConfigError if this machine cannot use it."""
    if is_object_name(name):
        raise ConfigError(
            f"weight_sync.transport={name!r} is a class of a Python session, which the processes "
            "of a server do not receive; allowed: a class of a module or file, which they import"
        )
    if is_import_path(name):
        load_transport_class(name)
    elif name == "nixl":
        importlib.import_module("mcore_rl.weight_sync.nixl").import_nixl()


def get_transport_name(settings: WeightSyncConfig) -> str:
    """Return the transport of a method: shared memory for colocated servers."""
    return "shared_memory" if settings.method == "colocated" else settings.transport


def connect(
    spec: TransferSpec,
    endpoint: RendezvousEndpoint,
    model: HFConfig,
    rank: int,
    device: torch.device,
) -> WeightTransport:
    """Connect a rank. All ranks of both sides connect together, at the rendezvous `endpoint`.

    Args:
        model: config.json of the model that both sides started from.

    Raises:
        ConfigError: The layouts do not fit the model, buckets are too small, a generation rank has
            no training rank to share a device with, or the transport's package is not installed.
        StreamError: Not all ranks connected in time.
    """
    transport_name = get_transport_name(spec.settings)
    if is_import_path(transport_name):
        create: Any = load_transport_class(transport_name)
    else:
        module, name = _TRANSPORTS[transport_name].split(":")
        create = getattr(importlib.import_module(f"mcore_rl.weight_sync.{module}"), name)
    transport: WeightTransport = create(spec, endpoint, model, rank, device)
    return transport
