"""Frozen models for loops and the reward `judge`.

They are on servers of their own, behind a client, or adapters on the policy's server.
"""

from __future__ import annotations

import asyncio
import socket
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from mcore_rl.agents.chat_template.codec import ChatCodec, ContextFullError, parse_messages
from mcore_rl.agents.trajectory import MASKED_VERSION
from mcore_rl.inference.protocol import Completion, Generator, NewTokens, SamplingParams
from mcore_rl.rewards.remote import Post, RemoteError

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
_PAUSES_S = 0.2, 1.0, 3.0  # between attempts when no server could be reached
_CONNECT_S = 10.0
_AVOID_S = 30.0  # for a server that failed or could not be reached, while others answer
_MAX_SHOWN = 300  # characters of an answer, in errors
# A request whose connection fails is sent again: with its seed the answer is the same.
_UNREACHABLE = httpx.ConnectError, httpx.ConnectTimeout
_DISCONNECTED = *_UNREACHABLE, httpx.NetworkError, httpx.RemoteProtocolError
# A node that fails closes no connection: the kernel notices within 40 s.
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 40_000),  # ms, for unacknowledged data
)


class ModelServerError(RuntimeError):
    """Servers of a frozen model failed; the message names the model and each server."""


class _ServerFailedError(Exception):
    """A server did not answer; another may."""

    def __init__(self, reason: str, *, is_disconnected: bool) -> None:
        """Set the reason; `is_disconnected`: the same server may be tried again."""
        super().__init__(reason)
        self.is_disconnected = is_disconnected


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """URLs of a model's servers, and their key."""

    urls: tuple[str, ...]
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that loops talk to, and how it samples."""

    generator: Generator
    codec: ChatCodec
    sampling: SamplingParams
    max_context: int


class RemoteGenerator:
    """A Generator that sends each request to the server with the fewest outstanding ones.

    If a server does not answer, another is tried. All calls are of one event loop. Completions have
    no version of the policy's weights.
    """

    def __init__(self, name: str, address: ModelAddress, timeout_s: float) -> None:
        """Open a client.

        Args:
            name: Key of the model in `models`.
            timeout_s: Limit of an answer, all attempts together.
        """
        self._name, self._urls, self._timeout_s = name, address.urls, timeout_s
        self._num_outstanding: Counter[str] = Counter()
        self._num_sent: Counter[str] = Counter()
        self._avoided_until: dict[str, float] = {}
        self._running: dict[str, str] = {}  # server of each request that has an id
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
        """Sample completions of a prompt.

        Raises:
            ModelServerError: No server answered, or one refused the request.
        """
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
        failures: dict[str, str] = {}
        timeout = asyncio.timeout(self._timeout_s)
        try:
            async with timeout:
                url, answer = await self._post_to_any(body, failures)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise self._build_error(failures) from error
        try:
            return [_parse_completion(choice) for choice in answer.json()["choices"]]
        except (ValueError, KeyError, TypeError) as error:
            fault = f"answered {answer.text[:_MAX_SHOWN]!r}: {type(error).__name__}: {error}"
            raise self._build_error({url: fault}) from error

    async def stream(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> AsyncIterator[NewTokens]:
        """Yield each completion whole."""
        completions = await self.submit(prompt_ids, sampling, request_id=request_id)
        for index, completion in enumerate(completions):
            yield NewTokens(
                index, completion.token_ids, completion.log_probs, completion.finish_reason
            )

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens that it has."""
        if url := self._running.get(request_id):
            async with asyncio.timeout(self._timeout_s):
                await self._client.post(f"{url}{ABORT}", json={"request_ids": [request_id]})

    @asynccontextmanager
    async def start_together(self) -> AsyncIterator[None]:
        """Start nothing together: these servers have other clients."""
        yield

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _post_to_any(
        self, body: dict[str, Any], failures: dict[str, str]
    ) -> tuple[str, httpx.Response]:
        """Return the first server that answers, and its answer.

        Each server is tried once; those whose connections failed, again after a pause.

        Args:
            failures: Gets the reason of each server that failed.
        """
        untried = set(self._urls)
        for pause_s in (*_PAUSES_S, None):
            disconnected = set[str]()
            while untried:
                url = min(untried, key=self._compute_priority)
                untried.remove(url)
                try:
                    return url, await self._post(url, body, failures)
                except _ServerFailedError as error:
                    failures[url] = str(error)
                    if error.is_disconnected:
                        disconnected.add(url)
            if pause_s is None or not disconnected:
                break
            await asyncio.sleep(pause_s)
            untried = disconnected
        raise self._build_error(failures)

    def _compute_priority(self, url: str) -> tuple[bool, int, int, int]:
        """Return the sort key of a server; the lowest is tried first."""
        is_avoided = time.monotonic() < self._avoided_until.get(url, 0.0)
        index = self._urls.index(url)
        return is_avoided, self._num_outstanding[url], self._num_sent[url], index

    async def _post(
        self, url: str, body: dict[str, Any], failures: dict[str, str]
    ) -> httpx.Response:
        """Send a request to one server.

        Raises:
            _ServerFailedError: Another server may answer.
            ModelServerError: Other servers would refuse the request, too.
        """
        failures[url] = f"has not answered in {self._timeout_s:g} s (models.{self._name}.timeout_s)"
        request_id = body.get("request_id", "")
        if request_id:
            self._running[request_id] = url
        self._num_outstanding[url] += 1
        self._num_sent[url] += 1
        try:
            answer = await self._client.post(f"{url}{GENERATE}", json=body)
        except _DISCONNECTED as error:
            reason = f"cannot be reached: {type(error).__name__}: {error}"
            if isinstance(error, _UNREACHABLE):
                self._avoid(url, reason)
            raise _ServerFailedError(reason, is_disconnected=True) from error
        except httpx.HTTPError as error:
            raise self._build_error({url: f"failed: {type(error).__name__}: {error}"}) from error
        finally:
            self._num_outstanding[url] -= 1
            self._running.pop(request_id, None)
        if answer.status_code == 200:
            self._avoided_until.pop(url, None)
            return answer
        text = " ".join(answer.text[:_MAX_SHOWN].split())
        reason = f"answered with status {answer.status_code}: {text}"
        if answer.status_code < 500:
            raise self._build_error({url: reason})
        self._avoid(url, reason)  # a dead engine fails sooner than other servers answer
        raise _ServerFailedError(reason, is_disconnected=False)

    def _avoid(self, url: str, reason: str) -> None:
        if url not in self._avoided_until:  # else the log has it already
            action = f"others are asked, and it again every {_AVOID_S:g} s"
            print(f"{self._build_error({url: reason})}; {action}", flush=True)
        self._avoided_until[url] = time.monotonic() + _AVOID_S

    def _build_error(self, failures: dict[str, str]) -> ModelServerError:
        servers = "; ".join(f"the server at {url} {reason}" for url, reason in failures.items())
        return ModelServerError(f"models.{self._name}: {servers}")


