"""Requests, answers and errors of the API: their JSON, and what it means.

It is a part of OpenAI's API, and vLLM's route of token ids. A field that would change an answer and
is not supported is refused by its name.
"""

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
    ImageCodec,
    JsonValue,
    ParsedTurn,
    ToolCall,
    ToolSpec,
    parse_messages,
)
from mcore_rl.agents.session import Turn
from mcore_rl.data.image_files import ImageError, read_data_url
from mcore_rl.inference.protocol import Completion

MODEL = "policy"
Body = dict[str, Any]
_MAX_STOPS, _MAX_TOOLS = 64, 1024
_MAX_SHOWN = 200  # characters of a value, in errors
_ROLES = {"developer": "system"}  # OpenAI's name since 2024
_NO_PARAMETERS: dict[str, JsonValue] = {"type": "object", "properties": {}}
# Ignored: the trainer decides how to sample.
SAMPLING = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
})  # fmt: skip
# Ignored: they do not change an answer.
BOOKKEEPING = frozenset({
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "cache_salt", "priority", "request_id",
})  # fmt: skip
# Ignored where answers are token ids: they change the text.
TEXT_FIELDS = frozenset({
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
_NEUTRAL_IN_CHATS: Mapping[str, tuple[object, ...]] = {
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
_NEUTRAL_SAMPLING: Mapping[str, tuple[object, ...]] = {  # of token requests that set the sampling
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
}


class ClientGoneError(Exception):
    """The client has closed its connection."""


class RefusalError(Exception):
    """A request that is refused: a status, a code for programs and a message for people."""

    def __init__(
        self, status: int, code: str, message: str, *, may_retry: bool = False, param: str = ""
    ) -> None:
        """Set the parts of the answer.

        Args:
            may_retry: Whether the same request may succeed later; clients then retry by themselves.
            param: Field of the request that is at fault.
        """
        super().__init__(message)
        self.status, self.code, self.may_retry, self.param = status, code, may_retry, param

    def to_body(self) -> dict[str, object]:
        """Return the error in OpenAI's form."""
        error = {
            "message": str(self),
            "type": "server_error" if self.status >= 500 else "invalid_request_error",
            "param": self.param or None,
            "code": self.code,
        }
        return {"error": error}

    def to_response(self) -> JSONResponse:
        """Return the answer; OpenAI's client retries 408, 409, 429, 5xx unless a header forbids."""
        headers = {"x-should-retry": str(self.may_retry).lower()}
        if self.may_retry:
            headers["retry-after"] = "1"
        return JSONResponse(self.to_body(), self.status, headers)


class RequestBody(BaseModel):
    """The JSON of a request. A field that is null counts as missing."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, given: Any) -> Any:
        """Remove fields that are null."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    def refuse_unsupported(
        self, neutral: Mapping[str, tuple[object, ...]], ignored: Collection[str] = ()
    ) -> None:
        """Refuse unknown fields, and fields of `neutral` with another value than these.

        Args:
            ignored: Fields that may have any value.

        Raises:
            RefusalError: The message names the first of them.
        """
        declared = {name: getattr(self, name) for name in type(self).model_fields}
        for name, value in {**declared, **(self.model_extra or {})}.items():
            is_known = name in declared and name not in neutral
            if not is_known and name not in ignored and value is not None:
                refuse_unless(name, value, value in neutral.get(name, ()), neutral.get(name, ()))


def refuse_unless(
    field: str, value: object, is_allowed: bool, allowed: Collection[object] = ()
) -> None:
    """Raise RefusalError for a value of a field unless it is allowed."""
    if not is_allowed:
        names = ", ".join(map(repr, allowed)) or "none"
        message = f"{field}={repr(value)[:_MAX_SHOWN]} is not supported here; allowed: {names}"
        raise RefusalError(400, "unsupported", message, param=field)


class StreamOptions(RequestBody):
    include_usage: bool = False


class CompletionsRequest(RequestBody):
    """Fields of chat completions and of completions."""

    n: int = Field(1, ge=1, le=128)
    stop: str | Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: list[int] = Field([])  # of vLLM
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False  # of vLLM

    def list_stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
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
        """Raise RefusalError for fields that would change the answer and are not supported."""
        self.refuse_unsupported({**NEUTRAL, **_NEUTRAL_IN_CHATS}, SAMPLING | BOOKKEEPING)


class TextRequest(CompletionsRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)  # OpenAI's default

    def refuse_unknown(self) -> None:
        """Raise RefusalError for fields that would change the answer and are not supported."""
        neutral = {"logprobs": (0,), "suffix": ("",), "best_of": (self.n,)}
        self.refuse_unsupported({**NEUTRAL, **neutral}, SAMPLING | BOOKKEEPING)

    def get_prompt(self) -> str | list[int]:
        """Return the prompt; raise RefusalError unless there is exactly one."""
        given = self.prompt
        if isinstance(given, str) or all(isinstance(token, int) for token in given):
            if given:
                return given  # type: ignore[return-value]
        elif len(given) == 1 and given[0]:
            return given[0]  # type: ignore[return-value]
        message = "one prompt a request is allowed, as text or token ids, and not empty"
        raise RefusalError(400, "invalid_request", message, param="prompt")


class Sampling(RequestBody):
    n: int = Field(1, ge=1, le=1024)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = 0
    stop: list[str] = Field([])
    stop_token_ids: list[int] = Field([])
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    logprobs: int | None = None  # log-probs of sampled tokens are always in the answer


class GenerateRequest(RequestBody):
    """A request of vLLM's /inference/v1/generate."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling
    request_id: str = ""
    cache_salt: str | None = None

    def refuse_unknown(self, ignored: Set[str] = frozenset()) -> None:
        """Raise RefusalError for fields that would change the answer and are not supported.

        Args:
            ignored: Fields of the sampling that the trainer decides.
        """
        ignored = ignored | BOOKKEEPING | TEXT_FIELDS
        self.refuse_unsupported({"stream": (False,)}, ignored)
        self.sampling_params.refuse_unsupported({**NEUTRAL, **_NEUTRAL_SAMPLING}, ignored)


class AbortRequest(RequestBody):
    request_ids: list[str]


def parse_chat(
    messages: Sequence[Mapping[str, Any]], images: ImageCodec | None = None
) -> tuple[ChatMessage, ...]:
    """Convert the messages of a request.

    Args:
        images: Stores the images of a model that takes them; None: it takes none.

    Raises:
        RefusalError: A content is not of text, or of text and images in data: URLs.
    """
    parsed = parse_messages([{**m, **_flatten(m, i, images)} for i, m in enumerate(messages)])
    names = {call.id: call.name for message in parsed for call in message.tool_calls if call.id}
    return tuple(
        replace(m, name=names.get(m.tool_call_id, "")) if m.role == "tool" and not m.name else m
        for m in parsed
    )


def _flatten(message: Mapping[str, Any], number: int, images: ImageCodec | None) -> dict[str, Any]:
    """Return role, content, images and name of a message as codecs read them.

    Content may be in parts.
    """
    role, content, digests = message.get("role"), message.get("content"), list[str]()
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if images is not None and kind == "image_url":
                digests.append(_add_image(part, number, images))
                texts.append(images.tokens.placeholder)
            elif isinstance(part, dict) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                allowed = "text" if images is None else "text, image_url"
                reason = f"message {number} has content of type {kind!r}; allowed: {allowed}"
                raise RefusalError(400, "unsupported", reason, param="messages")
        content = "".join(texts)
    # For other roles `name` is a person's, which no chat template shows.
    name = message.get("name") if role == "tool" else ""
    role = _ROLES.get(str(role), role)
    return {"role": role, "content": content, "name": name, "images": digests}


def _add_image(part: Mapping[str, Any], number: int, images: ImageCodec) -> str:
    """Store the image of a part; return its digest."""
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    try:
        return images.add_file(read_data_url(str(url)))
    except ImageError as error:
        reason = f"message {number}: an image {error}"
        raise RefusalError(400, "invalid_request", reason, param="messages") from error


def parse_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[ToolSpec, ...]:
    """Convert the tools of a request; raise RefusalError for one that is no function."""
    return tuple(_parse_tool(tool, number) for number, tool in enumerate(tools or ()))


def _parse_tool(tool: Mapping[str, Any], number: int) -> ToolSpec:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or "name" not in function:
        reason = f"tool {number} has the type {tool.get('type')!r}; allowed: function, with a name"
        raise RefusalError(400, "unsupported", reason, param="tools")
    parameters = function.get("parameters") or _NO_PARAMETERS
    return ToolSpec(str(function["name"]), str(function.get("description") or ""), parameters)


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """A choice of an answer."""

    turn: Turn
    message: dict[str, Any]  # in OpenAI's form, as sent to the client
    sent: ChatMessage  # the same for codecs
    sampled: ChatMessage  # with reasoning, and with text that a stop text cut off
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]


def build_choice(
    turn: Turn,
    completion: Completion,
    parsed: ParsedTurn,
    decode: Callable[[Sequence[int]], str],
    *,
    may_call: bool,
) -> ChatChoice:
    """Build a choice of a turn.

    Args:
        decode: Returns the text of token ids.
        may_call: Whether calls are allowed. Otherwise, and where it is invalid, a call is content.
    """
    calls, texts = list[ToolCall](), [parsed.content]
    for call in parsed.calls:
        if call.status == "ok" and may_call:
            call_id = call.id or f"call_{turn.turn_id}_{len(calls)}"
            calls.append(ToolCall(call.name, call.arguments, call_id))
        else:
            texts.append(decode(turn.token_ids[slice(*call.span)]) if call.span else call.text)
    content = "\n".join(filter(None, texts))
    sampled = ChatMessage("assistant", content, parsed.reasoning, tuple(calls))
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
    return ChatChoice(turn, message, replace(sampled, content=content), sampled, reason)


def build_chat_body(
    request: ChatRequest,
    choices: Sequence[ChatChoice],
    decode_bytes: Callable[[Sequence[int]], list[bytes]],
) -> Body:
    """Build the answer to a chat request.

    Args:
        decode_bytes: Returns the bytes of each token, as `sessions.decode_token_bytes`.
    """
    bodies = []
    for index, choice in enumerate(choices):
        body: Body = {
            "index": index,
            "message": choice.message,
            "finish_reason": choice.finish_reason,
            "logprobs": _list_log_probs(choice.turn, decode_bytes) if request.logprobs else None,
        }
        if request.return_token_ids:
            body["token_ids"] = list(choice.turn.token_ids)
        bodies.append(body)
    turns = [choice.turn for choice in choices]
    return _build_body("chatcmpl", "chat.completion", turns, bodies, request.return_token_ids)


def _list_log_probs(turn: Turn, decode_bytes: Callable[[Sequence[int]], list[bytes]]) -> Body:
    content = [
        {
            "token": data.decode(errors="replace"),
            "logprob": log_prob,
            "bytes": list(data),
            "top_logprobs": [],
        }
        for data, log_prob in zip(decode_bytes(turn.token_ids), turn.log_probs, strict=True)
    ]
    return {"content": content, "refusal": None}


def split_chat_body(body: Body) -> Iterator[Body]:
    """Yield the chunks of a stream, for each choice: role and content, calls, finish reason."""
    for choice in body["choices"]:
        message = choice["message"]
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        first = {key: value for key, value in message.items() if key != "tool_calls"}
        deltas = [first, *([{"tool_calls": calls}] if calls else [])]
        log_probs = choice["logprobs"]
        for delta in deltas:
            part = {"index": choice["index"], "delta": delta, "finish_reason": None}
            yield _build_chunk(body, "chat.completion.chunk", {**part, "logprobs": log_probs})
            log_probs = None
        ids = {key: choice[key] for key in ("token_ids",) if key in choice}
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield _build_chunk(body, "chat.completion.chunk", {**last, **ids})


def build_text_body(request: TextRequest, completions: Sequence[tuple[Turn, str]]) -> Body:
    """Build the answer to a completions request, of turns and their texts."""
    choices = []
    for index, (turn, text) in enumerate(completions):
        choice: Body = {
            "index": index,
            "text": text,
            "finish_reason": turn.finish_reason,
            "logprobs": None,
        }
        if request.return_token_ids:
            choice["token_ids"] = list(turn.token_ids)
        choices.append(choice)
    turns = [turn for turn, _ in completions]
    return _build_body("cmpl", "text_completion", turns, choices, request.return_token_ids)


def split_text_body(body: Body) -> Iterator[Body]:
    """Yield the chunks of a stream."""
    for choice in body["choices"]:
        yield _build_chunk(body, "text_completion", choice)


def _build_body(
    prefix: str, kind: str, turns: Sequence[Turn], choices: list[Body], has_ids: bool
) -> Body:
    num_prompt, num_new = len(turns[0].prompt_ids), sum(len(turn.token_ids) for turn in turns)
    body: Body = {
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
        body["prompt_token_ids"] = list(turns[0].prompt_ids)
    return body


def _build_chunk(body: Body, kind: str, choice: Body) -> Body:
    head = {key: body[key] for key in ("id", "created", "model")}
    return {**head, "object": kind, "choices": [choice]}
