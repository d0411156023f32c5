"""Calls of SGLang's HTTP API, with limits on the time and the size of each reply.

Routes: entrypoints/http_server.py:714-1858 of SGLang 0.5.23; their bodies: managers/io_struct.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

_CONNECT_S = 10.0
_REPLY_BYTES = 4 << 20  # of /server_info, the longest reply of a call that generates nothing
_MAX_SHOWN = 500  # characters of a reply, in errors


class SGLangError(RuntimeError):
    """SGLang has refused a call; the message has the reason that it gives."""


class SGLangConnectionError(SGLangError):
    """SGLang cannot be reached, or has closed the connection."""


class SGLangClient:
    """A client of one server. All calls are of one event loop.

    Args:
        url: Without a path.
        key: Bearer token (utils/auth.py:127-148); "" for none.
        timeout_s: Limit of a call. None: none.
    """

    def __init__(self, url: str, key: str, timeout_s: float | None) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            follow_redirects=False,  # they would take the key elsewhere
            trust_env=False,  # a proxy would see it
        )

    async def get(self, route: str) -> Any:
        """Return the JSON value of a GET."""
        return await self._call("GET", route, None, self.timeout_s, _REPLY_BYTES)

    async def post(self, route: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON value of a POST."""
        return await self._call("POST", route, body or {}, self.timeout_s, _REPLY_BYTES)

    async def generate(self, body: dict[str, Any], max_bytes: int) -> dict[str, Any]:
        """Return the reply of /generate.

        While there is none, /server_info, which the scheduler answers also when it is paused, has
        to arrive within `timeout_s`.
        """
        call = self._call("POST", "/generate", body, None, max_bytes + _REPLY_BYTES)
        task = asyncio.create_task(call)
        try:
            while not (await asyncio.wait([task], timeout=self.timeout_s))[0]:
                await self.get("/server_info")
            reply = task.result()
        finally:
            task.cancel()
        if not isinstance(reply, dict):
            raise SGLangError(f"{self.url}/generate: the reply is no JSON object")
        return reply

    async def check_health(self) -> bool:
        """Return whether the server is up: it answers /health, which generates a token."""
        try:
            response = await self._client.get("/health", timeout=60.0)
        except httpx.TransportError:
            return False
        return response.status_code == httpx.codes.OK

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _call(
        self,
        method: str,
        route: str,
        body: dict[str, Any] | None,
        timeout_s: float | None,
        max_bytes: int,
    ) -> Any:
        """Return the JSON value of a reply.

        Raises:
            SGLangConnectionError: the server cannot be reached.
            SGLangError: it has refused the call, or the reply is too long or no JSON.
            TimeoutError: it has not answered within `timeout_s`.
        """
        place = f"{self.url}{route}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, route, json=body) as response,
            ):
                data = bytearray()
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > max_bytes:
                        raise SGLangError(f"{place}: the reply has more than {max_bytes} bytes")
        except TimeoutError as error:
            raise TimeoutError(f"{place}: no reply within {timeout_s:g} s") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            reason = str(error) or type(error).__name__
            raise SGLangConnectionError(f"{place}: {reason}") from error
        text = data.decode(errors="replace")
        if response.status_code != httpx.codes.OK:
            status = response.status_code
            raise SGLangError(f"{place}: HTTP {status}: {text.strip()[:_MAX_SHOWN]}")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise SGLangError(f"{place}: no JSON: {text.strip()[:_MAX_SHOWN]}") from error
