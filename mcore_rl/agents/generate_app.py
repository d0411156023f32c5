"""A generator behind HTTP: tokens in, tokens out, in the form of vLLM's own /inference/v1/generate.

What agents/remote.py asks. The key comes with each request, as a bearer token.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from mcore_rl.agents.remote import ABORT, GENERATE
from mcore_rl.agents.session import version_spans
from mcore_rl.config.errors import ConfigError
from mcore_rl.rollout.protocol import Completion, Generator, SamplingParams

_KEEP_ALIVE_S = 600  # of a connection without requests
_CLOSE_S = 5.0


class Sampling(BaseModel):
    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = 0
    stop: list[str] = []
    max_tokens: int = Field(16, ge=1)
    seed: int | None = None
    logprobs: int | None = None  # those of sampled tokens always come

    def params(self, cache: str) -> SamplingParams:
        found = self.model_dump(exclude={"logprobs"}) | {"stop": tuple(self.stop), "cache": cache}
        return SamplingParams(**found)


class GenerateRequest(BaseModel):
    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling
    request_id: str = ""
    cache_salt: str | None = None


class AbortRequest(BaseModel):
    request_ids: list[str]


def generate_app(generator: Generator, key: str) -> FastAPI:
    async def allowed(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, f"Bearer {key}".encode()):
            raise HTTPException(401, "the key is missing or wrong")

    app = FastAPI(openapi_url=None, dependencies=[Depends(allowed)])

    @app.post(GENERATE)
    async def generate(body: GenerateRequest, request: Request) -> JSONResponse:
        sampling = body.sampling_params.params(body.cache_salt or "")
        work = asyncio.ensure_future(
            generator.submit(body.token_ids, sampling, request_id=body.request_id)
        )
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return JSONResponse({}, 499)  # to nobody
            return JSONResponse({"choices": [_choice(*c) for c in enumerate(work.result())]})
        except ConfigError as error:
            return _error(400, str(error))
        except Exception as error:  # noqa: BLE001 (the client is to hear of it)
            return _error(500, f"{type(error).__name__}: {error}")
        finally:
            work.cancel()
            gone.cancel()

    @app.post(ABORT)
    async def abort(body: AbortRequest) -> JSONResponse:
        for request_id in body.request_ids:
            await generator.abort(request_id)
        return JSONResponse({})

    return app


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    tokens = zip(completion.token_ids, completion.log_probs, strict=True)
    return {
        "index": index,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_string or None,
        "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in tokens]},
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end}
            for span in version_spans(completion.weight_versions)
        ],
    }


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)


async def _disconnected(request: Request) -> None:
    """Returns when nobody waits for the answer any more."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class HttpServer:
    """An app on a port of its own, in the event loop that starts it."""

    def __init__(self, app: FastAPI, host: str) -> None:
        """`host` is the address to listen on, which clients reach."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        port = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it answers."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise RuntimeError(f"the HTTP server at {self.url} has ended")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, _CLOSE_S)
        self._socket.close()
