"""An endpoint told to the processes of this user on this machine, and to nobody else.

Ranks that another launcher has started share no secret yet. A Unix socket of the abstract kind
needs no file, and the kernel says whose process is at its other end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict

from mcore_rl.parallel.rendezvous import RendezvousEndpoint

_RETRY_S = 0.1
_MOST_BYTES = 4096


@contextlib.contextmanager
def told(endpoint: RendezvousEndpoint, launch: str) -> Iterator[None]:
    """Inside, every process of this user that asks for `launch`, a name, is told the endpoint.

    Raises:
        RuntimeError: another process has that name.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_name(launch))
        except OSError as error:
            raise RuntimeError(f"{launch}: another process tells its endpoint already") from error
        listener.listen(128)
        answer = json.dumps(asdict(endpoint)).encode()
        thread = threading.Thread(target=_answer, args=(listener, answer), daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def ask(launch: str, timeout_s: float) -> RendezvousEndpoint:
    """What `told` tells, once it does.

    Raises:
        RuntimeError: it has not in time, or the process that answers is another user's.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with (
            socket.socket(socket.AF_UNIX) as sock,
            contextlib.suppress(ConnectionError, TimeoutError),
        ):
            sock.settimeout(max(deadline - time.monotonic(), _RETRY_S))
            sock.connect(_name(launch))
            if not _is_ours(sock):
                raise RuntimeError(f"{launch}: a process of another user answers")
            with sock.makefile("rb") as whole:
                answer = whole.read(_MOST_BYTES)
            if answer:
                return RendezvousEndpoint(**json.loads(answer))
        if time.monotonic() > deadline:
            raise RuntimeError(f"{launch}: rank 0 has not come in {timeout_s:g} s")
        time.sleep(_RETRY_S)


def _answer(listener: socket.socket, answer: bytes) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # shut down
            return
        with sock, contextlib.suppress(OSError):
            sock.settimeout(1.0)
            if _is_ours(sock):
                sock.sendall(answer)


def _is_ours(sock: socket.socket) -> bool:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", found)
    return bool(user == os.getuid())


def _name(launch: str) -> str:
    return "\0mcore-rl-" + hashlib.sha256(f"{os.getuid()} {launch}".encode()).hexdigest()
