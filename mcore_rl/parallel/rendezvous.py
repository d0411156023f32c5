"""The rendezvous of ranks: a key-value store on one address, behind a token.

A rank connects as parallel/handshake.py has it. From then on it sends requests and reads an answer
to each. Both are frames: the length (4 bytes, big endian), then fields, each after its own
length. A request is the name of an operation and its arguments; an answer begins with one of
OK, LATE and BAD. parallel/rendezvous_client.py is the other side.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import psutil

from mcore_rl.config.errors import ConfigError
from mcore_rl.parallel import handshake
from mcore_rl.parallel.handshake import Challenge

OK, LATE, BAD = b"ok", b"late", b"bad"
ENDED = "waits-ended"  # the key that is there when a rank is known not to come, or to be gone
MAX_FRAME_BYTES = 16 << 20
_MAX_STRANGERS = 128  # connections that have not proved the token yet
_EXPIRE_S = 0.05  # deadlines that are so near to each other are looked for together
_IDLE_S = 3600.0  # select takes no more than an int of milliseconds
_HOST, _PORT, _TOKEN = "RENDEZVOUS_HOST", "RENDEZVOUS_PORT", "RENDEZVOUS_TOKEN"


@dataclass(frozen=True, slots=True)
class RendezvousEndpoint:
    """How to reach a server; plain fields, so that it crosses any process boundary."""

    host: str
    port: int
    token: str = field(repr=False)  # who knows it may join: keep it out of logs

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def environment(self) -> dict[str, str]:
        """What tells a rank."""
        return {_HOST: self.host, _PORT: str(self.port), _TOKEN: self.token}

    @classmethod
    def from_environment(cls) -> RendezvousEndpoint:
        """Raises ConfigError when this process was not started as a rank."""
        host, port, token = of_rank(_HOST, _PORT, _TOKEN)
        return cls(host, int(port), token)


def of_rank(*names: str) -> list[str]:
    """The endpoint in a rank's environment; raises ConfigError with what is missing."""
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set in the environment: ranks are started by mcore-rl or by "
            "run_on_ranks of mcore_rl/jobs/ranks.py, and not by torchrun"
        )
    return [os.environ[name] for name in names]


def interface_of(address: str) -> str:
    """The network interface of this machine with an address, as GLOO_SOCKET_IFNAME takes it."""
    for name, found in psutil.net_if_addrs().items():
        if address in (one.address.partition("%")[0] for one in found):
            return str(name)
    raise ConfigError(f"{address} is not an address of this machine")


