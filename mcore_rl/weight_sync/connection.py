"""Framed messages between two processes on one machine.

A frame is a length (4 bytes, big endian) and a JSON header; a header may announce raw bytes that
follow. Nothing is pickled, so a peer can send wrong numbers but never code. Every update begins
with the handshake of parallel/network.py, and continues with

    receiver: hello (the update)    sender: welcome    receiver: ready

Every wait has a timeout and either side's death shows at the other as a `StreamError` that says so.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.config.json_file import parse_json_object
from mcore_rl.parallel import network

_MAX_HEADER_BYTES = 1 << 20


class StreamError(PeerError):
    """Weights that did not arrive whole; the message says what is missing or wrong."""


class Connection:
    """A socket that speaks frames; every failure becomes a StreamError that names its peer."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self.sock = sock
        self._deadline: float | None = None
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_timeout(self, timeout_s: float) -> None:
        """For each of the peer's moves."""
        self._deadline = None
        self.sock.settimeout(timeout_s)

    def set_deadline(self, deadline: float) -> None:
        """For all of the peer's moves, by time.monotonic(), until the next `set_timeout`."""
        self._deadline = deadline

    def send(
        self, header: dict[str, Any], body: memoryview | None = None, doing: str = "sending"
    ) -> None:
        encoded = json.dumps(header).encode()
        try:
            self.sock.sendall(struct.pack(">I", len(encoded)) + encoded)
            if body is not None:
                self.sock.sendall(body)
        except OSError as error:
            raise self.failure(doing, error) from error

    def read_header(self, doing: str, limit_bytes: int = _MAX_HEADER_BYTES) -> dict[str, Any]:
        prefix = bytearray(4)
        self.read_into(memoryview(prefix), doing)
        (length,) = struct.unpack(">I", prefix)
        if length > limit_bytes:
            raise StreamError(
                f"{self.peer}: a header of {length} bytes is not part of this protocol"
            )
        encoded = bytearray(length)
        self.read_into(memoryview(encoded), doing)
        try:
            header = parse_json_object(bytes(encoded), f"a header of {self.peer}")
        except ConfigError as error:
            raise StreamError(str(error)) from error
        if "kind" not in header:
            raise StreamError(f"{self.peer}: not a header of this protocol")
        return header

    def read_expected(self, kind: str, doing: str) -> dict[str, Any]:
        header = self.read_header(doing)
        if header["kind"] != kind:
            raise StreamError(f"{self.peer} refused: {reason(header)}")
        return header

    def read_into(self, view: memoryview, doing: str) -> None:
        try:
            while view.nbytes:
                if self._deadline is not None:
                    network.set_deadline(self.sock, self._deadline)
                received = self.sock.recv_into(view)
                if received == 0:
                    raise StreamError(f"{self.peer} closed the connection: {doing}")
                view = view[received:]
        except OSError as error:
            raise self.failure(doing, error) from error

    def tell_failure(self, reason: str) -> None:
        """Best effort: the peer may be gone, or in the middle of a tensor that will not come."""
        with contextlib.suppress(StreamError, OSError):
            self.set_timeout(1.0)
            self.send({"kind": "failed", "reason": reason})

    def close(self) -> None:
        self.sock.close()

    def failure(self, doing: str, error: OSError) -> StreamError:
        if isinstance(error, PermissionError):
            return StreamError(f"{self.peer} refused: {error}")
        if isinstance(error, TimeoutError) and self._deadline is not None:
            return StreamError(f"{self.peer} was not done in time: {doing}")
        if isinstance(error, TimeoutError):
            return StreamError(f"{self.peer} made no move for {self.sock.gettimeout()} s: {doing}")
        return StreamError(f"{self.peer} went away ({error}): {doing}")


def accept(listener: socket.socket, deadline: float) -> tuple[socket.socket, Any]:
    """The next connection, and where it comes from.

    Raises TimeoutError when none comes before time.monotonic() reaches `deadline`.
    """
    listener.settimeout(max(0.001, deadline - time.monotonic()))
    return listener.accept()


def admit(
    connection: Connection, token: str, update: Mapping[str, object], timeout_s: float
) -> bool:
    """The sender's part of the handshake.

    Whether the peer has the token, wants this update and is still there. Otherwise the
    connection is closed, and a peer that has the token has been told why.
    """
    deadline = time.monotonic() + min(network.HANDSHAKE_TIMEOUT_S, timeout_s)
    try:
        network.challenge_client(connection.sock, token, deadline)
    except OSError:
        connection.close()
        return False
    connection.set_deadline(deadline)
    try:
        hello = connection.read_expected("hello", "waiting for hello")
        for name, value in update.items():
            if hello.get(name) != value:
                raise StreamError(f"this sends {name} {value}, not {hello.get(name)}")
        connection.send({"kind": "welcome"})
        # A connection that died while it waited in the queue ends here.
        connection.read_expected("ready", "waiting for ready")
    except StreamError as error:
        connection.tell_failure(str(error))
        connection.close()
        return False
    connection.set_timeout(timeout_s)
    return True


def greet(connection: Connection, token: str, update: Mapping[str, object]) -> None:
    """The receiver's part of the handshake; raises StreamError when the sender refuses."""
    timeout_s = connection.sock.gettimeout() or 0.0
    doing = "waiting for the sender to take the connection"
    try:
        network.prove_token(connection.sock, token, time.monotonic() + timeout_s)
    except OSError as error:
        connection.set_timeout(timeout_s)
        raise connection.failure(doing, error) from error
    connection.set_timeout(timeout_s)
    connection.send({"kind": "hello", **update})
    connection.read_expected("welcome", "waiting for the sender's welcome")
    connection.send({"kind": "ready"})


def reason(header: dict[str, Any]) -> str:
    """Why the other side gave up, from its last header."""
    return str(header.get("reason", f"an unexpected {header['kind']!r} frame"))
