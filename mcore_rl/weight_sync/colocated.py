"""Shards for the vLLM worker on the same device, through two buckets that both processes map.

The training ranks exchange missing shards in their own process group; then each sends its buckets
to the generation rank that shares its device. After the handshake of connection.py, over a unix
socket:

    sender:   memory (how to map the buckets)         receiver: mapped
    sender:   bucket (which of the two, slices)       receiver: free (it may be written again)
    ...
    sender:   end (count, version)                    receiver: done

The socket has an abstract name, and a client must run as the same user.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed

from mcore_rl.models.base import HFConfig
from mcore_rl.parallel.rendezvous import WAITS_ENDED_KEY, RendezvousEndpoint
from mcore_rl.parallel.store import RendezvousStore
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import Bucket, Exchange, LocalWeights, ReceivedSlice
from mcore_rl.reshard.planner import Plan
from mcore_rl.reshard.transport import GroupTransport
from mcore_rl.weight_sync.checksums import is_checked
from mcore_rl.weight_sync.connection import (
    Connection,
    StreamError,
    accept,
    admit,
    greet,
    reason,
)
from mcore_rl.weight_sync.shared_memory import SharedBuckets, map_buckets, shared_buckets, site_of
from mcore_rl.weight_sync.spec import TransferSpec, plan_transfer, sites_of
from mcore_rl.weight_sync.transport import WeightTransport, WeightUpdate
from mcore_rl.weight_sync.watched import LOOK_S, IsLost

_MAX_SLICES_BYTES = 64 << 20  # of the list of a bucket's slices


def shared_memory_end(
    spec: TransferSpec,
    endpoint: RendezvousEndpoint,
    model: HFConfig,
    rank: int,
    device: torch.device,
) -> WeightTransport:
    """Ranks exchange where they run, and hosts tell their guests how to reach them."""
    timeout_s, dtype = spec.settings.timeout_s, getattr(torch, spec.dtype)
    guest = rank - spec.num_training
    try:
        store = RendezvousStore(endpoint, rank, spec.world_size, timeout_s)
        sites = store.all_gather("sites", json.dumps([site_of(device), socket.gethostname()]))
        if guest >= 0:
            told = json.loads(store.get(f"host-of-{guest}"))
            store.close()
            return _Guest(ShardEndpoint(**told), device)
        placed = sites_of([tuple(json.loads(site)) for site in sites], spec.num_training)
        plan = plan_transfer(spec, model, dtype.itemsize, placed)
        sender = None
        if rank in plan.devices.generation:
            guest = plan.devices.generation.index(rank)
            sender = ShardSender(guest, timeout_s, lambda: store.check([WAITS_ENDED_KEY]))
            told = json.dumps(asdict(sender.endpoint))
            store.set(f"host-of-{sender.endpoint.generation_rank}", told)
        return _Host(spec, plan, device, store, sender)
    except RuntimeError as error:
        raise StreamError(f"rank {rank} of the weight transport: {error}") from error


class _Host(WeightTransport):
    """A training rank, with or without a guest. All of them are made, and send, together."""

    def __init__(
        self,
        spec: TransferSpec,
        plan: Plan,
        device: torch.device,
        store: RendezvousStore,
        sender: ShardSender | None,
    ) -> None:
        self._verify, self._device = spec.settings.verify, device
        self._store, self._sender = store, sender
        half = spec.settings.bucket_bytes // 2  # as much again is for what leaves
        transport = GroupTransport(torch.distributed.group.WORLD, spec.settings.timeout_s, device)
        rounds = schedule(plan, transport.rank, half)
        dtype = getattr(torch, spec.dtype)
        self._exchange = Exchange(rounds, half, dtype, transport, self._allocate)

    def send(self, weights: LocalWeights, update: WeightUpdate) -> None:
        memory = shared_buckets(self._device)
        buckets = self._exchange.run(
            weights, memory.allocate, lambda name: is_checked(self._verify, name, update.version)
        )
        if self._sender is not None:
            self._sender.send(buckets, memory, update)
        else:
            for _ in buckets:
                raise RuntimeError("a bucket arrived on a device without a generation rank")

    def receive(self, update: WeightUpdate) -> Generator[list[ReceivedSlice], None, None]:
        raise RuntimeError("a training rank receives no weights")

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._store.close()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class _Guest(WeightTransport):
    """A generation rank."""

    def __init__(self, endpoint: ShardEndpoint, device: torch.device) -> None:
        self._endpoint, self._device = endpoint, device

    def send(self, weights: LocalWeights, update: WeightUpdate) -> None:
        raise RuntimeError("a generation rank sends no weights")

    def receive(self, update: WeightUpdate) -> Generator[list[ReceivedSlice], None, None]:
        return receive_shards(self._endpoint, update, self._device)

    def close(self) -> None:
        """Each update has a connection of its own."""


@dataclass(frozen=True, slots=True)
class ShardEndpoint:
    """Where one generation rank gets its shards; plain fields, to cross any process boundary."""

    name: str  # of an abstract unix socket
    token: str = field(repr=False)  # who shows it may receive: keep it out of logs
    timeout_s: float  # how long either side waits for the other's next move
    generation_rank: int


class ShardSender:
    """The trainer's side, for one generation rank. Binds now; each `send` takes a connection."""

    def __init__(
        self, generation_rank: int, timeout_s: float, is_lost: IsLost | None = None
    ) -> None:
        """The wait for a connection ends when `is_lost` says so."""
        self._is_lost = is_lost or (lambda: False)
        name = f"mcore_rl-weights-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self.endpoint = ShardEndpoint(name, secrets.token_hex(32), timeout_s, generation_rank)

    def send(self, buckets: Iterator[Bucket], memory: SharedBuckets, update: WeightUpdate) -> None:
        """Send every bucket; `memory` is what they are allocated in.

        When the receiver fails the other buckets are still taken, since other ranks' exchanges
        depend on it. Raises StreamError after that.
        """
        connection = None
        try:
            connection = self._accept(update)
            count = self._hand_over(connection, buckets, memory)
            connection.send({"kind": "end", "count": count, "version": update.version})
            connection.read_expected("done", "waiting for the receiver's last word")
        except BaseException as error:
            if connection is not None:
                connection.tell_failure(f"{type(error).__name__}: {error}")
            if isinstance(error, StreamError):
                for _ in buckets:
                    continue
            raise
        finally:
            memory.close()
            if connection is not None:
                connection.close()

    def _hand_over(
        self, connection: Connection, buckets: Iterator[Bucket], memory: SharedBuckets
    ) -> int:
        count = 0
        for bucket in buckets:
            if not count:
                connection.send({"kind": "memory", "buckets": memory.describe()})
                socket.send_fds(connection.sock, [b"\0"], memory.descriptors)
                connection.read_expected("mapped", "waiting for the buckets to be mapped")
            memory.finish_writes()
            doing = f"bucket {count}"
            pieces = [_described(piece, bucket.memory) for piece in bucket]
            connection.send(
                {"kind": "bucket", "memory": bucket.index % 2, "pieces": pieces}, doing=doing
            )
            connection.read_expected("free", f"waiting until {doing} was placed")
            count += 1
        return count

    def _accept(self, update: WeightUpdate) -> Connection:
        endpoint = self.endpoint
        deadline = time.monotonic() + endpoint.timeout_s
        guest = f"version {update.version}: generation rank {endpoint.generation_rank}"
        while True:
            try:
                sock, _ = accept(self._listener, min(deadline, time.monotonic() + LOOK_S))
            except TimeoutError:
                if self._is_lost():
                    raise StreamError(f"{guest} did not come: a server has died") from None
                if time.monotonic() < deadline:
                    continue
                raise StreamError(f"{guest} did not come within {endpoint.timeout_s:g} s") from None
            connection = Connection(sock, f"generation rank {endpoint.generation_rank}")
            if _user_of(sock) != os.getuid():
                connection.close()
            elif admit(connection, endpoint.token, asdict(update), endpoint.timeout_s):
                return connection

    def close(self) -> None:
        self._listener.close()


