"""A frozen model on servers of its own, as a loop on the policy's servers talks to it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from mcore_rl.agents.codec import ChatCodec
from mcore_rl.agents.trajectory import MASKED_VERSION
from mcore_rl.inference.protocol import Completion, Generator, NewTokens, SamplingParams

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
_PAUSES_S = 0.2, 1.0, 3.0  # before servers are asked again of which none was reached
_CONNECT_S = 10.0
_AVOIDED_S = 30.0  # a server that could not be reached or has failed, while others answer
_SHOWN = 300  # characters of an answer that is an error
# What is lost with a connection is asked again: with its seed an answer is the same.
_UNREACHED = httpx.ConnectError, httpx.ConnectTimeout
_LOST = *_UNREACHED, httpx.NetworkError, httpx.RemoteProtocolError
# A node that is gone closes no connection: the kernel finds out within 40 s.
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 40_000),  # ms, where something was sent
)


class ModelServerError(RuntimeError):
    """Servers of a frozen model failed; the message names the model and each of them."""


class _FailedError(Exception):
    """One server did not answer; another may."""

    def __init__(self, told: str, *, is_lost: bool) -> None:
        """`is_lost`: it is the connection that failed, so the server may be asked again."""
        super().__init__(told)
        self.is_lost = is_lost


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

    What a server does not answer goes to another. All calls are of one event loop. What it
    generates has no version of the policy's weights.
    """

    def __init__(self, name: str, address: ModelAddress, timeout_s: float) -> None:
        """`name` is that in `models`; `timeout_s` limits one answer, with all attempts."""
        self._name, self._urls, self._timeout_s = name, address.urls, timeout_s
        self._outstanding: Counter[str] = Counter()
        self._asked_before: Counter[str] = Counter()
        self._avoided_until: dict[str, float] = {}
        self._running: dict[str, str] = {}  # the server of each request that has an id
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {address.key}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=_KEEP_ALIVE),
            trust_env=False,  # no proxies: servers are on this cluster
        )

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        """Raises ModelServerError."""
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
        told: dict[str, str] = {}
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                url, answer = await self._answered(body, told)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._error(told) from error
        try:
            return [_completion(choice) for choice in answer.json()["choices"]]
        except (ValueError, KeyError, TypeError) as error:
            wrong = f"answered {answer.text[:_SHOWN]!r}: {type(error).__name__}: {error}"
            raise self._error({url: wrong}) from error

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
    async def start_together(self) -> AsyncIterator[None]:
        """Nothing is held: others talk to these servers, too."""
        yield

    async def close(self) -> None:
        await self._client.aclose()

    async def _answered(
        self, body: dict[str, Any], told: dict[str, str]
    ) -> tuple[str, httpx.Response]:
        """The server that answered, and its answer. `told` is what the others have failed of.

        Each server is asked until one answers; those whose connections failed, again after a pause.
        """
        left = set(self._urls)
        for pause_s in (*_PAUSES_S, None):
            lost = set[str]()
            while left:
                url = min(left, key=self._rank)
                left.remove(url)
                try:
                    return url, await self._asked(url, body, told)
                except _FailedError as error:
                    told[url] = str(error)
                    if error.is_lost:
                        lost.add(url)
            if pause_s is None or not lost:
                break
            await asyncio.sleep(pause_s)
            left = lost
        raise self._error(told)

    def _rank(self, url: str) -> tuple[bool, int, int, int]:
        """The first of them is asked."""
        is_avoided = time.monotonic() < self._avoided_until.get(url, 0.0)
        place = self._urls.index(url)
        return is_avoided, self._outstanding[url], self._asked_before[url], place

    async def _asked(self, url: str, body: dict[str, Any], told: dict[str, str]) -> httpx.Response:
        """Raises _FailedError, or ModelServerError where others would refuse it, too."""
        told[url] = f"has not answered in {self._timeout_s:g} s (models.{self._name}.timeout_s)"
        request_id = body.get("request_id", "")
        if request_id:
            self._running[request_id] = url
        self._outstanding[url] += 1
        self._asked_before[url] += 1
        try:
            answer = await self._client.post(f"{url}{GENERATE}", json=body)
        except _LOST as error:
            reason = f"cannot be reached: {type(error).__name__}: {error}"
            if isinstance(error, _UNREACHED):
                self._avoid(url, reason)
            raise _FailedError(reason, is_lost=True) from error
        except httpx.HTTPError as error:
            raise self._error({url: f"failed: {type(error).__name__}: {error}"}) from error
        finally:
            self._outstanding[url] -= 1
            self._running.pop(request_id, None)
        if answer.status_code == 200:
            self._avoided_until.pop(url, None)
            return answer
        shown = " ".join(answer.text[:_SHOWN].split())
        reason = f"answered with status {answer.status_code}: {shown}"
        if answer.status_code < 500:
            raise self._error({url: reason})
        self._avoid(url, reason)  # if its engine is dead, it fails sooner than others answer
        raise _FailedError(reason, is_lost=False)

    def _avoid(self, url: str, reason: str) -> None:
        if url not in self._avoided_until:  # else it has not answered since that was told
            told = f"others are asked, and it again every {_AVOIDED_S:g} s"
            print(f"{self._error({url: reason})}; {told}", flush=True)
        self._avoided_until[url] = time.monotonic() + _AVOIDED_S

    def _error(self, told: dict[str, str]) -> ModelServerError:
        servers = "; ".join(f"the server at {url} {what}" for url, what in told.items())
        return ModelServerError(f"models.{self._name}: {servers}")


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
