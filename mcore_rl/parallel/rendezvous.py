"""Rendezvous of ranks: a key-value store on one address, behind a token.

After the handshake of parallel/network.py a rank sends requests and reads an answer to each. Both
are frames: the length (4 bytes, big endian), then fields, each after its length. A request is the
name of an operation and its arguments; an answer begins with OK, LATE or BAD.

Ranks that another launcher has started share no secret yet. Those of one machine get the endpoint
over an abstract Unix socket: it needs no file, and the kernel tells the user of its peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

from mcore_rl.config.errors import ConfigError
from mcore_rl.parallel import network
from mcore_rl.parallel.network import Challenge, read_exactly, set_deadline

OK, LATE, BAD = b"ok", b"late", b"bad"
WAITS_ENDED_KEY = "waits-ended"  # set by `end_waits`
MAX_FRAME_BYTES = 16 << 20
_MAX_STRANGERS = 128  # connections that have not authenticated yet
_BACKLOG = 4096  # connections that wait to be accepted
_GRACE_S = 10.0  # for the server's answer, beyond the requested wait
_RETRY_S = 0.05  # of a client, when the server has too many strangers
_HANDSHAKE_TRY_S = 20.0  # of a client, for the server's answer, until it connects again
_NO_RANK = -1
_LOCAL_RETRY_S, _LOCAL_MAX_BYTES = 0.1, 4096  # of fetch_endpoint
_HOST, _PORT, _TOKEN = "RENDEZVOUS_HOST", "RENDEZVOUS_PORT", "RENDEZVOUS_TOKEN"


@dataclass(frozen=True, slots=True)
class RendezvousEndpoint:
    """Address and token of a server, as plain fields."""

    host: str
    port: int
    token: str = field(repr=False)  # a secret: it allows to join

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables that a rank reads."""
        return {_HOST: self.host, _PORT: str(self.port), _TOKEN: self.token}

    @classmethod
    def read_environment(cls) -> RendezvousEndpoint:
        """Read the endpoint of a rank; raise ConfigError if this process is no rank."""
        host, port, token = read_rank_environment(_HOST, _PORT, _TOKEN)
        return cls(host, int(port), token)


def read_rank_environment(*names: str) -> list[str]:
    """Return environment variables of a rank; raise ConfigError with the names of missing ones."""
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set in the environment: ranks are started by mcore-rl or by "
            "run_on_ranks of mcore_rl/jobs/ranks.py, and not by torchrun"
        )
    return [os.environ[name] for name in names]


def encode_frame(*fields: bytes) -> bytes:
    """Encode fields as a frame."""
    body = b"".join(struct.pack(">I", len(value)) + value for value in fields)
    return struct.pack(">I", len(body)) + body


def decode_fields(body: bytes) -> list[bytes]:
    """Decode the fields of a frame without its length; raise ValueError if lengths do not fit."""
    fields, position = [], 0
    while position < len(body):
        start = position + 4
        position = start + int.from_bytes(body[position:start], "big")
        fields.append(body[start:position])
    if position != len(body):
        raise ValueError("a field is longer than its frame")
    return fields