def use_interface_of(address: str) -> None:
    """Have gloo and NCCL of this process use the interface with an address of this machine.

    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of the user's are left as they are. Call it before the
    first group of the process: NCCL reads its variable once.
    """
    interface = interface_of(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # not what begins so


def use_interface_towards(host: str, port: int) -> None:
    """As `use_interface_of`, with the address by which this machine reaches another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))  # sends nothing
        use_interface_of(sock.getsockname()[0])


def address_of(interface: str) -> str:
    """The IPv4 address of an interface of this machine; "" is that of the default route.

    Raises:
        ConfigError: there is none.
    """
    if not interface:
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as sock:
            sock.connect(("203.0.113.1", 9))  # nobody's, by RFC 5737, and nothing is sent
            return str(sock.getsockname()[0])
        raise ConfigError(
            "no interface is named, and this machine has no default route that would say by which "
            "address others reach it"
        )
    found = {
        name: [one.address for one in addresses if one.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if not found.get(interface):
        allowed = ", ".join(sorted(name for name, addresses in found.items() if addresses))
        raise ConfigError(f"interface {interface!r} has no IPv4 address; allowed: {allowed}")
    return str(found[interface][0])


def frame(*fields: bytes) -> bytes:
    body = b"".join(struct.pack(">I", len(one)) + one for one in fields)
    return struct.pack(">I", len(body)) + body


def fields_of(body: bytes) -> list[bytes]:
    """Raises ValueError when the lengths do not add up."""
    found, position = [], 0
    while position < len(body):
        start = position + 4
        position = start + int.from_bytes(body[position:start], "big")
        found.append(body[start:position])
    if position != len(body):
        raise ValueError("a field is longer than its frame")
    return found


@dataclass(eq=False, slots=True)
class _Peer:
    """A connection: a stranger's while it has a challenge."""

    sock: socket.socket
    challenge: Challenge | None
    deadline: float  # of the handshake, or of the wait
    rank: int | None = None
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    wanted: tuple[bytes, ...] = ()  # the keys that it waits for
    num_present: int = 0  # of these keys, from the first: not looked up again at each new key
    is_get: bool = False  # and wants the values of


class RendezvousServer:
    """Serves from its own thread until `close`, or until the process ends.

    Strangers take no time from ranks: each has one deadline, and there are never more than
    _MAX_STRANGERS; the oldest has to go.
    """

    def __init__(self, address: str) -> None:
        """Binds to one address and a free port. Raises ConfigError when that cannot be."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=1024)
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
        self._strangers: dict[_Peer, None] = {}  # peers with a challenge, the oldest first
        self._waiting: dict[bytes, list[_Peer]] = {}  # by a missing key
        self._ranks_seen: set[int] = set()
        self._why_ended = b""  # empty while ranks may wait for each other
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
        self._closing, self._bell = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._closing, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """May be called twice."""
        self._bell.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            left_s = self._next_deadline - time.monotonic()
            for key, events in self._selector.select(min(max(left_s, 0.0), _IDLE_S)):
                if key.fileobj is self._closing:
                    return self._end()
                peer = self._peers.get(key.fd)
                if key.fileobj is self._listener:
                    self._accept()
                elif peer is not None and peer is key.data:  # not dropped since
                    self._move(peer, events)
            if time.monotonic() >= self._next_deadline:
                self._expire()

    def _end(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer)
        for open_one in (self._listener, self._closing, self._selector):
            open_one.close()

    def _accept(self) -> None:
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it has gone again, or this process is out of file descriptors
            time.sleep(0.001)
            return
        challenge = Challenge(self.endpoint.token)
        peer = self._peers[sock.fileno()] = _Peer(sock, challenge, math.inf)
        self._strangers[peer] = None
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._set_deadline(peer, handshake.TIMEOUT_S)
        self._send(peer, challenge.nonce)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.sock.fileno(), None) is not None:
            self._strangers.pop(peer, None)
            self._selector.unregister(peer.sock)
            peer.sock.close()
            peer.wanted = ()

    def _set_deadline(self, peer: _Peer, timeout_s: float) -> None:
        peer.deadline = time.monotonic() + timeout_s
        self._next_deadline = min(self._next_deadline, peer.deadline)

    def _expire(self) -> None:
        now = time.monotonic()
        late = [peer for peer in self._peers.values() if peer.deadline <= now]
        connected = {peer.rank for peer in self._peers.values() if peer.rank is not None}
        ranks = (_joined(self._ranks_seen), _joined(connected)) if late else ()
        for peer in late:
            if peer.challenge is not None:
                self._drop(peer)
            else:
                missing = [key for key in peer.wanted if key not in self._values]
                peer.wanted, peer.deadline = (), math.inf
                self._send(peer, frame(LATE, *ranks, *missing))
        nearest = min((peer.deadline for peer in self._peers.values()), default=math.inf)
        self._next_deadline = max(nearest, now + _EXPIRE_S)

    def _move(self, peer: _Peer, events: int) -> None:
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
            self._drop(peer)
        elif peer.challenge is None or self._admit(peer, peer.challenge):
            self._take(peer)

    def _admit(self, peer: _Peer, challenge: Challenge) -> bool:
        """Whether it has proved the token by now."""
        if len(peer.inbox) < handshake.ANSWER_BYTES:
            return False
        is_right, reply = challenge.verdict(bytes(peer.inbox[: handshake.ANSWER_BYTES]))
        del peer.inbox[: handshake.ANSWER_BYTES]
        peer.challenge, peer.deadline = None, math.inf
        del self._strangers[peer]
        self._send(peer, reply)
        if not is_right:
            self._drop(peer)
        return is_right

    def _take(self, peer: _Peer) -> None:
        """Do what has come whole, one request after the other."""
        inbox = peer.inbox
        while not peer.wanted and len(inbox) >= 4:
            end = 4 + int.from_bytes(inbox[:4], "big")
            if len(inbox) < end:
                return
            body = bytes(inbox[4:end])
            del inbox[:end]
            try:
                operation, *arguments = fields_of(body)
                self._operations[operation](peer, *arguments)
            except (ValueError, TypeError, KeyError, struct.error) as error:
                self._send(peer, frame(BAD, f"{type(error).__name__}: {error}".encode()))

    def _send(self, peer: _Peer, data: bytes) -> None:
        peer.outbox += data
        try:
            with contextlib.suppress(BlockingIOError):
                while peer.outbox:
                    del peer.outbox[: peer.sock.send(peer.outbox)]
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
            if self._selector.get_key(peer.sock).events != wanted:
                self._selector.modify(peer.sock, wanted, peer)
        except OSError:
            self._drop(peer)

    def _join(self, peer: _Peer, rank: bytes) -> None:
        peer.rank = int(rank)
        self._ranks_seen.add(peer.rank)
        self._send(peer, frame(OK))

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for peer in self._waiting.pop(key, ()):
            # Else it has given up, or gone.
            if peer.wanted and peer.wanted[peer.num_present] == key:
                self._answer_when_there(peer)

    def _set(self, peer: _Peer, *keys_and_values: bytes) -> None:
        keys, values = keys_and_values[::2], keys_and_values[1::2]
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)
        self._send(peer, frame(OK))

    def _get(self, peer: _Peer, timeout_s: bytes, *keys: bytes) -> None:
        self._wait(peer, timeout_s, *keys, is_get=True)

    def _wait(self, peer: _Peer, timeout_s: bytes, *keys: bytes, is_get: bool = False) -> None:
        self._set_deadline(peer, *struct.unpack(">d", timeout_s))
        peer.wanted, peer.num_present, peer.is_get = keys, 0, is_get
        self._answer_when_there(peer)
        if peer.wanted and self._why_ended:
            self._refuse(peer)

    def _end_waits(self, peer: _Peer, reason: bytes) -> None:
        self._why_ended = reason
        self._put(ENDED.encode(), reason)
        for waiting in [one for one in self._peers.values() if one.wanted]:
            self._refuse(waiting)
        self._send(peer, frame(OK))

    def _refuse(self, peer: _Peer) -> None:
        peer.wanted, peer.deadline = (), math.inf
        self._send(peer, frame(BAD, self._why_ended))

    def _answer_when_there(self, peer: _Peer) -> None:
        for start in (peer.num_present, 0):  # from the first again: keys may have been deleted
            for index in range(start, len(peer.wanted)):
                if peer.wanted[index] not in self._values:
                    peer.num_present = index
                    self._waiting.setdefault(peer.wanted[index], []).append(peer)
                    return
        values = [self._values[key] for key in peer.wanted] if peer.is_get else []
        peer.wanted, peer.deadline = (), math.inf
        self._send(peer, frame(OK, *values))

    def _add(self, peer: _Peer, key: bytes, amount: bytes) -> None:
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._put(key, total)
        self._send(peer, frame(OK, total))

    def _append(self, peer: _Peer, key: bytes, value: bytes) -> None:
        self._put(key, self._values.get(key, b"") + value)
        self._send(peer, frame(OK))

    def _compare_set(self, peer: _Peer, key: bytes, expected: bytes, desired: bytes) -> None:
        """As torch's TCPStore: a missing key is set when nothing was expected."""
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
        self._send(peer, frame(OK, self._values.get(key, expected)))

    def _delete_key(self, peer: _Peer, key: bytes) -> None:
        self._send(peer, frame(OK, b"%d" % (self._values.pop(key, None) is not None)))

    def _check(self, peer: _Peer, *keys: bytes) -> None:
        self._send(peer, frame(OK, b"%d" % all(key in self._values for key in keys)))

    def _num_keys(self, peer: _Peer) -> None:
        self._send(peer, frame(OK, b"%d" % len(self._values)))

    def _time(self, peer: _Peer) -> None:
        self._send(peer, frame(OK, struct.pack(">d", time.time())))


def _joined(ranks: set[int]) -> bytes:
    return ",".join(map(str, sorted(ranks))).encode()
