"""Rendezvous of ranks: a key-value store on one address, behind a token.

After the handshake of parallel/network.py a rank sends requests and reads an answer to each. Both
are frames: the length (4 bytes, big endian), then fields, each after its length. A request is the
name of an operation and its arguments; an answer begins with OK, LATE or BAD.

Ranks that another launcher has started share no secret yet. Those of one machine get the endpoint
over an abstract Unix socket: it needs no file, and the kernel tells the user of its peer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

from mcore_rl.config.errors import ConfigError
from mcore_rl.parallel import network
from mcore_rl.parallel.network import Challenge, read_exactly, set_deadline

OK, LATE, BAD = b"ok", b"late", b"bad"
WAITS_ENDED_KEY = "waits-ended"  # set by `end_waits`
MAX_FRAME_BYTES = 16 << 20
_MAX_STRANGERS = 128  # connections that have not authenticated yet
_EXPIRE_S = 0.05  # deadlines within this time are handled together
_IDLE_S = 3600.0  # select takes at most an int of milliseconds
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


@dataclass(eq=False, slots=True)
class _Peer:
    """A connection, not authenticated while it has a challenge."""

    sock: socket.socket
    challenge: Challenge | None
    deadline: float  # of the handshake, or of the wait
    rank: int | None = None
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    awaited_keys: tuple[bytes, ...] = ()  # keys that it waits for
    num_present: int = 0  # leading keys of `awaited_keys` that exist: not looked up again
    is_get: bool = False  # whether the answer has the values


class RendezvousServer:
    """The key-value store, served from a daemon thread until `close`.

    Strangers cannot block ranks: each has one deadline, and above _MAX_STRANGERS the oldest is
    disconnected.
    """

    def __init__(self, address: str) -> None:
        """Listen on an address and a free port; raise ConfigError if that is not possible."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=4096)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address!r} ({error.strerror}); allowed: an address of this "
                "machine"
            ) from error
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()[:2]
        self.endpoint = RendezvousEndpoint(host, port, secrets.token_hex(32))
        self._values: dict[bytes, bytes] = {}
        self._peers: dict[int, _Peer] = {}  # by file descriptor
        self._strangers: dict[_Peer, None] = {}  # peers with a challenge, oldest first
        self._waiting: dict[bytes, list[_Peer]] = {}  # by a missing key
        self._ranks_seen: set[int] = set()
        self._end_reason = b""  # of end_waits
        self._next_deadline = math.inf
        self._operations: dict[bytes, Callable[..., None]] = {
            b"join": self._join,
            b"set": self._set,
            b"get": self._get,
            b"wait": self._wait,
            b"add": self._add,
            b"append": self._append,
            b"compare_set": self._compare_set,
            b"delete_key": self._delete_key,
            b"check": self._check,
            b"num_keys": self._num_keys,
            b"time": self._time,
            b"end_waits": self._end_waits,
        }
        self._closing, self._close_signal = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._closing, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server. May be called twice."""
        self._close_signal.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            remaining_s = self._next_deadline - time.monotonic()
            for key, events in self._selector.select(min(max(remaining_s, 0.0), _IDLE_S)):
                if key.fileobj is self._closing:
                    return self._shut_down()
                peer = self._peers.get(key.fd)
                if key.fileobj is self._listener:
                    self._accept()
                elif peer is not None and peer is key.data:  # not disconnected since select
                    self._handle_events(peer, events)
            if time.monotonic() >= self._next_deadline:
                self._expire()

    def _shut_down(self) -> None:
        for peer in list(self._peers.values()):
            self._disconnect(peer)
        for resource in (self._listener, self._closing, self._selector):
            resource.close()

    def _accept(self) -> None:
        if len(self._strangers) >= _MAX_STRANGERS:
            self._disconnect(next(iter(self._strangers)))
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # disconnected already, or this process is out of file descriptors
            time.sleep(0.001)
            return
        challenge = Challenge(self.endpoint.token)
        peer = self._peers[sock.fileno()] = _Peer(sock, challenge, math.inf)
        self._strangers[peer] = None
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._set_deadline(peer, network.HANDSHAKE_TIMEOUT_S)
        self._send(peer, challenge.nonce)

    def _disconnect(self, peer: _Peer) -> None:
        if self._peers.pop(peer.sock.fileno(), None) is not None:
            self._strangers.pop(peer, None)
            self._selector.unregister(peer.sock)
            peer.sock.close()
            peer.awaited_keys = ()

    def _set_deadline(self, peer: _Peer, timeout_s: float) -> None:
        peer.deadline = time.monotonic() + timeout_s
        self._next_deadline = min(self._next_deadline, peer.deadline)

    def _expire(self) -> None:
        time_s = time.monotonic()
        late = [peer for peer in self._peers.values() if peer.deadline <= time_s]
        connected = {peer.rank for peer in self._peers.values() if peer.rank is not None}
        ranks = (_encode_ranks(self._ranks_seen), _encode_ranks(connected)) if late else ()
        for peer in late:
            if peer.challenge is not None:
                self._disconnect(peer)
            else:
                missing = [key for key in peer.awaited_keys if key not in self._values]
                peer.awaited_keys, peer.deadline = (), math.inf
                self._send(peer, encode_frame(LATE, *ranks, *missing))
        nearest = min((peer.deadline for peer in self._peers.values()), default=math.inf)
        self._next_deadline = max(nearest, time_s + _EXPIRE_S)

    def _handle_events(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(peer, b"")
        if not events & selectors.EVENT_READ:
            return
        try:
            data = peer.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.inbox += data
        if not data or len(peer.inbox) > MAX_FRAME_BYTES + 4:
            self._disconnect(peer)
        elif peer.challenge is None or self._authenticate(peer, peer.challenge):
            self._run_requests(peer)

    def _authenticate(self, peer: _Peer, challenge: Challenge) -> bool:
        """Return whether the peer has sent a valid answer to its challenge."""
        if len(peer.inbox) < network.ANSWER_BYTES:
            return False
        is_right, reply = challenge.verify(bytes(peer.inbox[: network.ANSWER_BYTES]))
        del peer.inbox[: network.ANSWER_BYTES]
        peer.challenge, peer.deadline = None, math.inf
        del self._strangers[peer]
        self._send(peer, reply)
        if not is_right:
            self._disconnect(peer)
        return is_right

    def _run_requests(self, peer: _Peer) -> None:
        """Run the complete requests in the inbox, until one has to wait."""
        inbox = peer.inbox
        while not peer.awaited_keys and len(inbox) >= 4:
            end = 4 + int.from_bytes(inbox[:4], "big")
            if len(inbox) < end:
                return
            body = bytes(inbox[4:end])
            del inbox[:end]
            try:
                operation, *arguments = decode_fields(body)
                self._operations[operation](peer, *arguments)
            except (ValueError, TypeError, KeyError, struct.error) as error:
                self._send(peer, encode_frame(BAD, f"{type(error).__name__}: {error}".encode()))

    def _send(self, peer: _Peer, data: bytes) -> None:
        peer.outbox += data
        try:
            with contextlib.suppress(BlockingIOError):
                while peer.outbox:
                    del peer.outbox[: peer.sock.send(peer.outbox)]
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
            if self._selector.get_key(peer.sock).events != events:
                self._selector.modify(peer.sock, events, peer)
        except OSError:
            self._disconnect(peer)

    def _join(self, peer: _Peer, rank: bytes) -> None:
        peer.rank = int(rank)
        self._ranks_seen.add(peer.rank)
        self._send(peer, encode_frame(OK))

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for peer in self._waiting.pop(key, ()):
            # Otherwise its wait has timed out, or it has disconnected.
            if peer.awaited_keys and peer.awaited_keys[peer.num_present] == key:
                self._answer_if_complete(peer)

    def _set(self, peer: _Peer, *keys_and_values: bytes) -> None:
        keys, values = keys_and_values[::2], keys_and_values[1::2]
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)
        self._send(peer, encode_frame(OK))

    def _get(self, peer: _Peer, timeout_s: bytes, *keys: bytes) -> None:
        self._wait(peer, timeout_s, *keys, is_get=True)

    def _wait(self, peer: _Peer, timeout_s: bytes, *keys: bytes, is_get: bool = False) -> None:
        self._set_deadline(peer, *struct.unpack(">d", timeout_s))
        peer.awaited_keys, peer.num_present, peer.is_get = keys, 0, is_get
        self._answer_if_complete(peer)
        if peer.awaited_keys and self._end_reason:
            self._refuse(peer)

    def _end_waits(self, peer: _Peer, reason: bytes) -> None:
        self._end_reason = reason
        self._put(WAITS_ENDED_KEY.encode(), reason)
        for waiting in [other for other in self._peers.values() if other.awaited_keys]:
            self._refuse(waiting)
        self._send(peer, encode_frame(OK))

    def _refuse(self, peer: _Peer) -> None:
        peer.awaited_keys, peer.deadline = (), math.inf
        self._send(peer, encode_frame(BAD, self._end_reason))

    def _answer_if_complete(self, peer: _Peer) -> None:
        for start in (peer.num_present, 0):  # from the first again: keys may have been deleted
            for index in range(start, len(peer.awaited_keys)):
                if peer.awaited_keys[index] not in self._values:
                    peer.num_present = index
                    self._waiting.setdefault(peer.awaited_keys[index], []).append(peer)
                    return
        values = [self._values[key] for key in peer.awaited_keys] if peer.is_get else []
        peer.awaited_keys, peer.deadline = (), math.inf
        self._send(peer, encode_frame(OK, *values))

    def _add(self, peer: _Peer, key: bytes, amount: bytes) -> None:
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._put(key, total)
        self._send(peer, encode_frame(OK, total))

    def _append(self, peer: _Peer, key: bytes, value: bytes) -> None:
        self._put(key, self._values.get(key, b"") + value)
        self._send(peer, encode_frame(OK))

    def _compare_set(self, peer: _Peer, key: bytes, expected: bytes, desired: bytes) -> None:
        """Set a missing key if `expected` is empty, as torch's TCPStore does."""
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
        self._send(peer, encode_frame(OK, self._values.get(key, expected)))

    def _delete_key(self, peer: _Peer, key: bytes) -> None:
        self._send(peer, encode_frame(OK, b"%d" % (self._values.pop(key, None) is not None)))

    def _check(self, peer: _Peer, *keys: bytes) -> None:
        self._send(peer, encode_frame(OK, b"%d" % all(key in self._values for key in keys)))

    def _num_keys(self, peer: _Peer) -> None:
        self._send(peer, encode_frame(OK, b"%d" % len(self._values)))

    def _time(self, peer: _Peer) -> None:
        self._send(peer, encode_frame(OK, struct.pack(">d", time.time())))


def _encode_ranks(ranks: set[int]) -> bytes:
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
