"""The plain route for weights: named tensors over TCP, one at a time, each with its checksum.

A frame is a length (4 bytes, big endian), a JSON header and, for a tensor, its raw bytes. Nothing
is pickled, so a peer can send wrong numbers but never code. One update on the wire:

    receiver: hello (token, version)    sender: welcome (version)    receiver: ready
    sender:   tensor, tensor, ...       sender: end (count, version) receiver: done

Every wait has a timeout and either side's death shows at the other as a `StreamError` that says so.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

_MAX_HEADER_BYTES = 1 << 20
_HANDSHAKE_TIMEOUT_S = 10.0  # a stranger that connects and stays silent must not block the others


class StreamError(RuntimeError):
    """A stream of weights that did not arrive whole; the message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class StreamEndpoint:
    """Where a sender listens; plain fields, so that it crosses any process boundary."""

    host: str
    port: int
    token: str = field(repr=False)  # who shows it may receive: keep it out of logs
    timeout_s: float  # how long either side waits for the other's next move


class StreamSender:
    """The trainer's end. Binds at once; each `send` serves `num_receivers` new connections.

    Peak memory is one tensor, whatever the model's size. All receivers read in step: the slowest
    one sets the pace.
    """

    def __init__(self, bind_address: str, num_receivers: int, timeout_s: float) -> None:
        self.num_receivers = num_receivers
        self._listener = socket.create_server((bind_address, 0), backlog=max(8, num_receivers))
        host, port = self._listener.getsockname()[:2]
        self.endpoint = StreamEndpoint(host, port, secrets.token_hex(32), timeout_s)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Send every (name, tensor) to every receiver, and wait until each has confirmed all.

        Raises StreamError when a receiver does not come in time, goes away or reports an error; an
        exception of `tensors` itself is passed on after the receivers have been told.
        """
        connections = self._accept_all(version)
        try:
            count = 0
            for name, tensor in tensors:
                header, body = _tensor_frame(name, tensor)
                for connection in connections:
                    connection.send(header, body, doing=f"sending {name}")
                count += 1
            for connection in connections:
                connection.send({"kind": "end", "count": count, "version": version})
            for connection in connections:
                answer = connection.read_header("waiting for the receiver's last word")
                if answer["kind"] != "done":
                    raise StreamError(f"{connection.peer} refused the weights: {_reason(answer)}")
        except BaseException as error:
            for connection in connections:
                connection.tell_failure(f"{type(error).__name__}: {error}")
            raise
        finally:
            for connection in connections:
                connection.close()

    def _accept_all(self, version: int) -> list[_Connection]:
        deadline = time.monotonic() + self.endpoint.timeout_s
        accepted: list[_Connection] = []
        try:
            while len(accepted) < self.num_receivers:
                self._listener.settimeout(max(0.001, deadline - time.monotonic()))
                sock, address = self._listener.accept()
                connection = _Connection(sock, f"receiver {address[0]}:{address[1]}")
                if self._admit(connection, version):
                    accepted.append(connection)
        except TimeoutError:
            for connection in accepted:
                connection.tell_failure("other receivers did not come")
                connection.close()
            raise StreamError(
                f"version {version}: {len(accepted)} of {self.num_receivers} receivers came within "
                f"{self.endpoint.timeout_s:g} s"
            ) from None
        return accepted

    def _admit(self, connection: _Connection, version: int) -> bool:
        """Whether the peer holds the token, wants this version and is still there."""
        connection.set_timeout(min(_HANDSHAKE_TIMEOUT_S, self.endpoint.timeout_s))
        try:
            hello = connection.read_header("waiting for hello")
            if not hmac.compare_digest(
                str(hello.get("token")).encode(), self.endpoint.token.encode()
            ):
                raise StreamError("wrong token")
            if hello.get("version") != version:
                raise StreamError(f"this sends version {version}, not {hello.get('version')}")
            connection.send({"kind": "welcome", "version": version})
            # A connection that died while it waited in the queue ends here.
            connection.read_expected("ready", "waiting for ready")
        except StreamError as error:
            connection.tell_failure(str(error))
            connection.close()
            return False
        connection.set_timeout(self.endpoint.timeout_s)
        return True

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> StreamSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def receive(
    endpoint: StreamEndpoint, version: int
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the (name, CPU tensor) pairs of one update, each with its checksum verified.

    Ends normally only if every tensor of `version` has arrived and the consumer took them all.
    Raises StreamError otherwise; a consumer that stops early shows at the sender as a refusal.
    """
    connection = _connect(endpoint)
    complete = False
    reason = "the receiver stopped"
    try:
        connection.send({"kind": "hello", "token": endpoint.token, "version": version})
        connection.read_expected("welcome", "waiting for the sender's welcome")
        connection.send({"kind": "ready"})
        count, last = 0, "the start"
        while True:
            doing = f"version {version} broke off after {count} tensors (last: {last})"
            header = connection.read_header(doing)
            if header["kind"] != "tensor":
                break
            yield header["name"], _read_tensor(connection, header)
            count, last = count + 1, header["name"]
        if header["kind"] != "end":
            raise StreamError(f"{doing}: the sender reports {_reason(header)}")
        if (header["count"], header["version"]) != (count, version):
            raise StreamError(
                f"expected version {version}, got {count} tensors; the sender says it sent "
                f"{header['count']} tensors of version {header['version']}"
            )
        connection.send({"kind": "done"})
        complete = True
    except StreamError as error:
        reason = str(error)
        raise
    finally:
        if not complete:
            connection.tell_failure(reason)
        connection.close()


