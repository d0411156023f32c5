"""The plain route for weights: named tensors over TCP, one at a time, each with its checksum.

After the handshake of connection.py:

    sender:   tensor, tensor, ...       sender: end (count, version) receiver: done
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from isal import isal_zlib

from mcore_rl.weight_sync.connection import (
    Connection,
    StreamError,
    accept,
    admit,
    greet,
    reason,
)


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
                    raise StreamError(f"{connection.peer} refused the weights: {reason(answer)}")
        except BaseException as error:
            for connection in connections:
                connection.tell_failure(f"{type(error).__name__}: {error}")
            raise
        finally:
            for connection in connections:
                connection.close()

    def _accept_all(self, version: int) -> list[Connection]:
        token, timeout_s = self.endpoint.token, self.endpoint.timeout_s
        deadline = time.monotonic() + timeout_s
        accepted: list[Connection] = []
        try:
            while len(accepted) < self.num_receivers:
                sock, address = accept(self._listener, deadline)
                connection = Connection(sock, f"receiver {address[0]}:{address[1]}")
                if admit(connection, token, version, timeout_s):
                    accepted.append(connection)
        except TimeoutError:
            for connection in accepted:
                connection.tell_failure("other receivers did not come")
                connection.close()
            raise StreamError(
                f"version {version}: {len(accepted)} of {self.num_receivers} receivers came within "
                f"{timeout_s:g} s"
            ) from None
        return accepted

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
    failure = "the receiver stopped"
    try:
        greet(connection, endpoint.token, version)
        count, last = 0, "the start"
        while True:
            doing = f"version {version} broke off after {count} tensors (last: {last})"
            header = connection.read_header(doing)
            if header["kind"] != "tensor":
                break
            yield header["name"], _read_tensor(connection, header)
            count, last = count + 1, header["name"]
        if header["kind"] != "end":
            raise StreamError(f"{doing}: the sender reports {reason(header)}")
        if (header["count"], header["version"]) != (count, version):
            raise StreamError(
                f"expected version {version}, got {count} tensors; the sender says it sent "
                f"{header['count']} tensors of version {header['version']}"
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


def _connect(endpoint: StreamEndpoint) -> Connection:
    peer = f"weight sender {endpoint.host}:{endpoint.port}"
    try:
        address = (endpoint.host, endpoint.port)
        connection = Connection(socket.create_connection(address, endpoint.timeout_s), peer)
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
        "crc32": isal_zlib.crc32(body),
    }
    return header, body


def _read_tensor(connection: Connection, header: dict[str, Any]) -> torch.Tensor:
    name, shape, nbytes = header["name"], header["shape"], header["nbytes"]
    dtype = getattr(torch, header["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise StreamError(f"{name}: unknown dtype {header['dtype']!r}")
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise StreamError(f"{name}: {nbytes} bytes are not a {header['dtype']} tensor of {shape}")
    raw = torch.empty(nbytes, dtype=torch.uint8)
    body = raw.numpy().data
    connection.read_into(body, f"in the middle of {name}")
    if isal_zlib.crc32(body) != header["crc32"]:
        raise StreamError(f"{name}: the checksum does not match, the bytes were damaged on the way")
    return raw.view(dtype).reshape(shape)
