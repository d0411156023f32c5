"""The environment `openenv`: an OpenEnv server, over its WebSocket.

The messages are those of openenv 0.10.0: `reset` and `step` have data, `close` has none, and an
answer is an `observation` or an `error` (its core/env_server/http_server.py and types.py).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from mcore_rl.agents.codec import ChatMessage, ParsedCall, ParsedTurn, ToolSpec
from mcore_rl.agents.environment import EnvironmentStep
from mcore_rl.config.checks import check_at_least, check_choice, check_positive
from mcore_rl.config.errors import ConfigError

ACTIONS = ("text", "tools")
_LOCAL = ("localhost", "127.0.0.1", "::1")  # no proxy is between
_MAX_SAID = 500  # characters of a server's words in an error
_WAITS_S = 0.1, 2.0  # between two tries to get a session: the first, and the longest


class OpenEnvError(RuntimeError):
    """A server cannot be reached, is late, or says that something is wrong."""


@dataclass(frozen=True)
class OpenEnvSettings:
    url: str  # http(s):// or ws(s)://, without /ws
    action: str = "text"  # a turn is a step with its text; tools: its calls are steps
    action_field: str = "message"  # of action=text: the field of the action that has the text
    observation_field: str = ""  # that the policy is told; empty: all as JSON, without metadata
    seed_column: str = ""  # its whole number is the seed of the reset; empty: no seed
    connect_timeout_s: float = 10.0
    message_timeout_s: float = 60.0  # for the answer to a message
    session_timeout_s: float = 300.0  # to wait while all sessions of the server are in use
    max_message_mb: float = 100.0  # of one answer

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https", "ws", "wss"):
            raise ConfigError(f"url={self.url!r}; allowed: http://, https://, ws:// or wss://")
        check_choice("action", self.action, ACTIONS)
        for name in ("connect_timeout_s", "message_timeout_s", "max_message_mb"):
            check_positive(name, getattr(self, name))
        check_at_least("session_timeout_s", self.session_timeout_s, 0)


class OpenEnv:
    """A session of a server, which is one episode.

    With action=tools the policy is shown the server's tools. Calls of a turn are made in their
    order; one that fails is told, and a turn without a call ends the episode.
    """

    def __init__(self, fields: Mapping[str, Any], settings: OpenEnvSettings) -> None:
        """Raises ConfigError where the row has no seed, and settings.seed_column asks for one."""
        self._settings = settings
        parts = urlsplit(settings.url)
        scheme = parts.scheme.replace("http", "ws")
        path = f"{parts.path.rstrip('/')}/ws"
        self._url = parts._replace(scheme=scheme, path=path).geturl()
        self._told_url = f"{scheme}://{parts.netloc.rpartition('@')[2]}{path}"  # without secrets
        self._proxy: Literal[True] | None = None if parts.hostname in _LOCAL else True
        self._connection: ClientConnection | None = None
        self._reset_reward = 0.0
        self.tools: Sequence[ToolSpec] = ()
        self._reset_data = {}
        if settings.seed_column:
            self._reset_data["seed"] = _seed(fields, settings.seed_column)

    async def reset(self) -> Sequence[ChatMessage]:
        """Raises OpenEnvError, as `step` does."""
        observation, self._reset_reward, is_done = await self._first()
        if is_done:
            raise self._error("the episode is done before the first turn")
        if self._settings.action == "tools":
            listed, _, _ = await self._observed("step", {"type": "list_tools"})
            self.tools = self._specs(listed)
        said = self._text(observation)
        return [ChatMessage("user", said)] if said else []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        earned, self._reset_reward = self._reset_reward, 0.0
        if self._settings.action == "text":
            data = {self._settings.action_field: turn.content}
            observation, reward, is_done = await self._observed("step", data)
            message = ChatMessage("user", self._text(observation))
            return EnvironmentStep((message,), earned + reward, is_done)
        messages = []
        for call in turn.calls:
            text, reward, is_done = await self._called(call)
            earned += reward
            messages.append(ChatMessage("tool", text, tool_call_id=call.id, name=call.name))
            if is_done:
                return EnvironmentStep(tuple(messages), earned, is_done=True)
        return EnvironmentStep(tuple(messages), earned, is_done=not turn.calls)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            with suppress(WebSocketException):  # the server closed it first
                await connection.send(json.dumps({"type": "close"}))
        finally:
            await connection.close()

    async def _first(self) -> tuple[dict[str, Any], float, bool]:
        """The answer to the reset, in a session that may have to be waited for."""
        clock = asyncio.get_running_loop()
        deadline = clock.time() + self._settings.session_timeout_s
        wait_s, longest_s = _WAITS_S
        while True:
            await self._connect()
            try:
                return await self._observed("reset", self._reset_data)
            except _NoSessionError as error:
                await self.close()
                if clock.time() + wait_s > deadline:
                    raise self._error(
                        f"{error}, for {self._settings.session_timeout_s:g} s"
                    ) from None
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)

    async def _connect(self) -> None:
        try:
            self._connection = await connect(
                self._url,
                open_timeout=self._settings.connect_timeout_s,
                max_size=int(self._settings.max_message_mb * 2**20),
                proxy=self._proxy,
            )
        except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
            raise self._error(f"no connection: {_told(error)}") from error

    async def _called(self, call: ParsedCall) -> tuple[str, float, bool]:
        """What a call leads to. What is wrong with it is told, not raised."""
        if call.status not in ("ok", "unknown_tool"):
            return f"Error: the call is {call.status}: {call.text}", 0.0, False
        arguments = dict(call.arguments)
        data = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
        observation, reward, is_done = await self._observed("step", data)
        if error := observation.get("error"):
            said = error.get("message", error) if isinstance(error, dict) else error
            return f"Error: {said}", reward, is_done
        return _result_text(observation.get("result")), reward, is_done

    async def _observed(
        self, kind: str, data: Mapping[str, Any]
    ) -> tuple[dict[str, Any], float, bool]:
        """The observation after a message, its reward, and whether the episode is done."""
        answer = await self._answer(kind, data)
        observation, reward = answer.get("observation"), answer.get("reward")
        if not isinstance(observation, dict) or not isinstance(reward, int | float | None):
            raise self._error(f"the answer to {kind} is no observation: {_cut(answer)}")
        if not math.isfinite(reward or 0.0):
            raise self._error(f"the reward after {kind} is {reward}")
        return observation, float(reward or 0.0), bool(answer.get("done"))

    async def _answer(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            raise self._error(f"{kind} comes before reset or after close")
        limit_s = self._settings.message_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                with suppress(WebSocketException):  # why a session is refused is said before
                    await self._connection.send(json.dumps({"type": kind, "data": data}))
                said = await self._connection.recv()
        except TimeoutError:
            raise self._error(f"no answer to {kind} in {limit_s:g} s") from None
        except WebSocketException as error:
            raise self._error(f"no answer to {kind}: {_told(error)}") from error
        try:
            answer = json.loads(said)
            kind_of_answer, inside = answer["type"], answer["data"]
        except (KeyError, RecursionError, TypeError, ValueError):
            raise self._error(f"the answer to {kind} is no message: {_cut(said)}") from None
        if kind_of_answer == "error" and isinstance(inside, dict):
            told = f"{kind} is refused ({inside.get('code')}): {_cut(inside.get('message'))}"
            if more := inside.get("errors"):
                told += f" {_cut(more)}"
            raise (
                _NoSessionError(told)
                if inside.get("code") == "CAPACITY_REACHED"
                else self._error(told)
            )
        if kind_of_answer != "observation" or not isinstance(inside, dict):
            raise self._error(f"the answer to {kind} is no observation: {_cut(answer)}")
        return inside

    def _specs(self, listed: Mapping[str, Any]) -> list[ToolSpec]:
        """The server's tools, of the answer to list_tools."""
        try:
            found = [
                ToolSpec(one["name"], one.get("description") or "", one["input_schema"])
                for one in listed["tools"]
            ]
        except (AttributeError, KeyError, TypeError):
            found = []
        if not found:
            raise self._error(f"it has no tools, which action='tools' needs: {_cut(listed)}")
        return found

    def _text(self, observation: Mapping[str, Any]) -> str:
        """What the policy is told of an observation."""
        name = self._settings.observation_field
        if name and name not in observation:
            raise self._error(
                f"observation_field={name!r} is not in the observation; "
                f"allowed: {', '.join(observation)}"
            )
        if name:
            return _as_text(observation[name])
        shown = {key: value for key, value in observation.items() if key != "metadata"}
        return _as_text(shown) if shown else ""

    def _error(self, said: str) -> OpenEnvError:
        return OpenEnvError(f"the OpenEnv server {self._told_url}: {said}")


class _NoSessionError(OpenEnvError):
    """All sessions of the server are in use."""


def _seed(fields: Mapping[str, Any], column: str) -> int:
    try:
        seed = int(fields[column])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"agent.environment='openenv' needs a whole number as the column {column!r} "
            f"(seed_column); this row has {fields.get(column)!r}"
        ) from error
    if seed < 0:
        raise ConfigError(f"agent.environment='openenv': the seed is {seed}; allowed: 0 or more")
    return seed


def _result_text(result: object) -> str:
    """What a tool answered: the texts of an MCP result, or what it is without them."""
    if isinstance(result, dict) and isinstance(blocks := result.get("content"), list):
        return "\n".join(
            str(block.get("text", f"[{block.get('type')}]"))
            if isinstance(block, dict)
            else str(block)
            for block in blocks
        )
    return _as_text(result)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {_cut(error)}"


def _cut(said: object) -> str:
    text = " ".join(str(said).split())
    return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]} ..."