def _connect(endpoint: StreamEndpoint) -> _Connection:
    peer = f"weight sender {endpoint.host}:{endpoint.port}"
    try:
        address = (endpoint.host, endpoint.port)
        connection = _Connection(socket.create_connection(address, endpoint.timeout_s), peer)
    except OSError as error:
        raise StreamError(f"cannot reach {peer}: {error}") from error
    connection.set_timeout(endpoint.timeout_s)
    return connection


def _tensor_frame(name: str, tensor: torch.Tensor) -> tuple[dict[str, Any], memoryview]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    body = flat.view(torch.uint8).numpy().data
    header = {
        "kind": "tensor",
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "nbytes": body.nbytes,
        "crc32": zlib.crc32(body),
    }
    return header, body


def _read_tensor(connection: _Connection, header: dict[str, Any]) -> torch.Tensor:
    name, shape, nbytes = header["name"], header["shape"], header["nbytes"]
    dtype = getattr(torch, header["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise StreamError(f"{name}: unknown dtype {header['dtype']!r}")
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise StreamError(f"{name}: {nbytes} bytes are not a {header['dtype']} tensor of {shape}")
    raw = torch.empty(nbytes, dtype=torch.uint8)
    body = raw.numpy().data
    connection.read_into(body, f"in the middle of {name}")
    if zlib.crc32(body) != header["crc32"]:
        raise StreamError(f"{name}: the checksum does not match, the bytes were damaged on the way")
    return raw.view(dtype).reshape(shape)


def _reason(header: dict[str, Any]) -> str:
    return str(header.get("reason", f"an unexpected {header['kind']!r} frame"))


class _Connection:
    """A socket that speaks frames; every failure becomes a StreamError that names its peer."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_timeout(self, timeout_s: float) -> None:
        self._sock.settimeout(timeout_s)

    def send(
        self, header: dict[str, Any], body: memoryview | None = None, doing: str = "sending"
    ) -> None:
        encoded = json.dumps(header).encode()
        try:
            self._sock.sendall(struct.pack(">I", len(encoded)) + encoded)
            if body is not None:
                self._sock.sendall(body)
        except OSError as error:
            raise self._failure(doing, error) from error

    def read_header(self, doing: str) -> dict[str, Any]:
        prefix = bytearray(4)
        self.read_into(memoryview(prefix), doing)
        (length,) = struct.unpack(">I", prefix)
        if length > _MAX_HEADER_BYTES:
            raise StreamError(
                f"{self.peer}: a header of {length} bytes is not part of this protocol"
            )
        encoded = bytearray(length)
        self.read_into(memoryview(encoded), doing)
        try:
            header = json.loads(encoded)
        except ValueError:
            header = None
        if not isinstance(header, dict) or "kind" not in header:
            raise StreamError(f"{self.peer}: not a header of this protocol")
        return header

    def read_expected(self, kind: str, doing: str) -> dict[str, Any]:
        header = self.read_header(doing)
        if header["kind"] != kind:
            raise StreamError(f"{self.peer} refused: {_reason(header)}")
        return header

    def read_into(self, view: memoryview, doing: str) -> None:
        try:
            while view.nbytes:
                received = self._sock.recv_into(view)
                if received == 0:
                    raise StreamError(f"{self.peer} closed the connection: {doing}")
                view = view[received:]
        except OSError as error:
            raise self._failure(doing, error) from error

    def tell_failure(self, reason: str) -> None:
        """Best effort: the peer may be gone, or in the middle of a tensor that will not come."""
        with contextlib.suppress(StreamError, OSError):
            self.set_timeout(1.0)
            self.send({"kind": "failed", "reason": reason})

    def close(self) -> None:
        self._sock.close()

    def _failure(self, doing: str, error: OSError) -> StreamError:
        if isinstance(error, TimeoutError):
            return StreamError(f"{self.peer} made no move for {self._sock.gettimeout()} s: {doing}")
        return StreamError(f"{self.peer} went away ({error}): {doing}")
