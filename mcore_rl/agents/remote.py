"""A frozen model on servers of its own, as a loop on the policy's servers talks to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from mcore_rl.agents.codec import ChatCodec
from mcore_rl.agents.trajectory import MASKED_VERSION
from mcore_rl.rollout.protocol import Completion, Generator, NewTokens, SamplingParams

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
_PAUSES_S = 0.2, 1.0, 3.0  # before an attempt after one that found no connection
_CONNECT_S = 10.0
_SHOWN = 300  # characters of an answer that is an error
# What is lost with a connection is asked again: with its seed an answer is the same.
_LOST = httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.RemoteProtocolError


class ModelServerError(RuntimeError):
    """A server of a frozen model failed; the message names the model and the server."""


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """Where a model's servers are."""

    urls: tuple[str, ...]
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """What a conversation with a model needs."""

    generator: Generator
    codec: ChatCodec
    sampling: SamplingParams
    max_context: int


class RemoteGenerator:
    """A Generator whose requests go to the server of a model that has the fewest of ours.

    All calls are of one event loop. What it generates has no version of the policy's weights.
    """

    def __init__(self, name: str, address: ModelAddress, timeout_s: float) -> None:
        """`name` is that in `models`; `timeout_s` limits one answer, with all attempts."""
        self._name, self._urls, self._timeout_s = name, address.urls, timeout_s
        self._outstanding: Counter[str] = Counter()
        self._asked_before: Counter[str] = Counter()
        self._running: dict[str, str] = {}  # the server of each request that has an id
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {address.key}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # no proxies: servers are on this cluster
        )

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        """Raises ModelServerError."""
        url = min(self._urls, key=lambda url: (self._outstanding[url], self._asked_before[url]))
        body: dict[str, Any] = {
            "token_ids": prompt_ids,
            "sampling_params": {
                "n": sampling.n,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop": list(sampling.stop),
                "max_tokens": sampling.max_tokens,
                "seed": sampling.seed,
                "logprobs": 0,
            },
        }
        if request_id:
            body["request_id"] = request_id
            self._running[request_id] = url
        self._outstanding[url] += 1
        self._asked_before[url] += 1
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                answer = await self._asked(url, body)
        except TimeoutError as error:
            if not limit.expired():
                raise
            told = f"has not answered in {self._timeout_s:g} s (models.{self._name}.timeout_s)"
            raise self._error(url, told) from error
        finally:
            self._outstanding[url] -= 1
            self._running.pop(request_id, None)
        try:
            return [_completion(choice) for choice in answer.json()["choices"]]
        except (ValueError, KeyError, TypeError) as error:
            told = f"answered {answer.text[:_SHOWN]!r}: {type(error).__name__}: {error}"
            raise self._error(url, told) from error

    async def stream(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> AsyncIterator[NewTokens]:
        """All tokens of a completion at once."""
        found = await self.submit(prompt_ids, sampling, request_id=request_id)
        for index, one in enumerate(found):
            yield NewTokens(index, one.token_ids, one.log_probs, one.finish_reason)

    async def abort(self, request_id: str) -> None:
        if url := self._running.get(request_id):
            limit = asyncio.timeout(self._timeout_s)
            async with limit:
                await self._client.post(f"{url}{ABORT}", json={"request_ids": [request_id]})

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Nothing is held: others talk to these servers, too."""
        yield

    async def close(self) -> None:
        await self._client.aclose()

    async def _asked(self, url: str, body: dict[str, Any]) -> httpx.Response:
        for pause_s in (*_PAUSES_S, None):
            try:
                answer = await self._client.post(f"{url}{GENERATE}", json=body)
                break
            except _LOST as error:
                if pause_s is None:
                    told = f"cannot be reached: {type(error).__name__}: {error}"
                    raise self._error(url, told) from error
                await asyncio.sleep(pause_s)
            except httpx.HTTPError as error:
                raise self._error(url, f"failed: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            told = " ".join(answer.text[:_SHOWN].split())
            raise self._error(url, f"answered with status {answer.status_code}: {told}")
        return answer

    def _error(self, url: str, told: str) -> ModelServerError:
        return ModelServerError(f"models.{self._name}: the server at {url} {told}")


def _completion(choice: dict[str, Any]) -> Completion:
    token_ids: Sequence[int] = choice["token_ids"]
    log_probs = [token["logprob"] for token in choice["logprobs"]["content"]]
    if len(log_probs) != len(token_ids) or choice["finish_reason"] not in (
        "stop", "length", "abort",
    ):  # fmt: skip
        raise ValueError("neither as many log-probs as tokens nor a finish reason that is known")
    return Completion(
        token_ids=list(token_ids),
        log_probs=log_probs,
        finish_reason=choice["finish_reason"],
        weight_versions=[MASKED_VERSION] * len(token_ids),
        stop_string=choice["stop_reason"] if isinstance(choice.get("stop_reason"), str) else "",
    )
