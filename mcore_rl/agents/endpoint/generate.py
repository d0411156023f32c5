"""The route of tokens: ids in, ids and log-probs out, in the form of vLLM's /inference/v1/generate.

What agents/remote.py asks servers of frozen models, and clients of the package `renderers` the
policy. The key comes with each request, as a bearer token.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Set
from typing import Any, Protocol

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.types import ASGIApp

from mcore_rl.agents.endpoint.fields import (
    BOOKKEEPING,
    NEUTRAL,
    OF_TEXT,
    RequestBody,
    refuse_unless,
)
from mcore_rl.agents.endpoint.guard import Guard, max_body_bytes
from mcore_rl.agents.endpoint.http_app import new_app, unless_gone
from mcore_rl.agents.remote import ABORT, GENERATE
from mcore_rl.agents.session import version_spans
from mcore_rl.inference.protocol import Completion, Generator, SamplingParams

IDEMPOTENCY = "idempotency-key"  # a header
_DEFAULT_TOKENS = 16  # vLLM's, where a request does not say how many
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


class Holder(Protocol):
    """What a key gives access to."""

    async def generate(self, asked: GenerateRequest, once: str) -> list[Completion]:
        """`once` is an idempotency key, or "".

        Raises RefusalError or ConfigError for what cannot be asked.
        """

    async def abort(self, request_id: str) -> None: ...


class FrozenHolder:
    """Samples as requests say."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def generate(self, asked: GenerateRequest, once: str) -> list[Completion]:
        """With a seed an answer is the same again anyway; `once` has no part in it."""
        asked.refuse_unknown()
        given = asked.sampling_params
        refuse_unless("stop_token_ids", given.stop_token_ids, not given.stop_token_ids, ([],))
        sampling = SamplingParams(
            n=given.n,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            stop=tuple(given.stop),
            max_tokens=given.max_tokens or _DEFAULT_TOKENS,
            seed=given.seed,
            cache=asked.cache_salt or "",
        )
        return await self._generator.submit(asked.token_ids, sampling, request_id=asked.request_id)

    async def abort(self, request_id: str) -> None:
        await self._generator.abort(request_id)


def generate_app(generator: Generator, key: str, max_context: int) -> ASGIApp:
    """One generator behind one key; `max_context`: tokens of a prompt and its answer."""
    app, holder = new_app(), FrozenHolder(generator)
    add_generate(app)
    limit = max_body_bytes(max_context)
    return Guard(app, lambda given: holder if _is_same(given, key) else None, max_body_bytes=limit)


def _is_same(given: str, key: str) -> bool:
    return secrets.compare_digest(given.encode(), key.encode())


def add_generate(app: FastAPI) -> None:
    """The routes, for keys whose holders are `Holder`s."""

    @app.post(GENERATE)
    async def generate(body: GenerateRequest, request: Request) -> dict[str, Any]:
        holder: Holder = request.state.holder
        once = request.headers.get(IDEMPOTENCY, "")
        found = await unless_gone(request, asyncio.create_task(holder.generate(body, once)))
        num_prompt, num_new = len(body.token_ids), sum(len(one.token_ids) for one in found)
        return {
            "request_id": body.request_id,
            "choices": [_choice(*numbered) for numbered in enumerate(found)],
            "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new},
        }

    @app.post(ABORT)
    async def abort(body: AbortRequest, request: Request) -> dict[str, Any]:
        holder: Holder = request.state.holder
        for request_id in body.request_ids:
            await holder.abort(request_id)
        return {}


def _choice(index: int, completion: Completion) -> dict[str, Any]:
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
            for span in version_spans(completion.weight_versions)
        ],
    }
