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

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedCall, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import EnvironmentStep
from mcore_rl.config.checks import check_at_least, check_choice, check_positive
from mcore_rl.config.errors import ConfigError

ACTIONS = ("text", "tools")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")  # reached without a proxy
_MAX_SHOWN = 500  # characters of a server's message, in errors
_WAITS_S = 0.1, 2.0  # between attempts to get a session: the first wait, and the longest


class OpenEnvError(RuntimeError):
    """A server cannot be reached, is late, or answered with an error."""


@dataclass(frozen=True)
class OpenEnvSettings:
    """Settings of agent.environment=openenv."""

    url: str  # http(s):// or ws(s)://, without /ws
    action: str = "text"  # text: a turn is a step with its text; tools: its calls are steps
    action_field: str = "message"  # with action=text: field of the action for the text
    observation_field: str = ""  # shown to the policy; empty: all but metadata, as JSON
    seed_column: str = ""  # column with the seed of the reset; empty: no seed
    connect_timeout_s: float = 10.0
    message_timeout_s: float = 60.0  # per answer to a message
    session_timeout_s: float = 300.0  # to wait while all sessions of the server are in use
    max_message_mb: float = 100.0  # per answer

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
    order; one that fails is answered with its error, and a turn without a call ends the episode.
    """

    def __init__(self, fields: Mapping[str, Any], settings: OpenEnvSettings) -> None:
        """Read the seed; raise ConfigError if settings.seed_column names none in the row."""
        self._settings = settings
        parts = urlsplit(settings.url)
        scheme = parts.scheme.replace("http", "ws")
        path = f"{parts.path.rstrip('/')}/ws"
        self._url = parts._replace(scheme=scheme, path=path).geturl()
        self._shown_url = f"{scheme}://{parts.netloc.rpartition('@')[2]}{path}"  # without secrets
        self._proxy: Literal[True] | None = None if parts.hostname in _LOCAL_HOSTS else True
        self._connection: ClientConnection | None = None
        self._reset_reward = 0.0
        self.tools: Sequence[ToolSpec] = ()
        self._reset_data = {}
        if settings.seed_column:
            self._reset_data["seed"] = _parse_seed(fields, settings.seed_column)

    async def reset(self) -> Sequence[ChatMessage]:
        """Begin an episode; raise OpenEnvError, as `step` does, if the server fails."""
        observation, self._reset_reward, is_done = await self._open_episode()
        if is_done:
            raise self._build_error("the episode is done before the first turn")
        if self._settings.action == "tools":
            listed, _, _ = await self._observe("step", {"type": "list_tools"})
            self.tools = self._parse_specs(listed)
        text = self._format(observation)
        return [ChatMessage("user", text)] if text else []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        """Act by the text or the calls of a turn."""
        earned, self._reset_reward = self._reset_reward, 0.0
        if self._settings.action == "text":
            data = {self._settings.action_field: turn.content}
            observation, reward, is_done = await self._observe("step", data)
            message = ChatMessage("user", self._format(observation))
            return EnvironmentStep((message,), earned + reward, is_done)
        messages = []
        for call in turn.calls:
            text, reward, is_done = await self._call_tool(call)
            earned += reward
            messages.append(ChatMessage("tool", text, tool_call_id=call.id, name=call.name))
            if is_done:
                return EnvironmentStep(tuple(messages), earned, is_done=True)
        return EnvironmentStep(tuple(messages), earned, is_done=not turn.calls)

    async def close(self) -> None:
        """Close the session, if there is one."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            with suppress(WebSocketException):  # the server closed it first
                await connection.send(json.dumps({"type": "close"}))
        finally:
            await connection.close()

    async def _open_episode(self) -> tuple[dict[str, Any], float, bool]:
        """Wait for a session; return the result of its reset, as `_observe`."""
        clock = asyncio.get_running_loop()
        deadline = clock.time() + self._settings.session_timeout_s
        wait_s, longest_s = _WAITS_S
        while True:
            await self._connect()
            try:
                return await self._observe("reset", self._reset_data)
            except _NoSessionError as error:
                await self.close()
                if clock.time() + wait_s > deadline:
                    raise self._build_error(
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
            raise self._build_error(f"no connection: {_describe(error)}") from error

    async def _call_tool(self, call: ParsedCall) -> tuple[str, float, bool]:
        """Return the text for the policy, reward and end of a call; an error is a text, too."""
        if call.status not in ("ok", "unknown_tool"):
            return f"Error: the call is {call.status}: {call.text}", 0.0, False
        arguments = dict(call.arguments)
        data = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
        observation, reward, is_done = await self._observe("step", data)
        if error := observation.get("error"):
            message = error.get("message", error) if isinstance(error, dict) else error
            return f"Error: {message}", reward, is_done
        return _format_result(observation.get("result")), reward, is_done

    async def _observe(
        self, kind: str, data: Mapping[str, Any]
    ) -> tuple[dict[str, Any], float, bool]:
        """Send a message; return the observation, its reward, and whether the episode is done."""
        answer = await self._send(kind, data)
        observation, reward = answer.get("observation"), answer.get("reward")
        if not isinstance(observation, dict) or not isinstance(reward, int | float | None):
            raise self._build_error(f"the answer to {kind} is no observation: {_cut(answer)}")
        if not math.isfinite(reward or 0.0):
            raise self._build_error(f"the reward after {kind} is {reward}")
        return observation, float(reward or 0.0), bool(answer.get("done"))

    async def _send(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message; return the data of its answer."""
        if self._connection is None:
            raise self._build_error(f"{kind} comes before reset or after close")
        limit_s = self._settings.message_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                with suppress(WebSocketException):  # the reason of a refused session arrives before
                    await self._connection.send(json.dumps({"type": kind, "data": data}))
                received = await self._connection.recv()
        except TimeoutError:
            raise self._build_error(f"no answer to {kind} in {limit_s:g} s") from None
        except WebSocketException as error:
            raise self._build_error(f"no answer to {kind}: {_describe(error)}") from error
        try:
            answer = json.loads(received)
            answer_kind, content = answer["type"], answer["data"]
        except (KeyError, RecursionError, TypeError, ValueError):
            raise self._build_error(
                f"the answer to {kind} is no message: {_cut(received)}"
            ) from None
        if answer_kind == "error" and isinstance(content, dict):
            reason = f"{kind} is refused ({content.get('code')}): {_cut(content.get('message'))}"
            if details := content.get("errors"):
                reason += f" {_cut(details)}"
            raise (
                _NoSessionError(reason)
                if content.get("code") == "CAPACITY_REACHED"
                else self._build_error(reason)
            )
        if answer_kind != "observation" or not isinstance(content, dict):
            raise self._build_error(f"the answer to {kind} is no observation: {_cut(answer)}")
        return content

    def _parse_specs(self, listed: Mapping[str, Any]) -> list[ToolSpec]:
        """Return the server's tools, from the answer to list_tools."""
        try:
            specs = [
                ToolSpec(tool["name"], tool.get("description") or "", tool["input_schema"])
                for tool in listed["tools"]
            ]
        except (AttributeError, KeyError, TypeError):
            specs = []
        if not specs:
            raise self._build_error(f"it has no tools, which action='tools' needs: {_cut(listed)}")
        return specs

    def _format(self, observation: Mapping[str, Any]) -> str:
        """Return the text of an observation for the policy."""
        name = self._settings.observation_field
        if name and name not in observation:
            raise self._build_error(
                f"observation_field={name!r} is not in the observation; "
                f"allowed: {', '.join(observation)}"
            )
        if name:
            return _to_text(observation[name])
        shown = {key: value for key, value in observation.items() if key != "metadata"}
        return _to_text(shown) if shown else ""

    def _build_error(self, reason: str) -> OpenEnvError:
        return OpenEnvError(f"the OpenEnv server {self._shown_url}: {reason}")


class _NoSessionError(OpenEnvError):
    """All sessions of the server are in use."""


def _parse_seed(fields: Mapping[str, Any], column: str) -> int:
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


def _format_result(result: object) -> str:
    """Return the texts of an MCP result, or the result itself as text."""
    if isinstance(result, dict) and isinstance(blocks := result.get("content"), list):
        return "\n".join(
            str(block.get("text", f"[{block.get('type')}]"))
            if isinstance(block, dict)
            else str(block)
            for block in blocks
        )
    return _to_text(result)


def _to_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {_cut(error)}"


def _cut(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ..."
