"""Chat messages of data rows as messages of a codec."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from mcore_rl.agents.codec import ChatMessage, JsonValue, Role, ToolCall
from mcore_rl.config.errors import ConfigError

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def encodable(text: str) -> str:
    """U+FFFD for each lone surrogate: JSON may have one, no tokenizer takes it.

    >>> encodable("in x\\ud800") == "in x\\ufffd"
    True
    """
    return _SURROGATE.sub("\ufffd", text)


def encodable_message(message: ChatMessage) -> ChatMessage:
    """The same for all that a chat template shows of a message."""
    calls = tuple(
        ToolCall(encodable(call.name), _encodable_values(call.arguments), encodable(call.id))
        for call in message.tool_calls
    )
    return replace(
        message,
        content=encodable(message.content),
        reasoning=encodable(message.reasoning),
        tool_calls=calls,
        tool_call_id=encodable(message.tool_call_id),
        name=encodable(message.name),
    )


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
        if isinstance(arguments, str):
            arguments = json.loads(arguments.strip() or "null")
        if arguments is None:  # as clients write none
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise TypeError("arguments have to be an object")
        return ToolCall(function["name"], dict(arguments), call.get("id") or "")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"message {number} has a tool call {call!r}: {error!r}") from error


def _encodable_values(values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {encodable(name): _encodable_value(value) for name, value in values.items()}


def _encodable_value(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_encodable_value(one) for one in value]
    return _encodable_values(value) if isinstance(value, Mapping) else value
