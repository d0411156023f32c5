"""Answers of OpenAI's API: whole, and as the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mcore_rl.agents.endpoint.wire import MODEL, ChatChoice, ChatRequest, TextRequest
from mcore_rl.agents.trajectory import Turn

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