class RendezvousServer:
    """The key-value store, served by the event loop of a daemon thread until `close`.

    Strangers cannot block ranks: each has one deadline, and above _MAX_STRANGERS the oldest is
    disconnected.
    """

    def __init__(self, address: str) -> None:
        """Listen on an address and a free port; raise ConfigError if that is not possible."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address!r} ({error.strerror}); allowed: an address of this "
                "machine"
            ) from error
        host, port = listener.getsockname()[:2]
        self.endpoint = RendezvousEndpoint(host, port, secrets.token_hex(32))
        self._values: dict[bytes, bytes] = {}
        self._arrivals: dict[bytes, asyncio.Event] = {}  # by a missing key that is waited for
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # not authenticated, oldest first
        self._ranks: dict[asyncio.StreamWriter, int] = {}  # that are connected
        self._ranks_seen: set[int] = set()
        self._end_reason = b""  # of end_waits
        self._operations: dict[bytes, Callable[..., Sequence[bytes]]] = {
            b"set": self._set,
            b"add": self._add,
            b"append": self._append,
            b"compare_set": self._compare_set,
            b"delete_key": self._delete_key,
            b"check": self._check,
            b"num_keys": lambda: [b"%d" % len(self._values)],
            b"time": lambda: [struct.pack(">d", time.time())],
            b"end_waits": self._end_waits,
        }
        self._loop, self._is_closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="rendezvous", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the server. May be called twice."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._is_closing.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._handle_connection, sock=listener, backlog=1)
        # asyncio accepts so many connections at once. When thousands of ranks connect, those that
        # are accepted have to authenticate before more than _MAX_STRANGERS are.
        listener.listen(_BACKLOG)
        await self._is_closing.wait()
        server.close()

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Authenticate a client, then answer its requests until it disconnects."""
        try:
            # Python 3.12.1 prints tasks that are cancelled, as these are when the server closes.
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
                # A task for each request: while one waits, the end of the connection is seen.
                async with asyncio.TaskGroup() as answers:
                    if await self._authenticate(reader, writer):
                        while True:
                            body = await _read_frame(reader)
                            answers.create_task(self._answer(writer, body))
        finally:
            self._ranks.pop(writer, None)
            writer.close()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Return whether a client has sent a valid answer to its challenge.

        Raises:
            OSError, EOFError: It is late or has disconnected.
        """
        if len(self._strangers) >= _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        challenge = Challenge(self.endpoint.token)
        writer.write(challenge.nonce)
        try:
            async with asyncio.timeout(network.HANDSHAKE_TIMEOUT_S):
                answer = await reader.readexactly(network.ANSWER_BYTES)
        finally:
            self._strangers.pop(writer, None)
        is_right, reply = challenge.verify(answer)
        writer.write(reply)
        return is_right

    async def _answer(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        """Run a request and send its answer."""
        try:
            operation, *arguments = decode_fields(body)
            if operation == b"join":
                answer = [OK, *self._join(writer, *arguments)]
            elif operation in (b"get", b"wait"):
                answer = await self._wait(*arguments, is_get=operation == b"get")
            else:
                answer = [OK, *self._operations[operation](*arguments)]
        except (ValueError, TypeError, KeyError, struct.error) as error:
            answer = [BAD, f"{type(error).__name__}: {error}".encode()]
        writer.write(encode_frame(*answer))
        await writer.drain()

    def _join(self, writer: asyncio.StreamWriter, rank: bytes) -> Sequence[bytes]:
        self._ranks[writer] = int(rank)
        self._ranks_seen.add(int(rank))
        return []

    async def _wait(self, timeout_s: bytes, *keys: bytes, is_get: bool) -> list[bytes]:
        """Wait until all keys exist; return the fields of the answer."""
        try:
            async with asyncio.timeout(*struct.unpack(">d", timeout_s)):
                while missing := [key for key in keys if key not in self._values]:
                    for key in missing:  # then all again: keys may have been deleted
                        while key not in self._values:
                            if self._end_reason:
                                return [BAD, self._end_reason]
                            await self._arrivals.setdefault(key, asyncio.Event()).wait()
        except TimeoutError:
            ranks = _encode_ranks(self._ranks_seen), _encode_ranks(self._ranks.values())
            return [LATE, *ranks, *(key for key in keys if key not in self._values)]
        return [OK, *(self._values[key] for key in keys if is_get)]

    def _end_waits(self, reason: bytes) -> Sequence[bytes]:
        self._end_reason = reason
        self._put(WAITS_ENDED_KEY.encode(), reason)
        while self._arrivals:
            self._arrivals.popitem()[1].set()
        return []

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        if arrival := self._arrivals.pop(key, None):
            arrival.set()

    def _set(self, *keys_and_values: bytes) -> Sequence[bytes]:
        for key, value in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
            self._put(key, value)
        return []

    def _add(self, key: bytes, amount: bytes) -> Sequence[bytes]:
        self._put(key, b"%d" % (int(self._values.get(key, b"0")) + int(amount)))
        return [self._values[key]]

    def _append(self, key: bytes, value: bytes) -> Sequence[bytes]:
        self._put(key, self._values.get(key, b"") + value)
        return []

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Sequence[bytes]:
        """Set a missing key if `expected` is empty, as torch's TCPStore does."""
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
        return [self._values.get(key, expected)]

    def _delete_key(self, key: bytes) -> Sequence[bytes]:
        return [b"%d" % (self._values.pop(key, None) is not None)]

    def _check(self, *keys: bytes) -> Sequence[bytes]:
        return [b"%d" % all(key in self._values for key in keys)]


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read a frame without its length; raise EOFError if it ends or is too long."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise EOFError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


