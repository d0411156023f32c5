"""Where ranks of both sides find each other: a store on training rank 0, behind a secret token."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed

c10d: Any = torch.distributed  # whose stores have no type stubs


@dataclass(frozen=True, slots=True)
class MeetingEndpoint:
    """How to reach the store; plain fields, so that it crosses any process boundary."""

    host: str
    port: int
    token: str = field(repr=False)  # who knows it may join: keep it out of logs
    timeout_s: float


class MeetingPoint:
    """The store that ranks meet in. It stays while they need each other."""

    def __init__(self, bind_address: str, token: str, timeout_s: float) -> None:
        listener = socket.create_server((bind_address, 0))
        host, port = listener.getsockname()[:2]
        self._store = c10d.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
        self.endpoint = MeetingEndpoint(host, port, token, timeout_s)


def keys_of(endpoint: MeetingEndpoint) -> Any:
    """The store, behind the token. Raises RuntimeError when it cannot be reached in time."""
    timeout = timedelta(seconds=endpoint.timeout_s)
    store = c10d.TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timeout)
    return c10d.PrefixStore(endpoint.token, store)
