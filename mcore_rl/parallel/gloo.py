"""Process groups of gloo whose ports answer only while a group forms.

gloo listens as long as a device lives, lets in whoever connects, and keeps a socket for each: a
stranger could take all files that a rank may open. What belongs to a group connects while the group
forms (gloo/transport/tcp/pair.cc), so at other times the kernel drops what comes to the port.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

_c10d: Any = distributed_c10d  # whose groups have no type stubs
_Gloo: Any = _c10d.ProcessGroupGloo
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # of Linux's socket options, which Python does not name
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # the program `return 0` of the packet filter
_TRIES = 20
_making = threading.Lock()  # of devices, which are told from each other by what has begun to listen
Socket = tuple[int, int]  # a file descriptor, and the inode of what it is


class GlooDevice:
    """A device of gloo with its listening socket, which is closed to all outside of `accepting`."""

    def __init__(self, **where: str) -> None:
        """`where`: hostname or interface, as of create_device."""
        # Without lazy_init, whatever the environment says: else pairs connect with first messages.
        self.device, self._fd = _create(lambda: _Gloo.create_device(**where, lazy_init=False))
        self._lock, self._num_forming = threading.Lock(), 0
        _close_to_all(self._fd)

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Let others connect meanwhile."""
        with self._lock:
            self._num_forming += 1
            if self._num_forming == 1:
                _open_to_all(self._fd)
        try:
            yield
        finally:
            with self._lock:
                self._num_forming -= 1
                if self._num_forming == 0:
                    _close_to_all(self._fd)


class GuardedGloo(_Gloo):  # type: ignore[misc]
    """A group of gloo, by default on the devices that all groups of this process share.

    By itself each group makes its own, with a thread that polls, and Megatron makes a few dozen
    groups: seven ranks that waited took a fifth of a core.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        devices: Sequence[GlooDevice] = (),
    ) -> None:
        """Returns when this rank is connected with all others."""
        devices = devices or _shared_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options = _Gloo._Options()
        options._devices, options._timeout = [one.device for one in devices], timeout
        with ExitStack() as stack:
            for one in devices:
                stack.enter_context(one.accepting())
            super().__init__(store, rank, size, options)


def guard_gloo() -> None:
    """Make all groups of gloo in this process `GuardedGloo`. May be called twice."""
    _c10d.ProcessGroupGloo = GuardedGloo


@functools.cache
def _shared_devices(pid: int, interfaces: str) -> list[GlooDevice]:
    """Return those of a process: one that is forked has none of its parent's threads."""
    if not interfaces:  # nobody else belongs to its groups: store.py sets it for those who do
        return [GlooDevice(hostname="127.0.0.1")]
    return [GlooDevice(interface=name) for name in interfaces.split(",")]


def _create(make: Callable[[], Any]) -> tuple[Any, int]:
    """Make a device and return it with the file descriptor at which it listens."""
    for _ in range(_TRIES):
        with _making:
            before = _find_listeners()
            device = make()
            new = _find_listeners() - before
        if len(new) == 1:  # else another thread has begun to listen or stopped meanwhile
            return device, new.pop()[0]
    raise RuntimeError(f"gloo listens at none or several of the new sockets {new}")


def _find_listeners() -> set[Socket]:
    """Find all sockets of this process that listen."""
    sockets = set[Socket]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it has been closed since
            if not stat.S_ISSOCK((known := entry.stat()).st_mode):
                continue
            with _duplicate(int(entry.name)) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    sockets.add((int(entry.name), known.st_ino))
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


def _close_to_all(fd: int) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    with _duplicate(fd) as sock:
        value = struct.pack("HL", 1, ctypes.addressof(program))
        sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, value)


def _open_to_all(fd: int) -> None:
    with _duplicate(fd) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
