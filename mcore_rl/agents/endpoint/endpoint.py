"""The endpoint of a rollout server: one HTTP server, and a key for each session."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from typing import TYPE_CHECKING

from mcore_rl.agents.endpoint.client_session import ClientSession

if TYPE_CHECKING:
    from mcore_rl.agents.endpoint.server import HttpServer

_HOST = "127.0.0.1"  # programs run on this machine


def new_key() -> str:
    return f"sk-{secrets.token_urlsafe(32)}"


class Endpoint:
    """Started when it is first needed. All calls are of one event loop."""

    def __init__(self, max_context: int) -> None:
        """`max_context`: tokens of a conversation."""
        self._max_context = max_context
        self._by_key: dict[bytes, ClientSession] = {}
        self._server: HttpServer | None = None
        self._lock = asyncio.Lock()

    async def url(self) -> str:
        """For clients of OpenAI's API."""
        async with self._lock:
            if self._server is None:
                # Here, for a driver checks agents and serves none: fastapi takes long to import.
                from mcore_rl.agents.endpoint.openai_app import endpoint_app
                from mcore_rl.agents.endpoint.server import HttpServer

                server = HttpServer(endpoint_app(self._session_of, self._max_context), _HOST)
                await server.start()
                self._server = server
        return f"{self._server.url}/v1"

    def add(self, key: str, client: ClientSession) -> None:
        self._by_key[_digest(key)] = client

    async def remove(self, key: str) -> None:
        """Nobody has the key any more; what runs is cancelled."""
        if client := self._by_key.pop(_digest(key), None):
            await client.close()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    def _session_of(self, key: str) -> ClientSession | None:
        return self._by_key.get(_digest(key))


def _digest(key: str) -> bytes:
    """Looking it up takes a time that tells nothing of the keys that there are."""
    return hashlib.sha256(key.encode()).digest()
