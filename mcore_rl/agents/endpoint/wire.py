"""Requests and answers of OpenAI's API as types of ours, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from mcore_rl.agents.codec import ChatMessage, JsonValue, ParsedTurn, ToolCall, ToolSpec
from mcore_rl.agents.endpoint.fields import BOOKKEEPING, NEUTRAL, SAMPLING, RequestBody
from mcore_rl.agents.endpoint.refusal import RefusalError
from mcore_rl.agents.messages import messages_of
from mcore_rl.agents.trajectory import Turn
from mcore_rl.inference.protocol import Completion

MODEL = "policy"
_MAX_STOPS, _MAX_TOOLS = 64, 1024
_ROLES = {"developer": "system"}  # as OpenAI calls it since 2024
_NO_PARAMETERS: dict[str, JsonValue] = {"type": "object", "properties": {}}


# As fields.NEUTRAL, of chats only.
_NEUTRAL_IN_CHATS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "functions": ([],),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"}, {}),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}


class StreamOptions(RequestBody):
    include_usage: bool = False


class CompletionsRequest(RequestBody):
    """What both kinds of completions have. Temperature, seed and the like are the trainer's."""

    n: int = Field(1, ge=1, le=128)
    stop: str | Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: list[int] = Field([])  # of vLLM
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False  # of vLLM

    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)


class ChatRequest(CompletionsRequest):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: Annotated[list[dict[str, Any]], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False

    def refuse_unknown(self) -> None:
        """Raises RefusalError for what would change the answer and is not there."""
        self.refuse_others({**NEUTRAL, **_NEUTRAL_IN_CHATS}, SAMPLING | BOOKKEEPING)


class TextRequest(CompletionsRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)  # OpenAI's

    def refuse_unknown(self) -> None:
        """Raises RefusalError for what would change the answer and is not there."""
        own = {"logprobs": (0,), "suffix": ("",), "best_of": (self.n,)}
        self.refuse_others({**NEUTRAL, **own}, SAMPLING | BOOKKEEPING)

    def only_prompt(self) -> str | list[int]:
        """Raises RefusalError unless there is exactly one."""
        given = self.prompt
        if isinstance(given, str) or all(isinstance(token, int) for token in given):
            if given:
                return given  # type: ignore[return-value]
        elif len(given) == 1 and given[0]:
            return given[0]  # type: ignore[return-value]
        told = "one prompt a request is allowed, as text or token ids, and not empty"
        raise RefusalError(400, "invalid_request", told, param="prompt")


def chat_of(messages: Sequence[Mapping[str, Any]]) -> tuple[ChatMessage, ...]:
    """Messages of a request; RefusalError where one has content other than text."""
    found = messages_of([{**m, **_plain(m, i)} for i, m in enumerate(messages)])
    names = {call.id: call.name for message in found for call in message.tool_calls if call.id}
    return tuple(
        replace(m, name=names.get(m.tool_call_id, "")) if m.role == "tool" and not m.name else m
        for m in found
    )


def _plain(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The role and content of a message as a codec has them: content may come in parts."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                told = f"message {number} has content of type {kind!r}; allowed: text"
                raise RefusalError(400, "unsupported", told, param="messages")
        content = "".join(part["text"] for part in content)
    # Of other roles `name` is a person's, which no chat template shows.
    name = message.get("name") if role == "tool" else ""
    return {"role": _ROLES.get(str(role), role), "content": content, "name": name}


def tools_of(tools: Sequence[Mapping[str, Any]] | None) -> tuple[ToolSpec, ...]:
    """Raises RefusalError for one that is no function."""
    return tuple(_tool(tool, number) for number, tool in enumerate(tools or ()))


def _tool(tool: Mapping[str, Any], number: int) -> ToolSpec:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or "name" not in function:
        told = f"tool {number} has the type {tool.get('type')!r}; allowed: function, with a name"
        raise RefusalError(400, "unsupported", told, param="tools")
    parameters = function.get("parameters") or _NO_PARAMETERS
    return ToolSpec(str(function["name"]), str(function.get("description") or ""), parameters)


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One choice of an answer."""

    turn: Turn
    message: dict[str, Any]  # of the assistant, as the client is sent it
    sent: ChatMessage  # the same for a codec
    said: ChatMessage  # with what a stop text has cut off, and the reasoning
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]


def reply_of(
    turn: Turn,
    completion: Completion,
    parsed: ParsedTurn,
    decode: Callable[[Sequence[int]], str],
    *,
    may_call: bool,
) -> ChatChoice:
    """`decode` gives the text of token ids.

    A call is a part of the content, as text, where it is not well formed or may not be.
    """
    calls, texts = list[ToolCall](), [parsed.content]
    for call in parsed.calls:
        if call.status == "ok" and may_call:
            own = f"call_{turn.turn_id}_{len(calls)}"
            calls.append(ToolCall(call.name, call.arguments, call.id or own))
        else:
            texts.append(decode(turn.token_ids[slice(*call.span)]) if call.span else call.text)
    content = "\n".join(filter(None, texts))
    said = ChatMessage("assistant", content, parsed.reasoning, tuple(calls))
    if completion.stop_string:
        content = content.split(completion.stop_string)[0]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in calls
        ]
    reason: Any = "tool_calls" if calls and turn.finish_reason == "stop" else turn.finish_reason
    return ChatChoice(turn, message, replace(said, content=content), said, reason)
