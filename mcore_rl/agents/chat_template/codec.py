"""Chats as token ids over many turns: what a codec does, and the messages it does it with.

A turn's tokens are made once. What the policy sampled is never rendered again: the next prompt is
the last prompt, the sampled tokens, and what the chat template puts after them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

from mcore_rl.config.errors import ConfigError

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
Role = Literal["system", "user", "assistant", "tool"]
CallStatus = Literal["ok", "malformed", "unclosed", "unnamed", "unknown_tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, JsonValue]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Role
    content: str = ""
    reasoning: str = ""  # of an assistant
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool_call_id: str = ""  # of a tool: the call that it answers
    name: str = ""  # of a tool

    def as_dict(self) -> dict[str, JsonValue]:
        """The message in OpenAI's form, as chat templates read it: arguments are objects."""
        found: dict[str, JsonValue] = {"role": self.role, "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.role == "tool":
            found["tool_call_id"] = self.tool_call_id
            if self.name:
                found["name"] = self.name
        return found


@dataclass(frozen=True, slots=True)
class ToolSpec:
    name: str
    description: str
    parameters: Mapping[str, JsonValue]  # JSON schema of the arguments

    def as_dict(self) -> dict[str, JsonValue]:
        """The tool in OpenAI's form."""
        function: dict[str, JsonValue] = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One attempt to call a tool, good or bad."""

    status: CallStatus
    name: str  # empty where the attempt has none
    arguments: Mapping[str, JsonValue]  # empty unless `status` is "ok"
    text: str  # as it was sampled
    span: tuple[int, int] | None  # tokens of the completion, [start, end)
    id: str = ""  # where the format has one


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a completion says. Nothing is rendered from it: it is for tools, rewards and people."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    reasoning_closed: bool = True  # False where the completion ends inside its reasoning

    def message(self) -> ChatMessage:
        """The same as a message, with the calls that are "ok"."""
        calls = tuple(ToolCall(c.name, c.arguments, c.id) for c in self.calls if c.status == "ok")
        return ChatMessage("assistant", self.content, self.reasoning, calls)


class ChatCodec(Protocol):
    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn of the assistant."""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """A prompt, up to where the assistant's turn begins.

        Raises:
            ConfigError: for tools or calls that `codec_proof.Proved` refuses.
            ContextFullError: the text is far longer than the context.
        """

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """The prompt of the next turn: prompt_ids + completion_ids + what follows them, or None.

        `new_messages` are what came since: of tools, the user or the system. Where the completion
        lacks the token that ends a turn, since it was cut off, that token is the first of what
        follows. None where the template would have changed what is there already: then `render`
        begins a new sample. Raises as `render`.
        """

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """What a completion says.

        `prompt_ids` is the prompt that was sampled from: with some templates it is the prompt that
        opens the reasoning. `tools` gives the types of arguments where the format has none.
        """


class ContextFullError(RuntimeError):
    """There is no room for another token of the policy."""


class ChatTokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that codecs use."""

    @property
    def eos_token_id(self) -> int | None: ...

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, JsonValue]], **options: Any
    ) -> str: ...


def template_ids(
    tokenizer: ChatTokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolSpec],
    options: Mapping[str, JsonValue],
    *,
    generate: bool = True,
    max_tokens: int | None = None,
) -> list[int]:
    """Render a conversation by the tokenizer's chat template, with its own variables `options`.

    Raises as `encode`.
    """
    text = tokenizer.apply_chat_template(
        [message.as_dict() for message in messages],
        tools=[tool.as_dict() for tool in tools] or None,
        add_generation_prompt=generate,
        tokenize=False,
        **options,
    )
    return encode(tokenizer, text, max_tokens)


def encode(tokenizer: ChatTokenizer, text: str, max_tokens: int | None = None) -> list[int]:
    """Return the tokens of a text, without special tokens around it.

    Raises:
        ContextFullError: it is certain to have more than `max_tokens`, found out at the cost of
            tokenising about as many.
    """
    if max_tokens is not None:
        check_length(tokenizer, text, max_tokens)
    return tokenizer.encode(text, add_special_tokens=False)


def check_length(tokenizer: ChatTokenizer, text: str, max_tokens: int) -> None:
    """Raise ContextFullError for a text that is certain to have more than `max_tokens` tokens.

    The text is tokenised in pieces until they have twice as many: a cut through a word makes a few
    more tokens of it. A text with few characters for each token of the context is not looked at.
    """
    piece_chars, num_tokens = max(4 * max_tokens, 4096), 0
    if len(text) <= piece_chars:
        return
    for start in range(0, len(text), piece_chars):
        piece = text[start : start + piece_chars]
        num_tokens += len(tokenizer.encode(piece, add_special_tokens=False))
        if num_tokens > 2 * max_tokens:
            raise ContextFullError(f"more than {max_tokens} of {max_tokens} tokens are used")


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
