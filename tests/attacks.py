"""Attacks of strangers on a listener, and what they achieve."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch.distributed

from mcore_rl.parallel import network
from mcore_rl.parallel.rendezvous import encode_frame

c10d: Any = torch.distributed  # whose stores have no type stubs
Address = tuple[str, int]
# What a listener says to anybody: its nonce, and that it refuses.
MAX_ANSWER_BYTES = 32 + 32


def frame(text: bytes) -> bytes:
    """Prefix a message with its length, as announcements of weights have it."""
    return struct.pack(">I", len(text)) + text


_SENT: Mapping[str, bytes] = MappingProxyType(
    {
        "bad_utf8": frame(b'{"kind": "hello", "token": "\xff\xfe", "version": 1}'),
        "lone_surrogate": frame(b'{"kind": "hello", "token": "\\ud800", "version": 1}'),
        "deep_json": frame(b"[" * 60_000 + b"]" * 60_000),
        "four_gib": b"\xff\xff\xff\xff" + bytes(1 << 16),
        "no_token": encode_frame(b"set", b"default_pg/0//cpu//0/0", b"mine")
        + encode_frame(b"num_keys"),
        # What torch's TCPStore takes from anybody: a magic number, and a key and its value.
        "torch_write": b"\0\xce\xf7\x85\x3c"
        b"\1" + struct.pack("<Q", 7) + b"/ours/0" + struct.pack("<Q", 4) + b"mine",
        "no_token_hello": frame(b'{"kind": "hello", "version": 1}'),
        "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64),
    }
)
SENDERS = tuple(_SENT)


def send(address: Address, what: str, patience_s: float = 5.0) -> bytes:
    """Send one of SENDERS; return all bytes received until the listener closes."""
    with socket.create_connection(address, patience_s) as sock:
        with contextlib.suppress(OSError):  # it may have closed before all was sent
            sock.sendall(_SENT[what])
            sock.shutdown(socket.SHUT_WR)
        return _read_all(sock)


def drip(address: Address, pause_s: float, patience_s: float) -> float:
    """Send a byte at a time; return the seconds until the listener closes the connection."""
    start = time.monotonic()
    reached = contextlib.suppress(ConnectionError, TimeoutError)
    with reached, socket.create_connection(address, patience_s) as sock:
        while time.monotonic() < start + patience_s:
            sock.sendall(b"\0")
            time.sleep(pause_s)
    return time.monotonic() - start


def guess_token(address: Address, patience_s: float = 5.0) -> None:
    """Authenticate with a wrong token. Raises the error that follows from the refusal."""
    with socket.create_connection(address, patience_s) as sock:
        network.prove_token(sock, "0" * 64, time.monotonic() + patience_s)


def use_as_torch_store(address: Address, use: Callable[[Any], Any]) -> Any:
    """Use a listener as a torch TCPStore, whose clients send no token."""
    return use(c10d.TCPStore(*address, is_master=False, timeout=timedelta(seconds=1)))


TORCH_STORE: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "list": lambda store: store.list_keys(),
        "write": lambda store: store.set("default_pg/0//cpu//0/0", "mine"),
        "delete": lambda store: store.delete_key("default_pg/0//cpu//0/0"),
    }
)


def attack(address: Address) -> None:
    """Try each attack on a listener, while four silent connections stay open."""
    attempts: list[Callable[[], Any]] = [partial(send, address, what, 1.0) for what in SENDERS]
    attempts += [partial(guess_token, address, 1.0), partial(drip, address, 2.0, 14.0)]
    with contextlib.ExitStack() as silent:
        for attempt in [partial(socket.create_connection, address, 1.0)] * 4 + attempts:
            with contextlib.suppress(OSError, RuntimeError):  # whatever it meets
                if isinstance(connection := attempt(), socket.socket):
                    silent.enter_context(connection)


@contextlib.contextmanager
def besiege_listeners(
    listeners: Callable[[], Mapping[Address, str]],
) -> Iterator[dict[Address, str]]:
    """Attack each listener as soon as it is open; yield the owners of the attacked."""
    attacked: dict[Address, str] = {}
    ended = threading.Event()

    def besiege() -> None:
        looks: Counter[str] = Counter()  # who listens may not be on record yet
        with ThreadPoolExecutor(16) as strangers:
            while not ended.wait(0.5):
                present = _list_listening_sockets()
                if any(looks[inode] < 10 for inode in present):
                    for address, owner in listeners().items():
                        if address not in attacked:
                            attacked[address] = owner
                            strangers.submit(attack, address)
                looks = Counter({inode: looks[inode] + 1 for inode in present})

    thread = threading.Thread(target=besiege)
    thread.start()
    try:
        yield attacked
    finally:
        ended.set()
        thread.join()


def _list_listening_sockets() -> set[str]:
    """Return the inodes of listening sockets. Their owners take a look at every process."""
    files = [Path("/proc/net", name) for name in ("tcp", "tcp6")]
    lines = [line.split() for file in files if file.exists() for line in file.open()]
    return {fields[9] for fields in lines if fields[3] == "0A"}


def list_other_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine besides 127.0.0.1."""
    hosts = {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    }
    return sorted(hosts - {"127.0.0.1"} | {"127.0.0.2"})


def _read_all(sock: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(OSError):
        while part := sock.recv(1 << 16):
            received += part
    return received
