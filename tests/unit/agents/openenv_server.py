"""A server that speaks OpenEnv's wire, for tests: openenv 0.10.0 conflicts with our pins.

Written after `websocket_endpoint` of its core/env_server/http_server.py, the messages of
types.py (extra fields are refused) and `serialize_observation` of serialization.py. The environment
is scripted. test_openenv.py in tests/e2e tries the client against the real package.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

Answers = Callable[[Mapping[str, Any]], Mapping[str, Any] | str]
_FIELDS = {"reset": {"type", "data"}, "step": {"type", "data"}, "close": {"type"}}


def observation(reward: object = None, done: bool = False, **fields: Any) -> dict[str, Any]:
    """Build an answer as `serialize_observation` does: metadata is inside it and beside it."""
    inside = {"metadata": {}, **fields}
    message = {"observation": inside, "reward": reward, "done": done}
    return message | ({"metadata": inside["metadata"]} if inside["metadata"] else {})


def tool_result(name: str, text: str, **more: Any) -> dict[str, Any]:
    """Build the answer to a call: the fields of CallToolObservation, with FastMCP's result."""
    result = {"content": [{"type": "text", "text": text}], "data": text, "is_error": False}
    return observation(**{"tool_name": name, "result": result, "error": None} | more)


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


@dataclass
class OpenEnvServer:
    """`answers` gets each reset and step.

    It gives the data of an observation, a whole message, a text that is sent as it is, or "never".
    """

    answers: Answers
    max_sessions: int = 8
    url: str = ""
    heard: list[dict[str, Any]] = field(default_factory=list)
    refused: int = 0
    _open: int = 0

    @asynccontextmanager
    async def served(self) -> AsyncIterator[OpenEnvServer]:
        async with serve(self._session, "127.0.0.1", 0, max_size=None) as server:
            port = server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            yield self

    async def _session(self, connection: ServerConnection) -> None:
        assert connection.request is not None and connection.request.path == "/ws"
        if self._open >= self.max_sessions:
            self.refused += 1
            more = {"active_sessions": self._open, "max_sessions": self.max_sessions}
            text = f"Server at capacity: {self._open}/{self.max_sessions} sessions active"
            await connection.send(json.dumps(error("CAPACITY_REACHED", text, **more)))
            return
        self._open += 1
        try:
            async for text in connection:
                message = json.loads(text)
                self.heard.append(message)
                if message["type"] == "close":
                    assert set(message) == {"type"}, message
                    return
                await self._say(connection, self._answer(message))
        finally:
            self._open -= 1

    async def _say(self, connection: ServerConnection, answer: str) -> None:
        if answer == "never":
            await connection.wait_closed()
        else:
            await connection.send(answer)

    def _answer(self, message: Mapping[str, Any]) -> str:
        if message["type"] not in _FIELDS:
            return json.dumps(error("UNKNOWN_TYPE", f"Unknown message type: {message['type']}"))
        if set(message) != _FIELDS[message["type"]]:
            return json.dumps(error("VALIDATION_ERROR", "Invalid message", errors=[dict(message)]))
        answer = self.answers(message)
        if isinstance(answer, str):
            return answer
        reply = answer if "type" in answer else {"type": "observation", "data": answer}
        return json.dumps(reply)
