"""OpenAI's API in front of a rollout server, for any agent that speaks it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from starlette.types import ASGIApp

from mcore_rl.agents.endpoint.answers import chat_body, chat_chunks, text_body, text_chunks
from mcore_rl.agents.endpoint.client_session import ClientSession
from mcore_rl.agents.endpoint.fields import RequestBody
from mcore_rl.agents.endpoint.generate import IDEMPOTENCY, add_generate
from mcore_rl.agents.endpoint.guard import Guard, max_body_bytes
from mcore_rl.agents.endpoint.http_app import has_ended, new_app, result_of, unless_gone
from mcore_rl.agents.endpoint.refusal import RefusalError
from mcore_rl.agents.endpoint.wire import MODEL, ChatRequest, CompletionsRequest, TextRequest
from mcore_rl.rewards.registry import find_token_fault

COMMENTS_S = 5.0  # between the comments of a stream that has nothing to say yet
Body = dict[str, Any]


class Opened(RequestBody):
    role: str = Field(min_length=1)


class Reward(RequestBody):
    reward: float
    turn_rewards: list[float] = Field([])
    token_rewards: list[list[float]] = Field([])


class Finish(RequestBody):
    status: Literal["finished", "truncated"] = "finished"


def endpoint_app(session_of: Callable[[str], ClientSession | None], max_context: int) -> ASGIApp:
    """`session_of` a key is None where nobody has it; `max_context`: tokens of a conversation."""
    app = new_app()
    add_generate(app)
    _add_completions(app)
    _add_sessions(app)
    return Guard(
        app,
        session_of,
        max_body_bytes=max_body_bytes(max_context),
        on_too_large=ClientSession.reach_limit,
    )


def _add_completions(app: FastAPI) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Body:
        found = {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "mcore_rl",
            "max_model_len": _of(request).limits.max_context,
        }
        return {"object": "list", "data": [found]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response | Body:
        client = _of(request)

        async def answered() -> Body:
            return chat_body(body, await client.chat(body), client.bytes_of)

        return await _answer(request, body, answered, chat_chunks)

    @app.post("/v1/completions", response_model=None)
    async def complete(body: TextRequest, request: Request) -> Response | Body:
        client = _of(request)

        async def answered() -> Body:
            return text_body(body, await client.complete(body))

        return await _answer(request, body, answered, text_chunks)


def _add_sessions(app: FastAPI) -> None:
    @app.post("/v1/sessions")
    async def opened(body: Opened, request: Request) -> Body:
        """Of another role in the same trajectory."""
        served = _of(request).opened(body.role)
        return {
            "session_id": served.session.name,
            "api_key": served.api_key,
            "base_url": served.base_url,
        }

    @app.post("/v1/sessions/reward")
    async def reward(body: Reward, request: Request) -> Body:
        """The last one counts."""
        if not all(math.isfinite(value) for value in (body.reward, *body.turn_rewards)):
            raise RefusalError(400, "invalid_request", "a reward has to be finite", param="reward")
        served, given = _of(request).served, tuple(body.turn_rewards)
        if given and len(given) != len(served.session.turns):
            told = f"{len(given)} turn_rewards; the session has {len(served.session.turns)} turns"
            raise RefusalError(400, "invalid_request", told, param="turn_rewards")
        lengths = [len(turn.token_ids) for turn in served.session.turns]
        if body.token_rewards and (told := find_token_fault(body.token_rewards, lengths)):
            raise RefusalError(400, "invalid_request", told, param="token_rewards")
        served.reward, served.turn_rewards = body.reward, given
        served.token_rewards = tuple(body.token_rewards)
        return {}

    @app.post("/v1/sessions/finish")
    async def finish(request: Request, body: Finish | None = None) -> Body:
        _of(request).end((body or Finish()).status)
        return {}

    @app.post("/v1/sessions/abort")
    async def abort(request: Request) -> Body:
        _of(request).end("aborted")
        return {}


def _of(request: Request) -> ClientSession:
    found: ClientSession = request.state.holder
    return found


async def _answer(
    request: Request,
    asked: CompletionsRequest,
    make: Callable[[], Coroutine[Any, Any, Body]],
    chunks_of: Callable[[Body], Iterator[Body]],
) -> Response | Body:
    """A body, or a stream of its chunks.

    A stream is sampled whole first: only whole completions say which weights chose each token.
    """
    client, key = _of(request), request.headers.get(IDEMPOTENCY, "")
    work = client.started(client.once(key, asked, make))
    if not asked.stream:
        return await unless_gone(request, work)
    if await has_ended(request, work, COMMENTS_S):
        result_of(work)  # what is refused has its status
    has_usage = asked.stream_options is not None and asked.stream_options.include_usage
    events = _events(work, chunks_of, has_usage)
    return StreamingResponse(events, media_type="text/event-stream")


async def _events(
    work: asyncio.Task[Body], chunks_of: Callable[[Body], Iterator[Body]], has_usage: bool
) -> AsyncIterator[str]:
    """Comments until the work has ended, then its chunks. Whoever closes it cancels the work."""
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=COMMENTS_S)
            if not work.done():
                yield ": sampling\n\n"
        body = result_of(work)
    except RefusalError as error:
        yield f"data: {json.dumps(error.body())}\n\n"
        return
    finally:
        work.cancel()
    for chunk in chunks_of(body):
        yield f"data: {json.dumps(chunk)}\n\n"
    if has_usage:
        [*_, last] = chunks_of(body)
        yield f"data: {json.dumps({**last, 'choices': [], 'usage': body['usage']})}\n\n"
    yield "data: [DONE]\n\n"