def _encode_ranks(ranks: Collection[int]) -> bytes:
    return ",".join(map(str, sorted(ranks))).encode()


class RendezvousTimeoutError(RuntimeError):
    """`keys` were not set in time; or, without keys, the server refused a request."""

    def __init__(self, message: str, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class RendezvousConnectionError(RuntimeError):
    """No server answers, it has another token, or the connection was lost."""


class RendezvousClient:
    """A connection of a rank or node, until `close`. Calls of several threads run one by one."""

    def __init__(
        self, endpoint: RendezvousEndpoint, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Connect; raise RendezvousConnectionError if no server answers in `timeout_s`."""
        self._endpoint, self._rank, self._world_size = endpoint, rank, world_size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._sock = self._connect(time.monotonic() + timeout_s)
        self.own_address: str = self._sock.getsockname()[0]
        self.call(b"join", b"%d" % rank)

    def close(self) -> None:
        self._sock.close()

    def set(self, key: str, value: bytes) -> None:
        self.call(b"set", key.encode(), value)

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Wait until all keys are set; return their values."""
        return self.request_keys(b"get", keys, timeout_s)

    def request_keys(self, operation: bytes, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Call `get` or `wait`; raise RendezvousTimeoutError with the keys that were not set."""
        arguments = struct.pack(">d", timeout_s), *(key.encode() for key in keys)
        return self.call(operation, *arguments, timeout_s=timeout_s)

    def measure_clock_offset(self) -> tuple[float, float]:
        """Measure the offset of the server's clock to that of this machine.

        Returns:
            Offset (server minus local) and its maximum error, in seconds: the server's time is
            assumed to be that of the middle between request and reply.
        """
        start, clock = time.perf_counter(), time.time()
        (answer,) = self.call(b"time")
        round_trip_s = time.perf_counter() - start
        (server_clock,) = struct.unpack(">d", answer)
        return server_clock - (clock + round_trip_s / 2), round_trip_s / 2

    def call(
        self, operation: bytes, *arguments: bytes, timeout_s: float | None = None
    ) -> list[bytes]:
        """Send a request and return the fields of its answer.

        Raises:
            RendezvousTimeoutError: Keys were not set in time, or the server refuses the request.
            RendezvousConnectionError: The connection is lost.
            ValueError: The request is too long.
        """
        if timeout_s is None:  # a server in a busy process may be slow
            timeout_s = self._timeout_s
        request = encode_frame(operation, *arguments)
        if len(request) > MAX_FRAME_BYTES:
            raise ValueError(
                f"{operation.decode()} of {len(request)} bytes; allowed at a rendezvous: "
                f"{MAX_FRAME_BYTES}"
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
                raise self._build_connection_error(error) from error
        outcome, *values = decode_fields(answer)
        if outcome == LATE:
            raise self._build_timeout_error(timeout_s, *values)
        if outcome == BAD:
            raise RendezvousTimeoutError(f"rank {self._rank}: {operation!r}: {values[0].decode()}")
        return values

    def _connect(self, deadline: float) -> socket.socket:
        """Authenticate to the server; connect again while it disconnects or is silent.

        It disconnects clients while it has too many that have not authenticated. It is silent if
        its kernel has lost the connection: when thousands of ranks connect at once, SYN cookies are
        sent, and connections that their clients believe open are dropped while the backlog is full
        (net/ipv4/tcp_ipv4.c, tcp_v4_syn_recv_sock).
        """
        address = (self._endpoint.host, self._endpoint.port)
        while True:
            try:
                sock = socket.create_connection(address, max(0.001, deadline - time.monotonic()))
            except OSError as error:
                raise self._build_connection_error(error) from error
            try_deadline = min(deadline, time.monotonic() + _HANDSHAKE_TRY_S)
            try:
                network.prove_token(sock, self._endpoint.token, try_deadline)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                sock.close()
                is_lost = isinstance(error, (ConnectionError, TimeoutError))
                if not is_lost or time.monotonic() >= deadline:
                    raise self._build_connection_error(error) from error
                time.sleep(_RETRY_S)
            else:
                return sock

    def _build_timeout_error(
        self, timeout_s: float, seen: bytes, connected: bytes, *keys: bytes
    ) -> RendezvousTimeoutError:
        expected = set(range(self._world_size))
        never = expected - _decode_ranks(seen)
        gone = expected - never - _decode_ranks(connected)
        missing_ranks = [
            f"{', '.join(f'rank {rank}' for rank in sorted(ranks))} {what}"
            for ranks, what in ((never, "never came"), (gone, "went away"))
            if ranks
        ]
        missing = [key.decode() for key in keys]
        return RendezvousTimeoutError(
            f"rank {self._rank} of {self._world_size} waited {timeout_s:g} s at {self._endpoint} "
            f"for {', '.join(missing)}; "
            f"{'; '.join(missing_ranks) or 'all ranks are connected'}",
            missing,
        )

    def _build_connection_error(self, error: OSError) -> RendezvousConnectionError:
        return RendezvousConnectionError(
            f"rank {self._rank} of {self._world_size}: the rendezvous at {self._endpoint}: {error}"
        )


def end_waits(endpoint: RendezvousEndpoint, reason: str, timeout_s: float) -> None:
    """Make every wait for a missing key fail with `reason`, as a RendezvousTimeoutError.

    Used when a rank is known to be dead. Raises RendezvousConnectionError if no server answers in
    `timeout_s`.
    """
    client = RendezvousClient(endpoint, _NO_RANK, 0, timeout_s)
    try:
        client.call(b"end_waits", reason.encode())
    finally:
        client.close()


def _decode_ranks(encoded: bytes) -> set[int]:
    return {int(rank) for rank in encoded.split(b",") if rank}


@contextlib.contextmanager
def share_endpoint(endpoint: RendezvousEndpoint, launch: str) -> Iterator[None]:
    """Serve the endpoint to processes of this user on this machine that `fetch_endpoint`.

    Args:
        launch: Name under which the endpoint is shared.

    Raises:
        RuntimeError: Another process uses that name.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_build_socket_name(launch))
        except OSError as error:
            raise RuntimeError(f"{launch}: another process tells its endpoint already") from error
        listener.listen(128)
        answer = json.dumps(asdict(endpoint)).encode()
        thread = threading.Thread(target=_serve_endpoint, args=(listener, answer), daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def fetch_endpoint(launch: str, timeout_s: float) -> RendezvousEndpoint:
    """Wait for the endpoint that `share_endpoint` serves.

    Raises:
        RuntimeError: None is served in time, or by a process of another user.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with (
            socket.socket(socket.AF_UNIX) as sock,
            contextlib.suppress(ConnectionError, TimeoutError),
        ):
            sock.settimeout(max(deadline - time.monotonic(), _LOCAL_RETRY_S))
            sock.connect(_build_socket_name(launch))
            if not _is_same_user(sock):
                raise RuntimeError(f"{launch}: a process of another user answers")
            with sock.makefile("rb") as stream:
                answer = stream.read(_LOCAL_MAX_BYTES)
            if answer:
                return RendezvousEndpoint(**json.loads(answer))
        if time.monotonic() > deadline:
            raise RuntimeError(f"{launch}: rank 0 has not come in {timeout_s:g} s")
        time.sleep(_LOCAL_RETRY_S)


def _serve_endpoint(listener: socket.socket, answer: bytes) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # shut down
            return
        with sock, contextlib.suppress(OSError):
            sock.settimeout(1.0)
            if _is_same_user(sock):
                sock.sendall(answer)


def _is_same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


def _build_socket_name(launch: str) -> str:
    return "\0mcore-rl-" + hashlib.sha256(f"{os.getuid()} {launch}".encode()).hexdigest()
