"""An app on a port of its own, in the event loop that starts it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mcore_rl.agents.api_server.protocol import ClientGoneError, RefusalError
from mcore_rl.config.errors import ConfigError

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


MAX_BODY_BYTES = 32 * 2**20
BODY_S = 30.0  # for the body of a request to come


def max_body_bytes(max_context: int) -> int:
    """Return the bytes that a request to a model with this context may have.

    64 a token are more than any conversation that fits has, and JSON of a few MB is parsed before
    other requests wait for long.
    """
    return min(MAX_BODY_BYTES, 2 * 2**20 + 64 * max_context)


class Guard:
    """An ASGI app around another, which finds in `request.state.holder` whose key it was."""

    def __init__(
        self,
        app: ASGIApp,
        holder_of: Callable[[str], object | None],
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_s: float = BODY_S,
        on_too_large: Callable[[Any], None] | None = None,
    ) -> None:
        """`holder_of` a key is None where nobody has it.

        on_too_large: called with the holder of the key where a body is refused for its size.
        """
        self._app, self._holder_of, self._on_too_large = app, holder_of, on_too_large
        self._max_body_bytes, self._body_s = max_body_bytes, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a server of HTTP got {scope['type']!r}")
        headers, refusal, body = dict(scope["headers"]), None, b""
        try:
            scope.setdefault("state", {})["holder"] = self._holder(headers)
        except RefusalError as error:
            refusal = error
        try:
            body = await self._body(receive, 0 if refusal else self._max_body_bytes)
        except ClientGoneError:
            return
        except RefusalError as error:
            if refusal is None and error.status == 413 and self._on_too_large is not None:
                self._on_too_large(scope["state"]["holder"])
            refusal = refusal or error
        if refusal is None:
            await self._app(scope, _replayed(body, receive), send)
            return
        response = refusal.response()
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _holder(self, headers: dict[bytes, bytes]) -> object:
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        holder = self._holder_of(key.strip()) if scheme.lower() == "bearer" else None
        if holder is None:
            raise RefusalError(
                401, "invalid_api_key", "the key is missing, wrong, or of a session that has ended"
            )
        return holder

    async def _body(self, receive: Receive, most: int) -> bytes:
        """All of it. What is over `most` bytes is read, too, but not kept: only then do clients
        read why it is refused.

        Raises ClientGoneError where the client has gone before its end.
        """
        parts, size = list[bytes](), 0
        limit = asyncio.timeout(self._body_s)
        try:
            async with limit:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError as error:
            told = f"the request has not come in {self._body_s:g} s"
            raise RefusalError(408, "timeout", told) from error
        if size > most:
            told = f"a request may have {self._max_body_bytes} bytes"
            raise RefusalError(413, "context_length_exceeded", told, param="body")
        return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what comes: that the client has gone."""
    is_given = False

    async def next_message() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


T = TypeVar("T")


def new_app() -> FastAPI:
    """Without pages of its own; each error is a JSON object as OpenAI's clients read it."""
    app = FastAPI(openapi_url=None)

    @app.exception_handler(RefusalError)
    async def refused(request: Request, error: RefusalError) -> Response:
        return error.response()

    @app.exception_handler(ConfigError)
    async def unfit(request: Request, error: ConfigError) -> Response:
        return RefusalError(400, "invalid_request", str(error)).response()

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # to nobody

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        told = f"{where}: {first['msg']}" if where else str(first["msg"])
        return RefusalError(400, "invalid_request", told, param=where).response()

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        told = f"{request.method} {request.url.path}: {error.detail}"
        code = "not_found" if error.status_code == 404 else "invalid_request"
        return RefusalError(error.status_code, code, told).response()

    return app


async def has_ended(
    request: Request, work: asyncio.Task[T], timeout_s: float | None = None
) -> bool:
    """Whether work for a client has ended, after `timeout_s` at the latest.

    Raises ClientGoneError where the client has gone first; then the work is cancelled.
    """
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not work.done():
            raise ClientGoneError
        return work.done()
    except BaseException:
        work.cancel()
        raise
    finally:
        gone.cancel()


async def unless_gone(request: Request, work: asyncio.Task[T]) -> T:
    """The result of work. Raises as `has_ended` and `result_of`."""
    await has_ended(request, work)
    return result_of(work)


def result_of(work: asyncio.Task[T]) -> T:
    """Of work that has ended.

    Raises:
        RefusalError: it failed, or was cancelled since its session has ended.
        ConfigError: it was asked for what it cannot do.
    """
    if work.cancelled():
        raise RefusalError(409, "session_ended", "the session has ended")
    try:
        return work.result()
    except (RefusalError, ConfigError):
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise RefusalError(500, "server_failed", told) from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