def _user_of(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def _described(piece: ReceivedSlice, memory: torch.Tensor) -> list[Any]:
    start = piece.data.data_ptr() - memory.data_ptr()
    dtype = str(piece.data.dtype).removeprefix("torch.")
    sizes = list(piece.data.shape)
    origin = [piece.source_rank, piece.checksum]
    return [piece.target, list(piece.offset), sizes, dtype, start, *origin]


def receive_shards(
    endpoint: ShardEndpoint, update: WeightUpdate, device: torch.device
) -> Generator[list[ReceivedSlice], None, None]:
    """Yield the slices of one bucket after the other, in memory of `device`.

    They must have been copied before the generator continues: the memory is written again then.
    Ends normally only if every bucket of the update has come. Raises StreamError otherwise.
    """
    connection, version = _connect(endpoint), update.version
    complete = False
    failure = "the receiver stopped"
    try:
        greet(connection, endpoint.token, asdict(update))
        count = 0
        memories: list[torch.Tensor] = []
        while True:
            doing = f"version {version} broke off after {count} buckets"
            header = connection.read_header(doing, _MAX_SLICES_BYTES)
            if header["kind"] == "memory":
                memories = _map(connection, header["buckets"], device)
                connection.send({"kind": "mapped"})
                continue
            if header["kind"] != "bucket":
                break
            memory = memories[header["memory"]]
            yield [_piece(entry, memory) for entry in header["pieces"]]
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            connection.send({"kind": "free"})
            count += 1
        if header["kind"] != "end":
            raise StreamError(f"{doing}: the sender reports {reason(header)}")
        if (header["count"], header["version"]) != (count, version):
            raise StreamError(
                f"expected version {version}, got {count} buckets; the sender says it sent "
                f"{header['count']} of version {header['version']}"
            )
        connection.send({"kind": "done"})
        complete = True
    except StreamError as error:
        failure = str(error)
        raise
    finally:
        if not complete:
            connection.tell_failure(failure)
        connection.close()


def _connect(endpoint: ShardEndpoint) -> Connection:
    peer = "the trainer on this device"
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(endpoint.timeout_s)
    try:
        sock.connect(f"\0{endpoint.name}")
    except OSError as error:
        sock.close()
        raise StreamError(f"cannot reach {peer}: {error}") from error
    return Connection(sock, peer)


def _map(
    connection: Connection, described: list[dict[str, Any]], device: torch.device
) -> list[torch.Tensor]:
    try:
        _, descriptors, _, _ = socket.recv_fds(connection.sock, 1, 2)
    except OSError as error:
        raise StreamError(f"{connection.peer} sent no memory: {error}") from error
    if device.type != "cuda" and len(descriptors) != len(described):
        raise StreamError(f"{connection.peer} went away before its memory was mapped")
    return map_buckets(described, descriptors, device)


def _piece(entry: list[Any], memory: torch.Tensor) -> ReceivedSlice:
    target, offset, sizes, name, start, source_rank, checksum = entry
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StreamError(f"{target}: unknown dtype {name!r}")
    end = start + math.prod(sizes) * dtype.itemsize
    data = memory[start:end].view(dtype).view(sizes)
    return ReceivedSlice(target, tuple(offset), data, source_rank, checksum)
