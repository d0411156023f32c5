"""The HTTP server of an app: its port, limits on requests, and errors in OpenAI's form."""

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

T = TypeVar("T")
HEADERS_S = 10.0  # from the first byte of a request to the end of its headers
BODY_S = 30.0  # to receive the body of a request
MAX_BODY_BYTES = 32 * 2**20
# Limit of connections without an accepted key, also limited to a quarter of the files that the
# process may open. Beyond it the oldest is closed.
MAX_ANONYMOUS = 2048
_KEEP_ALIVE_S = 600  # of a connection without requests
_CLOSE_S = 5.0
_BACKLOG = 2048  # connections that wait to be accepted


class _LimitedProtocol(H11Protocol):
    """uvicorn's protocol, with limits on the time of headers and on connections without a key.

    uvicorn has neither: clients that send a byte now and then would hold connections as long as
    they like, and as many as the process may open files.
    """

    anonymous: ClassVar[dict[_LimitedProtocol, None]]  # without a key, the oldest first; per server
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the limits of a connection."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADERS_S, self._close_if_idle)
        self.anonymous[self] = None
        self._close_oldest()

    def _end_response(self) -> None:
        """Lift the limit on connections if the key of the request was accepted."""
        if self._has_key():
            self.anonymous.pop(self, None)
        super().on_response_complete()

    on_response_complete = _end_response  # uvicorn's name

    def data_received(self, data: bytes) -> None:
        """Limit the time of the headers."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._cancel_deadline()
        elif self._deadline is None and self._is_idle():
            self._deadline = self.loop.call_later(HEADERS_S, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the limits of a connection."""
        self._cancel_deadline()
        self.anonymous.pop(self, None)
        super().connection_lost(exc)

    def _has_key(self) -> bool:
        """Return whether a RequestGuard has accepted the key of the last request."""
        return self.scope is not None and "handler" in self.scope.get("state", {})

    def _close_oldest(self) -> None:
        limit, (max_files, _) = MAX_ANONYMOUS, resource.getrlimit(resource.RLIMIT_NOFILE)
        if max_files != resource.RLIM_INFINITY:
            limit = min(limit, max_files // 4)
        while len(self.anonymous) > limit:
            oldest = next(iter(self.anonymous))
            del self.anonymous[oldest]
            if not oldest._has_key():
                oldest.transport.abort()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_if_idle(self) -> None:
        self._deadline = None
        if self._is_idle():
            self.transport.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: signals belong to the process, of which this server is a part."""
        yield


class HttpServer:
    """Serves an app on a port, in the event loop that starts it, until `close`."""

    def __init__(self, app: ASGIApp, host: str, port: int = 0) -> None:
        """Bind the port.

        Args:
            host: Address to listen on, which clients reach.
            port: 0 takes a free one.

        Raises:
            OSError: The port cannot be used.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, port))
        port = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._server = _Server(
            uvicorn.Config(
                app,
                http=type("_ServerProtocol", (_LimitedProtocol,), {"anonymous": {}}),
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
        """Start to serve; return when the server answers."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise RuntimeError(f"the HTTP server at {self.url} has ended")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """End the server."""
        self._server.should_exit = True
        if self._serving is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, _CLOSE_S)
        self._socket.close()


def compute_max_body_bytes(max_context: int, max_images: int = 0) -> int:
    """Return the bytes that a request to a model with this context may have.

    64 a token are more than any conversation that fits needs, and a few MB of JSON are parsed
    before other requests wait for long.
    """
    return min(MAX_BODY_BYTES, 2 * 2**20 + 64 * max_context + max_images * 2**23)


class RequestGuard:
    """ASGI middleware that checks key, size and time of a request before the app reads it.

    FastAPI reads a body before the app can refuse it. The app gets the handler of the key as
    `request.state.handler`.
    """

    def __init__(
        self,
        app: ASGIApp,
        find: Callable[[str], object | None],
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_s: float = BODY_S,
        on_too_large: Callable[[Any], None] | None = None,
    ) -> None:
        """Wrap an app.

        Args:
            find: Look up the handler of a key; None for an unknown key.
            on_too_large: Called with the handler if a body is refused for its size.
        """
        self._app, self._find, self._on_too_large = app, find, on_too_large
        self._max_body_bytes, self._body_s = max_body_bytes, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the app, or answer with the refusal and close the connection."""
        if scope["type"] != "http":
            raise RuntimeError(f"an HTTP server got a connection of type {scope['type']!r}")
        headers, refusal, body = dict(scope["headers"]), None, b""
        try:
            scope.setdefault("state", {})["handler"] = self._find_handler(headers)
        except RefusalError as error:
            refusal = error
        try:
            body = await self._read_body(receive, 0 if refusal else self._max_body_bytes)
        except ClientGoneError:
            return
        except RefusalError as error:
            if refusal is None and error.status == 413 and self._on_too_large is not None:
                self._on_too_large(scope["state"]["handler"])
            refusal = refusal or error
        if refusal is None:
            await self._app(scope, _replay(body, receive), send)
            return
        response = refusal.to_response()
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _find_handler(self, headers: dict[bytes, bytes]) -> object:
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        handler = self._find(key.strip()) if scheme.lower() == "bearer" else None
        if handler is None:
            raise RefusalError(
                401, "invalid_api_key", "the key is missing, wrong, or of a session that has ended"
            )
        return handler

    async def _read_body(self, receive: Receive, max_bytes: int) -> bytes:
        """Read a body to its end; only then do clients read why it is refused.

        Raises:
            ClientGoneError: The client went away before the end.
            RefusalError: It is late, or has more than `max_bytes`; bytes beyond are not stored.
        """
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self._body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= max_bytes:
                        parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError as error:
            reason = f"the body has not arrived in {self._body_s:g} s"
            raise RefusalError(408, "timeout", reason) from error
        if size > max_bytes:
            reason = f"a request may have {self._max_body_bytes} bytes"
            raise RefusalError(413, "context_length_exceeded", reason, param="body")
        return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, then later messages: the client's end."""
    is_given = False

    async def next_message() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


def build_app() -> FastAPI:
    """Build an app without pages of its own, whose errors are JSON in OpenAI's form."""
    app = FastAPI(openapi_url=None)

    @app.exception_handler(RefusalError)
    async def answer_refusal(request: Request, error: RefusalError) -> Response:
        return error.to_response()

    @app.exception_handler(ConfigError)
    async def answer_config_error(request: Request, error: ConfigError) -> Response:
        return RefusalError(400, "invalid_request", str(error)).to_response()

    @app.exception_handler(ClientGoneError)
    async def answer_nobody(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(RequestValidationError)
    async def answer_malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        reason = f"{where}: {first['msg']}" if where else str(first["msg"])
        return RefusalError(400, "invalid_request", reason, param=where).to_response()

    @app.exception_handler(HTTPException)
    async def answer_unrouted(request: Request, error: HTTPException) -> Response:
        reason = f"{request.method} {request.url.path}: {error.detail}"
        code = "not_found" if error.status_code == 404 else "invalid_request"
        return RefusalError(error.status_code, code, reason).to_response()

    return app


async def wait_until_done(
    request: Request, work: asyncio.Task[T], timeout_s: float | None = None
) -> bool:
    """Wait for the work of a request; return whether it has ended by `timeout_s`.

    Raises:
        ClientGoneError: The client went away first; the work is cancelled.
    """
    gone = asyncio.create_task(_wait_for_disconnect(request))
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


async def wait_for_result(request: Request, work: asyncio.Task[T]) -> T:
    """Return the result of work; raise as `wait_until_done` and `get_result`."""
    await wait_until_done(request, work)
    return get_result(work)


def get_result(work: asyncio.Task[T]) -> T:
    """Return the result of work that has ended.

    Raises:
        RefusalError: It failed, or was cancelled with its session.
        ConfigError: The request cannot be done.
    """
    if work.cancelled():
        raise RefusalError(409, "session_ended", "the session has ended")
    try:
        return work.result()
    except (RefusalError, ConfigError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise RefusalError(500, "server_failed", reason) from error


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
