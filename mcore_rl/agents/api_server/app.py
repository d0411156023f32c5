"""The routes: OpenAI's API in front of a rollout server, and vLLM's route of token ids."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from starlette.types import ASGIApp

from mcore_rl.agents.api_server.http_server import (
    RequestGuard,
    build_app,
    compute_max_body_bytes,
    get_result,
    wait_for_result,
    wait_until_done,
)
from mcore_rl.agents.api_server.protocol import (
    MODEL,
    AbortRequest,
    Body,
    ChatRequest,
    CompletionsRequest,
    GenerateRequest,
    RefusalError,
    RequestBody,
    TextRequest,
    build_chat_body,
    build_text_body,
    refuse_unless,
    split_chat_body,
    split_text_body,
)
from mcore_rl.agents.frozen_model import ABORT, GENERATE
from mcore_rl.agents.session import group_versions
from mcore_rl.inference.protocol import Completion, Generator, SamplingParams
from mcore_rl.rewards.registry import find_token_fault

if TYPE_CHECKING:
    from mcore_rl.agents.api_server.sessions import SessionHandler  # which starts this app

COMMENTS_S = 5.0  # between the comments of a stream while its answer is sampled
IDEMPOTENCY = "idempotency-key"  # a header
_DEFAULT_TOKENS = 16  # vLLM's, for requests without max_tokens


class OpenRole(RequestBody):
    role: str = Field(min_length=1)


class Reward(RequestBody):
    reward: float
    turn_rewards: list[float] = Field([])
    token_rewards: list[list[float]] = Field([])


class Finish(RequestBody):
    status: Literal["finished", "truncated"] = "finished"


def build_openai_app(
    find: Callable[[str], SessionHandler | None], max_context: int, max_images: int = 0
) -> ASGIApp:
    """Build the app of a rollout server.

    Args:
        find: Returns the handler of a key; None for an unknown key.
        max_context: Tokens of a conversation.
        max_images: Images of a conversation.
    """
    app = build_app()
    _add_generate_routes(app)
    _add_completion_routes(app)
    _add_session_routes(app)
    return RequestGuard(
        app,
        find,
        max_body_bytes=compute_max_body_bytes(max_context, max_images),
        on_too_large=lambda handler: handler.reach_limit(),
    )


def _add_completion_routes(app: FastAPI) -> None:
    @app.get("/v1/models")
    async def list_models(request: Request) -> Body:
        model = {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "mcore_rl",
            "max_model_len": _get_handler(request).limits.max_context,
        }
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response | Body:
        handler = _get_handler(request)

        async def make() -> Body:
            return build_chat_body(body, await handler.chat(body), handler.decode_bytes)

        return await _answer(request, body, make, split_chat_body)

    @app.post("/v1/completions", response_model=None)
    async def complete(body: TextRequest, request: Request) -> Response | Body:
        handler = _get_handler(request)

        async def make() -> Body:
            return build_text_body(body, await handler.complete(body))

        return await _answer(request, body, make, split_text_body)


def _add_session_routes(app: FastAPI) -> None:
    @app.post("/v1/sessions")
    async def open_role(body: OpenRole, request: Request) -> Body:
        """Open a session of another role in the same trajectory."""
        session = _get_handler(request).open_role(body.role)
        return {
            "session_id": session.session.name,
            "api_key": session.api_key,
            "base_url": session.base_url,
        }

    @app.post("/v1/sessions/reward")
    async def set_reward(body: Reward, request: Request) -> Body:
        """Set the reward of the session; the last request counts."""
        if not all(math.isfinite(value) for value in (body.reward, *body.turn_rewards)):
            raise RefusalError(400, "invalid_request", "a reward has to be finite", param="reward")
        session, turn_rewards = _get_handler(request).session, tuple(body.turn_rewards)
        turns = session.session.turns
        if turn_rewards and len(turn_rewards) != len(turns):
            reason = f"{len(turn_rewards)} turn_rewards; the session has {len(turns)} turns"
            raise RefusalError(400, "invalid_request", reason, param="turn_rewards")
        lengths = [len(turn.token_ids) for turn in turns]
        if body.token_rewards and (reason := find_token_fault(body.token_rewards, lengths)):
            raise RefusalError(400, "invalid_request", reason, param="token_rewards")
        session.reward, session.turn_rewards = body.reward, turn_rewards
        session.token_rewards = tuple(body.token_rewards)
        return {}

    @app.post("/v1/sessions/finish")
    async def finish(request: Request, body: Finish | None = None) -> Body:
        _get_handler(request).end((body or Finish()).status)
        return {}

    @app.post("/v1/sessions/abort")
    async def abort_session(request: Request) -> Body:
        _get_handler(request).end("aborted")
        return {}


def _get_handler(request: Request) -> SessionHandler:
    handler: SessionHandler = request.state.handler
    return handler


async def _answer(
    request: Request,
    body: CompletionsRequest,
    make: Callable[[], Coroutine[Any, Any, Body]],
    split: Callable[[Body], Iterator[Body]],
) -> Response | Body:
    """Return an answer, or a stream of its chunks.

    A stream is sampled whole first: only whole completions say which weights sampled each token.
    """
    handler, key = _get_handler(request), request.headers.get(IDEMPOTENCY, "")
    work = handler.start_task(handler.run_once(key, body, make))
    if not body.stream:
        return await wait_for_result(request, work)
    if await wait_until_done(request, work, COMMENTS_S):
        get_result(work)  # a refusal keeps its status
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    return StreamingResponse(_stream(work, split, has_usage), media_type="text/event-stream")


async def _stream(
    work: asyncio.Task[Body], split: Callable[[Body], Iterator[Body]], has_usage: bool
) -> AsyncIterator[str]:
    """Yield comments until the work has ended, then its chunks. Closing it cancels the work."""
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=COMMENTS_S)
            if not work.done():
                yield ": sampling\n\n"
        body = get_result(work)
    except RefusalError as error:
        yield f"data: {json.dumps(error.to_body())}\n\n"
        return
    finally:
        work.cancel()
    for chunk in split(body):
        yield f"data: {json.dumps(chunk)}\n\n"
    if has_usage:
        [*_, last] = split(body)
        yield f"data: {json.dumps({**last, 'choices': [], 'usage': body['usage']})}\n\n"
    yield "data: [DONE]\n\n"


class GenerateHandler(Protocol):
    """Answers the token requests of a key."""

    async def generate(self, request: GenerateRequest, idempotency_key: str) -> list[Completion]:
        """Sample completions; `idempotency_key` may be "".

        Raises:
            RefusalError, ConfigError: The request is not supported.
        """

    async def abort(self, request_id: str) -> None: ...


class FrozenModelHandler:
    """Samples from a frozen model as requests say."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def generate(self, request: GenerateRequest, idempotency_key: str) -> list[Completion]:
        """Sample completions. With its seed an answer is the same anyway, so the key is unused."""
        request.refuse_unknown()
        given = request.sampling_params
        refuse_unless("stop_token_ids", given.stop_token_ids, not given.stop_token_ids, ([],))
        sampling = SamplingParams(
            n=given.n,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            stop=tuple(given.stop),
            max_tokens=given.max_tokens or _DEFAULT_TOKENS,
            seed=given.seed,
            cache=request.cache_salt or "",
        )
        return await self._generator.submit(
            request.token_ids, sampling, request_id=request.request_id
        )

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens that it has."""
        await self._generator.abort(request_id)


def build_generate_app(generator: Generator, key: str, max_context: int) -> ASGIApp:
    """Build the app of a frozen model's server: one generator behind one key.

    Args:
        max_context: Tokens of a prompt and its answer.
    """
    app, handler = build_app(), FrozenModelHandler(generator)
    _add_generate_routes(app)

    def find(given: str) -> FrozenModelHandler | None:
        return handler if secrets.compare_digest(given.encode(), key.encode()) else None

    return RequestGuard(app, find, max_body_bytes=compute_max_body_bytes(max_context))


def _add_generate_routes(app: FastAPI) -> None:
    """Add vLLM's routes of token ids, for keys with a GenerateHandler.

    Clients are agents/frozen_model.py and, for the policy, the package `renderers`.
    """

    @app.post(GENERATE)
    async def generate(body: GenerateRequest, request: Request) -> dict[str, Any]:
        handler: GenerateHandler = request.state.handler
        work = asyncio.create_task(handler.generate(body, request.headers.get(IDEMPOTENCY, "")))
        completions = await wait_for_result(request, work)
        num_new = sum(len(completion.token_ids) for completion in completions)
        return {
            "request_id": body.request_id,
            "choices": [_build_choice(index, c) for index, c in enumerate(completions)],
            "usage": {"prompt_tokens": len(body.token_ids), "completion_tokens": num_new},
        }

    @app.post(ABORT)
    async def abort(body: AbortRequest, request: Request) -> dict[str, Any]:
        handler: GenerateHandler = request.state.handler
        for request_id in body.request_ids:
            await handler.abort(request_id)
        return {}


def _build_choice(index: int, completion: Completion) -> dict[str, Any]:
    tokens = zip(completion.token_ids, completion.log_probs, strict=True)
    return {
        "index": index,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_string or None,
        # `token` for clients of vLLM before 0.32, `token_id` for those since.
        "logprobs": {
            "content": [{"token": f"token_id:{t}", "token_id": t, "logprob": p} for t, p in tokens]
        },
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end}
            for span in group_versions(completion.weight_versions)
        ],
    }
