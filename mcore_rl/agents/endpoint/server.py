"""An app on a port of its own, in the event loop that starts it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_KEEP_ALIVE_S = 600  # of a connection without requests
_CLOSE_S = 5.0
_BACKLOG = 2048  # connections that wait to be accepted
HEADERS_S = 10.0  # from the first byte of a request to the end of its headers
# Connections whose key a Guard has not accepted yet. With more of them, and at the latest with a
# quarter of the files that the process may open, the oldest has to go.
MAX_STRANGERS = 2048


class _Protocol(H11Protocol):
    """uvicorn's, with limits on the time of headers and on connections without a key.

    uvicorn has neither: clients that send a byte now and then would hold connections as long as
    they like, and as many as the process may open files.
    """

    strangers: ClassVar[dict[_Protocol, None]]  # of a server: without a key, the oldest first
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit = self.loop.call_later(HEADERS_S, self._too_late)
        self.strangers[self] = None
        self._drop_oldest_strangers()

    def on_response_complete(self) -> None:
        if self._has_key():
            self.strangers.pop(self, None)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop()
        elif self._limit is None and self._is_idle():
            self._limit = self.loop.call_later(HEADERS_S, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.strangers.pop(self, None)
        super().connection_lost(exc)

    def _has_key(self) -> bool:
        """Whether a Guard has accepted the key of its last request."""
        return self.scope is not None and "holder" in self.scope.get("state", {})

    def _drop_oldest_strangers(self) -> None:
        limit, (max_files, _) = MAX_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)
        if max_files != resource.RLIM_INFINITY:
            limit = min(limit, max_files // 4)
        while len(self.strangers) > limit:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            if not oldest._has_key():
                oldest.transport.abort()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _stop(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _too_late(self) -> None:
        self._limit = None
        if self._is_idle():
            self.transport.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: they belong to the process, of which this server is a part."""
        yield


class HttpServer:
    """Serves until `close`."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        """`host` is the address to listen on, which clients reach."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        port = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._server = _Server(
            uvicorn.Config(
                app,
                http=type("_OwnProtocol", (_Protocol,), {"strangers": {}}),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it answers."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise RuntimeError(f"the HTTP server at {self.url} has ended")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, _CLOSE_S)
        self._socket.close()
