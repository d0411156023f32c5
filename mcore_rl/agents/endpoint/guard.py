"""What is checked before an app sees a request: its key, its size and the time it takes to come.

FastAPI reads a body before anything of the app can refuse it, so this is around the app.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcore_rl.agents.endpoint.refusal import ClientGoneError, RefusalError

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