class AdapterGenerator:
    """A Generator of a frozen adapter on the policy's server.

    Its completions have no version of the policy's weights.
    """

    def __init__(self, server: Generator, name: str) -> None:
        """Name the adapter: one of the server's `ServerSpec.adapters`."""
        self._server, self._name = server, name

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        """Sample completions of a prompt."""
        sampling = replace(sampling, adapter=self._name)
        completions = await self._server.submit(prompt_ids, sampling, request_id=request_id)
        return [
            replace(completion, weight_versions=[MASKED_VERSION] * len(completion.token_ids))
            for completion in completions
        ]

    def stream(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> AsyncIterator[NewTokens]:
        """Yield new tokens of completions."""
        sampling = replace(sampling, adapter=self._name)
        return self._server.stream(prompt_ids, sampling, request_id=request_id)

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens that it has."""
        await self._server.abort(request_id)

    def start_together(self) -> AbstractAsyncContextManager[None]:
        """Hold requests: see `Generator.start_together`."""
        return self._server.start_together()


def _parse_completion(choice: dict[str, Any]) -> Completion:
    token_ids: Sequence[int] = choice["token_ids"]
    log_probs = [token["logprob"] for token in choice["logprobs"]["content"]]
    if len(log_probs) != len(token_ids):
        raise ValueError(f"{len(log_probs)} log-probs of {len(token_ids)} tokens")
    reason = choice["finish_reason"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason={reason!r}; allowed: 'stop', 'length', 'abort'")
    return Completion(
        token_ids=list(token_ids),
        log_probs=log_probs,
        finish_reason=reason,
        weight_versions=[MASKED_VERSION] * len(token_ids),
        stop_string=choice["stop_reason"] if isinstance(choice.get("stop_reason"), str) else "",
    )


def make_judge_post(model: FrozenModel) -> Post:
    """Return a function that answers requests of the reward `judge`, as chat completions would.

    Each prompt has a seed of its own: with it, a verdict is the same in every run.
    """

    async def post(request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request; raise RemoteError if its prompt leaves no room for a verdict."""
        try:
            prompt = model.codec.render(parse_messages(request["messages"]))
        except ContextFullError:
            reason = f"the judge's prompt has more tokens than its max_context={model.max_context}"
            raise RemoteError(reason) from None
        free = model.max_context - len(prompt)
        if free < 1:
            raise RemoteError(
                f"the judge's prompt has {len(prompt)} tokens, and its max_context is "
                f"{model.max_context}"
            )
        sampling = replace(
            model.sampling,
            n=request["n"],
            temperature=request["temperature"],
            max_tokens=min(request["max_tokens"], free),
            seed=zlib.crc32(np.asarray(prompt, np.int64).tobytes()),
        )
        completions = await model.generator.submit(prompt, sampling)
        parsed = [model.codec.parse(c.token_ids, (), prompt) for c in completions]
        return {"choices": [{"message": {"content": turn.content}} for turn in parsed]}

    return post
