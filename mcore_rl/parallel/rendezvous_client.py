"""A rank's or a node's connection to a RendezvousServer; no torch."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence

from mcore_rl.parallel import handshake, rendezvous
from mcore_rl.parallel.handshake import read_exactly, set_deadline
from mcore_rl.parallel.rendezvous import BAD, LATE, RendezvousEndpoint, frame

_GRACE_S = 10.0  # what the server may take longer than the wait that it was asked for
_RETRY_S = 0.05
_NO_RANK = -1


class LateError(RuntimeError):
    """Keys did not come in time; or, without `keys`, the server refused a request."""

    def __init__(self, message: str, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class LostError(RuntimeError):
    """No server answers, it has another token, or the connection was lost."""


class RendezvousClient:
    """Stays connected until `close`. One call at a time; threads wait for each other."""

    def __init__(
        self, endpoint: RendezvousEndpoint, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Raises LostError when the server does not answer in `timeout_s`."""
        self._endpoint, self._rank, self._world_size = endpoint, rank, world_size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._sock = self._connect(time.monotonic() + timeout_s)
        self.own_address: str = self._sock.getsockname()[0]  # by which others can reach it
        self.call(b"join", b"%d" % rank)

    def close(self) -> None:
        self._sock.close()

    def set(self, key: str, value: bytes) -> None:
        self.call(b"set", key.encode(), value)

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Their values, when all are there."""
        return self.wait_for(b"get", keys, timeout_s)

    def wait_for(self, operation: bytes, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """`get` or `wait`. Raises LateError with the keys that did not come in `timeout_s`."""
        arguments = struct.pack(">d", timeout_s), *(key.encode() for key in keys)
        return self.call(operation, *arguments, timeout_s=timeout_s)

    def clock(self) -> tuple[float, float]:
        """Seconds by which the server's clock is ahead of this one's, and the most it is off by.

        The answer was made at some moment between request and reply; the middle is assumed.
        """
        start, clock = time.perf_counter(), time.time()
        (answer,) = self.call(b"time")
        round_trip_s = time.perf_counter() - start
        (theirs,) = struct.unpack(">d", answer)
        return theirs - (clock + round_trip_s / 2), round_trip_s / 2

    def call(
        self, operation: bytes, *arguments: bytes, timeout_s: float | None = None
    ) -> list[bytes]:
        """
        Raises:
            LateError: keys did not come in time, or the server refuses the request.
            LostError: the connection is gone.
            ValueError: the request is too long.
        """
        if timeout_s is None:  # a server in a busy process may take long for what is quick
            timeout_s = self._timeout_s
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
            raise self._late(timeout_s, *values)
        if outcome == BAD:
            raise LateError(f"rank {self._rank}: {operation!r}: {values[0].decode()}")
        return values

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

    def _late(self, timeout_s: float, seen: bytes, here: bytes, *keys: bytes) -> LateError:
        expected = set(range(self._world_size))
        never = expected - _ranks(seen)
        gone = expected - never - _ranks(here)
        found = [
            f"{', '.join(f'rank {rank}' for rank in sorted(ranks))} {what}"
            for ranks, what in ((never, "never came"), (gone, "went away"))
            if ranks
        ]
        missing = [key.decode() for key in keys]
        return LateError(
            f"rank {self._rank} of {self._world_size} waited {timeout_s:g} s at {self._endpoint} "
            f"for {', '.join(missing)}; {'; '.join(found) or 'all ranks are connected'}",
            missing,
        )

    def _lost(self, error: OSError) -> LostError:
        return LostError(
            f"rank {self._rank} of {self._world_size}: the rendezvous at {self._endpoint}: {error}"
        )


def end_waits(endpoint: RendezvousEndpoint, reason: str, timeout_s: float) -> None:
    """From now on nobody waits there for keys that are missing: ranks get LateError with `reason`.

    For who knows that a rank will not come. Raises LostError when no server answers in `timeout_s`.
    """
    client = RendezvousClient(endpoint, _NO_RANK, 0, timeout_s)
    try:
        client.call(b"end_waits", reason.encode())
    finally:
        client.close()


def _ranks(listed: bytes) -> set[int]:
    return {int(rank) for rank in listed.split(b",") if rank}
