"""A RendezvousServer as a torch.distributed store, for process groups."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from mcore_rl.parallel import handshake, rendezvous
from mcore_rl.parallel.handshake import read_exactly, set_deadline
from mcore_rl.parallel.rendezvous import BAD, LATE, RendezvousEndpoint, frame

c10d: Any = torch.distributed  # whose stores have no type stubs
_GRACE_S = 10.0  # what the server may take longer than the wait that it was asked for
_RETRY_S = 0.05
_open: set[RendezvousStore] = set()  # C++ keeps no reference to what is Python of a store


def join_world(backend: str, timeout_s: float) -> None:
    """Make torch's default group as RANK, WORLD_SIZE and RENDEZVOUS_* say.

    gloo and NCCL then listen on the interface over which this process reached the rendezvous, but
    for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of the user's.

    Raises:
        ConfigError: this process was not started as a rank.
        RuntimeError: the rendezvous cannot be reached, or other ranks did not come in time.
    """
    rank, world_size = map(int, rendezvous.of_rank("RANK", "WORLD_SIZE"))
    endpoint = RendezvousEndpoint.from_environment()
    store = RendezvousStore(endpoint, rank, world_size, timeout_s)
    interface = rendezvous.interface_of(store.own_address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # not what begins so
    c10d.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


class RendezvousStore(c10d.Store):  # type: ignore[misc]
    """A rank's connection. It stays open until `close`, and with it what C++ made of it.

    Methods are those of torch.distributed.Store. Errors are its, too: DistStoreError names the keys
    that were waited for and the ranks that are missing, DistNetworkError is a lost connection.
    """

    def __init__(
        self, endpoint: RendezvousEndpoint, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """
        Raises:
            DistNetworkError: no server answers, or it has another token.
        """
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._endpoint, self._rank, self._world_size = endpoint, rank, world_size
        self._lock = threading.Lock()
        self._sock = self._connect(time.monotonic() + timeout_s)
        self.own_address: str = self._sock.getsockname()[0]  # by which other ranks can reach it
        self._call(b"join", b"%d" % rank)
        _open.add(self)

    def close(self) -> None:
        _open.discard(self)
        self._sock.close()

    def clone(self) -> RendezvousStore:
        """With its own connection: a wait keeps others from using it."""
        timeout_s = self.timeout.total_seconds()
        return RendezvousStore(self._endpoint, self._rank, self._world_size, timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._call(b"set", key.encode(), _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        both = [(key.encode(), _bytes(value)) for key, value in zip(keys, values, strict=True)]
        self._call(b"set", *(one for pair in both for one in pair))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._call_for(b"get", keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._call_for(b"wait", keys, self.timeout if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._call(b"add", key.encode(), b"%d" % amount)[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._call(b"append", key.encode(), _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = _bytes(expected), _bytes(desired)
        return self._call(b"compare_set", key.encode(), *values)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(b"check", *(key.encode() for key in keys)) == [b"1"]

    def delete_key(self, key: str) -> bool:
        return self._call(b"delete_key", key.encode()) == [b"1"]

    def num_keys(self) -> int:
        return int(self._call(b"num_keys")[0])

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set."""
        return True

    deleteKey, getNumKeys = delete_key, num_keys

    def _connect(self, deadline: float) -> socket.socket:
        """Tries again while others are in the way: a server has room for so many strangers."""
        while True:
            try:
                left_s = max(0.001, deadline - time.monotonic())
                sock = socket.create_connection((self._endpoint.host, self._endpoint.port), left_s)
            except OSError as error:
                raise self._lost(error) from error
            try:
                handshake.prove(sock, self._endpoint.token, deadline)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except ConnectionError:
                sock.close()
                time.sleep(_RETRY_S)
            except OSError as error:
                sock.close()
                raise self._lost(error) from error
            else:
                return sock

    def _call_for(self, operation: bytes, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        timeout_s = timeout.total_seconds()
        arguments = struct.pack(">d", timeout_s), *(key.encode() for key in keys)
        return self._call(operation, *arguments, timeout_s=timeout_s)

    def _call(
        self, operation: bytes, *arguments: bytes, timeout_s: float | None = None
    ) -> list[bytes]:
        if timeout_s is None:  # a server in a busy process may take long for what is quick
            timeout_s = self.timeout.total_seconds()
        request = frame(operation, *arguments)
        if len(request) > rendezvous.MAX_FRAME_BYTES:
            raise ValueError(
                f"{operation.decode()} of {len(request)} bytes; allowed at a rendezvous: "
                f"{rendezvous.MAX_FRAME_BYTES}"
            )
        with self._lock:
            try:
                if self._sock.fileno() < 0:
                    raise ConnectionError("the connection was lost before")
                deadline = time.monotonic() + timeout_s + _GRACE_S
                set_deadline(self._sock, deadline)
                self._sock.sendall(request)
                length = int.from_bytes(read_exactly(self._sock, 4, deadline), "big")
                answer = read_exactly(self._sock, length, deadline)
            except OSError as error:
                self._sock.close()  # or the next call would read the answer to this one
                raise self._lost(error) from error
        outcome, *values = rendezvous.fields_of(answer)
        if outcome == LATE:
            raise c10d.DistStoreError(self._late(timeout_s, *values))
        if outcome == BAD:
            raise c10d.DistStoreError(f"rank {self._rank}: {operation!r}: {values[0].decode()}")
        return values

    def _late(self, timeout_s: float, seen: bytes, here: bytes, *keys: bytes) -> str:
        expected = set(range(self._world_size))
        never = expected - _ranks(seen)
        gone = expected - never - _ranks(here)
        found = [
            f"{', '.join(f'rank {rank}' for rank in sorted(ranks))} {what}"
            for ranks, what in ((never, "never came"), (gone, "went away"))
            if ranks
        ]
        return (
            f"rank {self._rank} of {self._world_size} waited {timeout_s:g} s at {self._endpoint} "
            f"for {', '.join(key.decode() for key in keys)}; "
            f"{'; '.join(found) or 'all ranks are connected'}"
        )

    def _lost(self, error: OSError) -> Exception:
        lost: Exception = c10d.DistNetworkError(
            f"rank {self._rank} of {self._world_size}: the rendezvous at {self._endpoint}: {error}"
        )
        return lost


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _ranks(listed: bytes) -> set[int]:
    return {int(rank) for rank in listed.split(b",") if rank}
