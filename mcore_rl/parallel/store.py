"""Process groups of torch at a RendezvousServer: the store, and gloo with closed ports.

gloo listens as long as a device lives, accepts every connection, and keeps a socket for each: a
stranger could use up the files that a rank may open. The ranks of a group connect while the group
forms (gloo/transport/tcp/pair.cc), so at other times the kernel drops packets to the port, by a
filter, or where that is not permitted by a signature that nobody can give.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from mcore_rl.parallel import network, rendezvous
from mcore_rl.parallel.rendezvous import (
    RendezvousClient,
    RendezvousConnectionError,
    RendezvousEndpoint,
    RendezvousTimeoutError,
)

c10d: Any = torch.distributed  # its stores have no type stubs
_Gloo: Any = distributed_c10d.ProcessGroupGloo
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER of Linux
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # the packet filter program `return 0`
_SIGNATURE_KEY, _MAX_KEY_BYTES = 32, 80  # TCP_MD5SIG_EXT, TCP_MD5SIG_MAXKEYLEN of Linux
_MAX_TRIES = 20
_device_lock = threading.Lock()  # a new device is identified by the new listening socket
_Socket = tuple[int, int]  # file descriptor and inode
_open: set[RendezvousStore] = set()  # C++ keeps no reference to the Python part of a store


def join_world(backend: str, timeout_s: float, endpoint: RendezvousEndpoint | None = None) -> None:
    """Create torch's default group from RANK, WORLD_SIZE and the endpoint, or RENDEZVOUS_*.

    gloo and NCCL then listen on the interface by which this process reached the rendezvous, unless
    the user has set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.

    Raises:
        ConfigError: This process was not started as a rank.
        RuntimeError: The rendezvous cannot be reached, or other ranks did not join in time.
    """
    rank, world_size = map(int, rendezvous.read_rank_environment("RANK", "WORLD_SIZE"))
    endpoint = endpoint or RendezvousEndpoint.read_environment()
    store = RendezvousStore(endpoint, rank, world_size, timeout_s)
    network.use_interface_of(store.own_address)
    guard_gloo()
    c10d.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


class RendezvousStore(c10d.Store):  # type: ignore[misc]
    """A rank's connection to a RendezvousServer as a torch.distributed.Store, open until `close`.

    DistStoreError names the keys that were waited for and the ranks that are missing;
    DistNetworkError is a lost connection.
    """

    def __init__(
        self, endpoint: RendezvousEndpoint, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Connect to the server.

        Raises:
            DistNetworkError: No server answers, or it has another token.
        """
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._endpoint, self._rank, self._world_size = endpoint, rank, world_size
        with _translate_errors():
            self._client = RendezvousClient(endpoint, rank, world_size, timeout_s)
        self.own_address = self._client.own_address
        _open.add(self)

    def close(self) -> None:
        _open.discard(self)
        self._client.close()

    def clone(self) -> RendezvousStore:
        """Open another connection: a wait blocks the one that it uses."""
        timeout_s = self.timeout.total_seconds()
        return RendezvousStore(self._endpoint, self._rank, self._world_size, timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._call(b"set", key.encode(), _encode(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = [(key.encode(), _encode(value)) for key, value in zip(keys, values, strict=True)]
        self._call(b"set", *(field for pair in pairs for field in pair))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._request_keys(b"get", keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._request_keys(b"wait", keys, self.timeout if timeout is None else timeout)

    def barrier(self, name: str) -> None:
        """Wait until every rank has called this. Each name can be used once.

        Raises:
            DistStoreError: Ranks are missing (it names them), or `end_waits` was called.
        """
        self.all_gather(name, b"")

    def all_gather(self, name: str, value: str | bytes) -> list[bytes]:
        """Return the values of all ranks, by rank. Each name can be used once.

        The last rank to arrive merges the values under one key that the other ranks wait for, so
        the work of the server is linear in the ranks. The bytes are quadratic, so the merged value
        is compressed: most values are similar.

        Raises:
            DistStoreError: As `barrier`.
        """
        keys = [f"{name}-{rank}" for rank in range(self._world_size)]
        self.set(keys[self._rank], value)
        if self.add(f"{name}-arrived", 1) == self._world_size:
            values = self.multi_get(keys)
            self.set(
                name, zlib.compress(rendezvous.encode_frame(*values), 1) if any(values) else b""
            )
        try:
            merged = self.get(name)
        except c10d.DistStoreError as error:
            missing = self._find_missing(keys)
            raise c10d.DistStoreError(f"{error}; missing: {', '.join(missing)}") from error
        if not merged:
            return [b""] * self._world_size
        return rendezvous.decode_fields(zlib.decompress(merged)[4:])

    def add(self, key: str, amount: int) -> int:
        return int(self._call(b"add", key.encode(), b"%d" % amount)[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._call(b"append", key.encode(), _encode(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = _encode(expected), _encode(desired)
        return self._call(b"compare_set", key.encode(), *values)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(b"check", *(key.encode() for key in keys)) == [b"1"]

    def delete_key(self, key: str) -> bool:
        return self._call(b"delete_key", key.encode()) == [b"1"]

    def num_keys(self) -> int:
        return int(self._call(b"num_keys")[0])

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get and multi_set are implemented."""
        return True

    deleteKey, getNumKeys = delete_key, num_keys

    def _find_missing(self, keys: Sequence[str]) -> Sequence[str]:
        try:
            self._client.request_keys(b"wait", keys, 0.0)
        except (RendezvousTimeoutError, RendezvousConnectionError) as error:
            return getattr(error, "keys", ()) or ["unknown"]
        return ()

    def _request_keys(
        self, operation: bytes, keys: Sequence[str], timeout: timedelta
    ) -> list[bytes]:
        with _translate_errors():
            return self._client.request_keys(operation, keys, timeout.total_seconds())

    def _call(self, operation: bytes, *arguments: bytes) -> list[bytes]:
        with _translate_errors():
            timeout_s = self.timeout.total_seconds()
            return self._client.call(operation, *arguments, timeout_s=timeout_s)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Convert the errors of the client to torch's."""
    try:
        yield
    except RendezvousTimeoutError as error:
        raise c10d.DistStoreError(str(error)) from error
    except RendezvousConnectionError as error:
        raise c10d.DistNetworkError(str(error)) from error


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class GlooDevice:
    """A gloo device that accepts connections only within `accept_connections`."""

    def __init__(self, **where: str) -> None:
        """Create the device; `where`: hostname or interface, as of create_device."""
        # lazy_init would connect pairs at their first message, after the group has formed.
        self.device, self._fd = _create_device(
            lambda: _Gloo.create_device(**where, lazy_init=False)
        )
        self._lock, self._num_forming = threading.Lock(), 0
        _drop_packets(self._fd)

    @contextmanager
    def accept_connections(self) -> Iterator[None]:
        """Accept connections within the context."""
        with self._lock:
            self._num_forming += 1
            if self._num_forming == 1:
                _accept_packets(self._fd)
        try:
            yield
        finally:
            with self._lock:
                self._num_forming -= 1
                if self._num_forming == 0:
                    _drop_packets(self._fd)


class GuardedGloo(_Gloo):  # type: ignore[misc]
    """A gloo group, by default on devices that all groups of this process share.

    torch creates a device per group, with a thread that polls. Megatron creates a few dozen groups:
    seven waiting ranks used a fifth of a core.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        devices: Sequence[GlooDevice] = (),
    ) -> None:
        """Connect this rank with all other ranks."""
        devices = devices or _shared_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options = _Gloo._Options()
        options._devices = [guarded.device for guarded in devices]
        options._timeout = timeout
        with ExitStack() as stack:
            for guarded in devices:
                stack.enter_context(guarded.accept_connections())
            super().__init__(store, rank, size, options)


def guard_gloo() -> None:
    """Make all gloo groups of this process `GuardedGloo`. May be called twice."""
    distributed_c10d.ProcessGroupGloo = GuardedGloo  # type: ignore[misc]


@functools.cache
def _shared_devices(pid: int, interfaces: str) -> list[GlooDevice]:
    """Return the devices of a process: a forked process has none of its parent's threads."""
    if not interfaces:  # join_world sets them; without it all ranks are on this machine
        return [GlooDevice(hostname="127.0.0.1")]
    return [GlooDevice(interface=name) for name in interfaces.split(",")]


def _create_device(create: Callable[[], Any]) -> tuple[Any, int]:
    """Return a new device and the file descriptor of its listening socket."""
    for _ in range(_MAX_TRIES):
        with _device_lock:
            before = _find_listeners()
            device = create()
            new = _find_listeners() - before
        if len(new) == 1:  # else another thread opened or closed a listening socket
            return device, new.pop()[0]
    raise RuntimeError(f"gloo listens at none or several of the new sockets {new}")


def _find_listeners() -> set[_Socket]:
    """Return all listening sockets of this process."""
    sockets = set[_Socket]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since iterdir
            if not stat.S_ISSOCK((status := entry.stat()).st_mode):
                continue
            with _duplicate(int(entry.name)) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    sockets.add((int(entry.name), status.st_ino))
    return sockets


@contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket]:
    copy = os.dup(fd)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        yield sock


def _drop_packets(fd: int) -> None:
    with _duplicate(fd) as sock:
        try:
            _attach_filter(sock)
        except PermissionError:  # some kernels want CAP_NET_ADMIN, which containers seldom have
            _require_signature(sock, os.urandom(_MAX_KEY_BYTES))


def _accept_packets(fd: int) -> None:
    with _duplicate(fd) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        except FileNotFoundError:  # it has none: see above
            _require_signature(sock, b"")


def _attach_filter(sock: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    value = struct.pack("HL", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, value)


def _require_signature(sock: socket.socket, key: bytes) -> None:
    """Drop packets without a signature by `key` (RFC 2385); accept all with an empty one."""
    # struct tcp_md5sig: peers of any address, which is a prefix of length 0, at any interface.
    form = f"H126xBBHi{_MAX_KEY_BYTES}s"
    value = struct.pack(form, sock.family, 1, 0, len(key), 0, key)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _SIGNATURE_KEY, value)
    except OSError as error:
        message = "gloo's port cannot be closed to strangers: it takes CAP_NET_ADMIN, or a kernel "
        raise OSError(error.errno, f"{message}with TCP_MD5SIG ({error.strerror})") from error
