"""Shards for the vLLM worker on the same device, through two buckets that both processes map.

After the handshake of connection.py, over a unix socket:

    sender:   memory (how to map the buckets)         receiver: mapped
    sender:   bucket (which of the two, pieces)       receiver: free (it may be written again)
    ...
    sender:   end (count, version)                    receiver: done

The socket's name is an abstract one, and who connects must run as the same user.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mcore_rl.reshard.executor import Arrival, Bucket
from mcore_rl.weight_sync.connection import (
    Connection,
    StreamError,
    accept,
    admit,
    greet,
    reason,
)
from mcore_rl.weight_sync.shared_memory import SharedBuckets, map_buckets

_MAX_PIECES_BYTES = 64 << 20  # of the list of a bucket's pieces


@dataclass(frozen=True, slots=True)
class ShardEndpoint:
    """Where one generation rank gets its shards; plain fields, to cross any process boundary."""

    name: str  # of an abstract unix socket
    token: str = field(repr=False)  # who shows it may receive: keep it out of logs
    timeout_s: float  # how long either side waits for the other's next move
    generation_rank: int


class ShardSender:
    """The trainer's end, for one generation rank. Binds at once; each `send` takes a connection."""

    def __init__(self, generation_rank: int, timeout_s: float) -> None:
        name = f"mcore_rl-weights-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self.endpoint = ShardEndpoint(name, secrets.token_hex(32), timeout_s, generation_rank)

    def send(self, buckets: Iterator[Bucket], memory: SharedBuckets, version: int) -> None:
        """Hand over every bucket; `memory` is what they are allocated in.

        When the receiver fails the other buckets are still taken, since other ranks' exchanges
        depend on it. Raises StreamError after that.
        """
        connection = self._accept(version)
        try:
            count = self._hand_over(connection, buckets, memory)
            connection.send({"kind": "end", "count": count, "version": version})
            connection.read_expected("done", "waiting for the receiver's last word")
        except BaseException as error:
            connection.tell_failure(f"{type(error).__name__}: {error}")
            if isinstance(error, StreamError):
                for _ in buckets:
                    continue
            raise
        finally:
            memory.close()
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

    def _accept(self, version: int) -> Connection:
        endpoint = self.endpoint
        deadline = time.monotonic() + endpoint.timeout_s
        while True:
            try:
                sock, _ = accept(self._listener, deadline)
            except TimeoutError:
                raise StreamError(
                    f"version {version}: generation rank {endpoint.generation_rank} did not come "
                    f"within {endpoint.timeout_s:g} s"
                ) from None
            connection = Connection(sock, f"generation rank {endpoint.generation_rank}")
            if _user_of(sock) != os.getuid():
                connection.close()
            elif admit(connection, endpoint.token, version, endpoint.timeout_s):
                return connection

    def close(self) -> None:
        self._listener.close()


def _user_of(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def _described(piece: Arrival, memory: torch.Tensor) -> list[Any]:
    start = piece.data.data_ptr() - memory.data_ptr()
    dtype = str(piece.data.dtype).removeprefix("torch.")
    sizes = list(piece.data.shape)
    return [piece.target, list(piece.offset), sizes, dtype, start, piece.source_rank, piece.crc32]


def receive_shards(
    endpoint: ShardEndpoint, version: int, device: torch.device
) -> Generator[list[Arrival], None, None]:
    """Yield the pieces of one bucket after the other, in memory of `device`.

    They must have been copied before the generator goes on: the memory is written again then. Ends
    normally only if every bucket of `version` has come. Raises StreamError otherwise.
    """
    connection = _connect(endpoint)
    complete = False
    failure = "the receiver stopped"
    try:
        greet(connection, endpoint.token, version)
        count = 0
        memories: list[torch.Tensor] = []
        while True:
            doing = f"version {version} broke off after {count} buckets"
            header = connection.read_header(doing, _MAX_PIECES_BYTES)
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


def _piece(entry: list[Any], memory: torch.Tensor) -> Arrival:
    target, offset, sizes, name, start, source_rank, crc32 = entry
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StreamError(f"{target}: unknown dtype {name!r}")
    end = start + math.prod(sizes) * dtype.itemsize
    data = memory[start:end].view(dtype).view(sizes)
    return Arrival(target, tuple(offset), data, source_rank, crc32)
