"""Chat messages of data rows as messages of a codec."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from mcore_rl.agents.codec import ChatMessage, Role, ToolCall
from mcore_rl.config.errors import ConfigError


def messages_of(rows: Sequence[Mapping[str, Any]]) -> tuple[ChatMessage, ...]:
    """Messages in OpenAI's form, with content of text; ConfigError where one is not."""
    return tuple(_message(row, number) for number, row in enumerate(rows))


def _message(row: Mapping[str, Any], number: int) -> ChatMessage:
    if row.get("role") not in get_args(Role):
        raise ConfigError(
            f"message {number} has the role {row.get('role')!r}; allowed: "
            f"{', '.join(get_args(Role))}"
        )
    content = row.get("content") or ""
    if not isinstance(content, str):
        raise ConfigError(
            f"message {number} has content of {type(content).__name__}; allowed: text"
        )
    return ChatMessage(
        role=row["role"],
        content=content,
        reasoning=row.get("reasoning_content") or "",
        tool_calls=tuple(_call(call, number) for call in row.get("tool_calls") or ()),
        tool_call_id=row.get("tool_call_id") or "",
        name=row.get("name") or "",
    )


def _call(call: Mapping[str, Any], number: int) -> ToolCall:
    function = call.get("function", call)
    try:
        arguments = function["arguments"]
        found = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        return ToolCall(function["name"], found, call.get("id") or "")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"message {number} has a tool call {call!r}: {error!r}") from error
