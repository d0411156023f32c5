"""Requests and answers of OpenAI's API as types of ours, and back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse

from mcore_rl.agents.chat_template.codec import (
    ChatMessage,
    JsonValue,
    ParsedTurn,
    ToolCall,
    ToolSpec,
    messages_of,
)
from mcore_rl.agents.trajectory import Turn
from mcore_rl.inference.protocol import Completion


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class RefusalError(Exception):
    """A request that is not answered: a status, a code for programs and a message for people."""

    def __init__(
        self, status: int, code: str, message: str, *, may_retry: bool = False, param: str = ""
    ) -> None:
        """`may_retry`: whether the same request may succeed later, which clients try by themselves.

        `param` is the field of the request that is at fault.
        """
        super().__init__(message)
        self.status, self.code, self.may_retry, self.param = status, code, may_retry, param

    def body(self) -> dict[str, object]:
        error = {
            "message": str(self),
            "type": "server_error" if self.status >= 500 else "invalid_request_error",
            "param": self.param or None,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """OpenAI's client tries 408, 409, 429 and 5xx again unless a header says no."""
        headers = {"x-should-retry": str(self.may_retry).lower()}
        if self.may_retry:
            headers["retry-after"] = "1"
        return JSONResponse(self.body(), self.status, headers)


_SHOWN = 200  # characters of a value, in errors
# Sampling is the trainer's.
SAMPLING = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
})  # fmt: skip
# These have no part in an answer.
BOOKKEEPING = frozenset({
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "cache_salt", "priority", "request_id",
})  # fmt: skip
# Answers of token ids have no text that these would change.
OF_TEXT = frozenset({
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "detokenize", "return_token_ids", "return_tokens_as_token_ids",
})  # fmt: skip
# Fields that change an answer, with the values at which they do not.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "add_special_tokens": (False,),
    "echo": (False,),
}


class RequestBody(BaseModel):
    """The JSON of a request. A field that is null is one that is not there."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    def refuse_others(
        self, neutral: Mapping[str, tuple[object, ...]], unused: Collection[str] = ()
    ) -> None:
        """Refuse fields that this class does not have, and those with a value not in `neutral`.

        `unused` are the names that may have any value.

        Raises:
            RefusalError: the message names the first of them.
        """
        declared = {name: getattr(self, name) for name in type(self).model_fields}
        for name, value in {**declared, **(self.model_extra or {})}.items():
            is_known = name in declared and name not in neutral
            if not is_known and name not in unused and value is not None:
                refuse_unless(name, value, value in neutral.get(name, ()), neutral.get(name, ()))


def refuse_unless(
    field: str, value: object, is_allowed: bool, allowed: Collection[object] = ()
) -> None:
    if not is_allowed:
        names = ", ".join(map(repr, allowed)) or "none"
        message = f"{field}={repr(value)[:_SHOWN]} is not supported here; allowed: {names}"
        raise RefusalError(400, "unsupported", message, param=field)


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


# As fields.NEUTRAL, of what a request may say where it says how its tokens are sampled.
_NEUTRAL_SAMPLING: dict[str, tuple[object, ...]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
}


class Sampling(RequestBody):
    n: int = Field(1, ge=1, le=1024)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = 0
    stop: list[str] = Field([])
    stop_token_ids: list[int] = Field([])
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    logprobs: int | None = None  # those of sampled tokens always come


class GenerateRequest(RequestBody):
    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling
    request_id: str = ""
    cache_salt: str | None = None

    def refuse_unknown(self, unused: Set[str] = frozenset()) -> None:
        """Raises RefusalError for what would change the answer and is not there.

        unused: fields of the sampling that the trainer decides.
        """
        unused = unused | BOOKKEEPING | OF_TEXT
        self.refuse_others({"stream": (False,)}, unused)
        self.sampling_params.refuse_others({**NEUTRAL, **_NEUTRAL_SAMPLING}, unused)


class AbortRequest(RequestBody):
    request_ids: list[str]


Body = dict[str, Any]


def chat_body(
    asked: ChatRequest,
    replies: Sequence[ChatChoice],
    bytes_of: Callable[[Sequence[int]], list[bytes]],
) -> Body:
    """`bytes_of`: as `token_bytes`."""
    choices = []
    for index, reply in enumerate(replies):
        choice: Body = {
            "index": index,
            "message": reply.message,
            "finish_reason": reply.finish_reason,
            "logprobs": _log_probs(reply.turn, bytes_of) if asked.logprobs else None,
        }
        if asked.return_token_ids:
            choice["token_ids"] = list(reply.turn.token_ids)
        choices.append(choice)
    turns = [reply.turn for reply in replies]
    return _body("chatcmpl", "chat.completion", turns, choices, asked.return_token_ids)


def chat_chunks(body: Body) -> Iterator[Body]:
    """Of each choice: its role and content, then its calls, then why it has ended."""
    for choice in body["choices"]:
        message = choice["message"]
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        first = {key: value for key, value in message.items() if key != "tool_calls"}
        deltas = [first, *([{"tool_calls": calls}] if calls else [])]
        log_probs = choice["logprobs"]
        for delta in deltas:
            part = {"index": choice["index"], "delta": delta, "finish_reason": None}
            yield _chunk(body, "chat.completion.chunk", {**part, "logprobs": log_probs})
            log_probs = None
        more = {key: choice[key] for key in ("token_ids",) if key in choice}
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield _chunk(body, "chat.completion.chunk", {**last, **more})


def text_body(asked: TextRequest, found: Sequence[tuple[Turn, str]]) -> Body:
    choices = []
    for index, (turn, text) in enumerate(found):
        choice: Body = {
            "index": index,
            "text": text,
            "finish_reason": turn.finish_reason,
            "logprobs": None,
        }
        if asked.return_token_ids:
            choice["token_ids"] = list(turn.token_ids)
        choices.append(choice)
    turns = [turn for turn, _ in found]
    return _body("cmpl", "text_completion", turns, choices, asked.return_token_ids)


def text_chunks(body: Body) -> Iterator[Body]:
    for choice in body["choices"]:
        yield _chunk(body, "text_completion", choice)


def _body(
    prefix: str, kind: str, turns: Sequence[Turn], choices: list[Body], has_ids: bool
) -> Body:
    num_prompt, num_new = len(turns[0].prompt_ids), sum(len(turn.token_ids) for turn in turns)
    found: Body = {
        "id": f"{prefix}-{turns[0].session_id.replace('/', '-')}-{turns[0].turn_id}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
    }
    if has_ids:
        found["prompt_token_ids"] = list(turns[0].prompt_ids)
    return found


def _chunk(body: Body, kind: str, choice: Body) -> Body:
    kept = {key: body[key] for key in ("id", "created", "model")}
    return {**kept, "object": kind, "choices": [choice]}


def _log_probs(turn: Turn, bytes_of: Callable[[Sequence[int]], list[bytes]]) -> Body:
    content = [
        {
            "token": data.decode(errors="replace"),
            "logprob": log_prob,
            "bytes": list(data),
            "top_logprobs": [],
        }
        for data, log_prob in zip(bytes_of(turn.token_ids), turn.log_probs, strict=True)
    ]
    return {"content": content, "refusal": None}
