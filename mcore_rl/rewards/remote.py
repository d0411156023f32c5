"""Servers that rewards ask over HTTP: places, rates, retries, and limits on time and size."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mcore_rl.config.checks import check_at_least, check_positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import parse_json_object
from mcore_rl.rewards.base import shown
from mcore_rl.rewards.processes import within

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

# Sends an object as JSON, and returns the object that is the answer.
Post = Callable[[Mapping[str, object]], Awaitable[dict[str, Any]]]


class RemoteError(RuntimeError):
    """A server could not be asked, or has refused, or its answer cannot be read."""


class _TryAgainError(RemoteError):
    """One that may not come back."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s  # that the server asks for


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """Settings of every reward that asks a server."""

    url: str  # where requests go; http or https
    headers: str = ""  # NAME=VARIABLE, with commas between: headers from environment variables
    # Of one request with all its retries; null: reward.timeout_s. Waiting for a place is no part.
    timeout_s: float | None = None
    retries: int = 3  # after failed connections and the statuses 429 and 500 to 599
    backoff_s: float = (
        0.5  # before the first retry; doubled with each, plus up to as much at random
    )
    max_backoff_s: float = 30.0  # that it becomes, and that a header Retry-After may ask for
    requests_per_s: float | None = None  # of each generation server, at most; null: any number
    concurrent_requests: int = 16  # of each generation server, at most
    max_answer_kb: int = 1024  # of one answer, in KiB

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.password:
            shown_url = re.sub("//.*@", "//...@", self.url)
            raise ConfigError(
                f"url={shown_url!r}; allowed: http://HOST/... or https://HOST/..., without a "
                "password, which is for headers"
            )
        check_at_least("retries", self.retries, 0)
        check_at_least("backoff_s", self.backoff_s, 0)
        check_at_least("max_backoff_s", self.max_backoff_s, self.backoff_s)
        check_at_least("concurrent_requests", self.concurrent_requests, 1)
        check_at_least("max_answer_kb", self.max_answer_kb, 1)
        if self.requests_per_s is not None:
            check_positive("requests_per_s", self.requests_per_s)
        for part in filter(None, self.headers.split(",")):
            if not re.fullmatch(r"\s*[A-Za-z0-9-]+=[A-Za-z_][A-Za-z0-9_]*\s*", part):
                raise ConfigError(
                    f"headers={self.headers!r}; allowed: NAME=VARIABLE, with commas between, where "
                    "VARIABLE is an environment variable"
                )

    @property
    def endpoint(self) -> str:
        """The URL of requests."""
        return self.url

    def secret_headers(self) -> dict[str, str]:
        """Raises ConfigError where an environment variable is missing; tells no value."""
        pairs = [part.strip().split("=") for part in filter(None, self.headers.split(","))]
        return {name: variable_value("headers", variable) for name, variable in pairs}


def variable_value(setting: str, variable: str) -> str:
    """Of an environment variable that a setting names, fit for a header."""
    value = os.environ.get(variable, "")
    if not value or not (value.isascii() and value.isprintable()):
        what = "is no printable ASCII" if value else "is not set"
        raise ConfigError(
            f"{setting} names the environment variable {variable!r}, which {what}; allowed: one "
            "that is set where the run starts and on each node with generation servers"
        )
    return value


class RemoteReward:
    """Asks the server of one reward. All calls are of one event loop."""

    def __init__(self, settings: RemoteSettings, limit_s: float) -> None:
        """`limit_s`: of one request with its retries. Raises ConfigError for a missing variable."""
        import httpx  # 0.2 s
        from aiolimiter import AsyncLimiter

        self._settings, self._limit_s = settings, limit_s
        self._places = asyncio.Semaphore(settings.concurrent_requests)
        rate = settings.requests_per_s
        self._rate = AsyncLimiter(1, 1 / rate) if rate is not None else None  # evenly, no bursts
        self._client = httpx.AsyncClient(
            headers={**settings.secret_headers(), "Accept-Encoding": "identity"},
            timeout=None,
            limits=httpx.Limits(max_connections=settings.concurrent_requests),
        )

    async def post(self, asked: Mapping[str, object]) -> dict[str, Any]:
        """The object that the server answers with.

        Raises:
            TooLateError: after limit_s from the first try on.
            RemoteError: it has failed as often as it may, has refused, or its answer is no JSON
                object, is too large, or leads to another place.
        """
        body = json.dumps(asked).encode()
        async with self._places:
            await self._turn()
            try:
                return await within(self._limit_s, self._tried(body))
            except _TryAgainError as error:
                raise RemoteError(f"{error}, in {self._settings.retries + 1} tries") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _turn(self) -> None:
        if self._rate is not None:
            await self._rate.acquire()

    async def _tried(self, body: bytes) -> dict[str, Any]:
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

        tries = AsyncRetrying(
            stop=stop_after_attempt(self._settings.retries + 1),
            wait=self._wait_s,
            retry=retry_if_exception_type(_TryAgainError),
            sleep=asyncio.sleep,
            reraise=True,
        )
        async for one in tries:
            with one:
                if one.retry_state.attempt_number > 1:
                    await self._turn()
                return _parsed(await self._once(body), self._settings.endpoint)
        raise AssertionError("the last try returns or raises")

    async def _once(self, body: bytes) -> bytes:
        import httpx

        url, most = self._settings.endpoint, self._settings.max_answer_kb << 10
        headers, found = {"Content-Type": "application/json"}, bytearray()
        try:
            async with self._client.stream("POST", url, content=body, headers=headers) as answer:
                async for chunk in answer.aiter_raw():
                    found += chunk
                    if len(found) > most:
                        raise RemoteError(
                            f"{url} answered with more than {most >> 10} KiB (max_answer_kb)"
                        )
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise RemoteError(f"{url} cannot be asked: {error!r}") from error
        except httpx.TransportError as error:
            raise _TryAgainError(f"{url} cannot be reached: {error!r}") from error
        _check_status(url, answer, bytes(found))
        return bytes(found)

    def _wait_s(self, state: RetryCallState) -> float:
        from tenacity import wait_exponential_jitter

        own, most = self._settings.backoff_s, self._settings.max_backoff_s
        backoff = wait_exponential_jitter(multiplier=own, max=most, jitter=own)(state)
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.wait_s if isinstance(error, _TryAgainError) else 0.0
        return max(backoff, min(asked_s, most))


def _parsed(body: bytes, url: str) -> dict[str, Any]:
    try:
        return parse_json_object(body, f"the answer of {url}")
    except ConfigError as error:
        raise RemoteError(f"{error}: {shown(body[:200])}") from error


def _check_status(url: str, answer: httpx.Response, body: bytes) -> None:
    status = answer.status_code
    if 200 <= status < 300:
        return
    told = f"{url} answered {status}: {shown(body[:200])}"
    if status == 429 or status >= 500:
        raise _TryAgainError(told, retry_after_s(answer.headers.get("Retry-After", "")))
    if 300 <= status < 400:
        raise RemoteError(f"{url} leads to {shown(answer.headers.get('Location', ''))}: give that")
    raise RemoteError(told)


def retry_after_s(header: str) -> float:
    """The seconds of a header Retry-After, a number or a date; 0 if it is neither.

    >>> retry_after_s("120"), retry_after_s("soon"), retry_after_s("-1"), retry_after_s("nan")
    (120.0, 0.0, 0.0, 0.0)
    """
    try:
        found = float(header)
    except ValueError:
        try:
            found = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return found if 0 <= found < math.inf else 0.0
