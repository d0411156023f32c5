"""Rewards of servers: `http` and `judge`, with rate limits, retries and limits on time and size."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache, partial
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import regex

from mcore_rl.config.checks import check_at_least, check_positive, read_secret
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import load_function
from mcore_rl.config.json_file import parse_json_object
from mcore_rl.data.thoughts import find_answer
from mcore_rl.rewards.processes import CallTimeoutError, call_in_thread, wait_within
from mcore_rl.rewards.registry import gives, register_reward, shorten_repr

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

# Sends an object as JSON, and returns the object in the answer.
Post = Callable[[Mapping[str, object]], Awaitable[dict[str, Any]]]

_PATTERN_S = 1.0  # per verdict; a regular expression may backtrack for years
_PARSER_S = 10.0  # per verdict, of a user's parser
_RANGE_END = re.compile(r"\s*(?:to|through|[-~\u2013\u2014]|\.{2,3})\s*(\d+(?:\.\d+)?)")
# Before a match: "Maximum score: 10" and "max_score": 10 are the scale.
_LIMIT = re.compile(
    r"\b(?:max(?:imum)?|min(?:imum)?|highest|lowest|perfect|possible)[\s*_.\"'-]*\Z", re.I
)
# Behind a number: what it is a part of, as in 4/5, 4 out of 5 and 80%.
_DENOMINATOR = re.compile(r"[\s*_]*+(?:(?:/|(?:out\s+)?of(?![a-z]))\s*(\d+(?:[.,]\d+)*)|(%))", re.I)
_MAX_LIMIT = 40  # characters before a match that are searched for a word of the scale
_URL_SETTINGS = "model", "api_key_env", "headers", "timeout_s", "requests_per_s"
_RESPONSE_FIELDS = ("prompt", "response")  # fields of a template that are no columns


class RemoteError(RuntimeError):
    """A request failed or was refused, or its answer cannot be read."""


class _RetryableError(RemoteError):
    """An error after which the request is repeated."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s  # by the header Retry-After


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """Settings of every reward that sends requests to a server."""

    url: str  # http or https
    headers: str = ""  # NAME=VARIABLE,...: headers from environment variables
    # limit of a request with its retries, without waiting for a slot; null: reward.timeout_s
    timeout_s: float | None = None
    retries: int = 3  # after failed connections and the statuses 429 and 500 to 599
    backoff_s: float = 0.5  # before the first retry; doubled each time, plus random jitter
    max_backoff_s: float = 30.0  # limit of the backoff and of Retry-After
    requests_per_s: float | None = None  # limit per rollout worker; null: none
    concurrent_requests: int = 16  # limit per rollout worker
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
        """URL of requests."""
        return self.url

    def secret_headers(self) -> dict[str, str]:
        """Read the headers from environment variables; ConfigError if one is missing."""
        pairs = [part.strip().split("=") for part in filter(None, self.headers.split(","))]
        return {name: read_secret("headers", variable) for name, variable in pairs}


class RemoteReward:
    """Client of the server of one reward. All calls are of one event loop."""

    def __init__(self, settings: RemoteSettings, limit_s: float) -> None:
        """Read the headers; `limit_s` is per request with its retries. Raises ConfigError."""
        import httpx  # 0.2 s
        from aiolimiter import AsyncLimiter

        self._settings, self._limit_s = settings, limit_s
        self._slots = asyncio.Semaphore(settings.concurrent_requests)
        rate = settings.requests_per_s
        self._rate = AsyncLimiter(1, 1 / rate) if rate is not None else None  # no bursts
        self._client = httpx.AsyncClient(
            headers={**settings.secret_headers(), "Accept-Encoding": "identity"},
            timeout=None,
            limits=httpx.Limits(max_connections=settings.concurrent_requests),
        )

    async def post(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Send a request; return the object in the answer.

        Raises:
            CallTimeoutError: after limit_s from the first try on.
            RemoteError: all tries failed, or the answer is a refusal, a redirect, too large, or no
                JSON object.
        """
        body = json.dumps(request).encode()
        async with self._slots:
            await self._wait_for_rate()
            try:
                return await wait_within(self._limit_s, self._send_with_retries(body))
            except _RetryableError as error:
                raise RemoteError(f"{error}, in {self._settings.retries + 1} tries") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _wait_for_rate(self) -> None:
        if self._rate is not None:
            await self._rate.acquire()

    async def _send_with_retries(self, body: bytes) -> dict[str, Any]:
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

        tries = AsyncRetrying(
            stop=stop_after_attempt(self._settings.retries + 1),
            wait=self._compute_wait_s,
            retry=retry_if_exception_type(_RetryableError),
            sleep=asyncio.sleep,
            reraise=True,
        )
        async for attempt in tries:
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    await self._wait_for_rate()
                return _parse(await self._send(body), self._settings.endpoint)
        raise AssertionError("the last try returns or raises")

    async def _send(self, body: bytes) -> bytes:
        import httpx

        url, limit = self._settings.endpoint, self._settings.max_answer_kb << 10
        headers, received = {"Content-Type": "application/json"}, bytearray()
        try:
            async with self._client.stream("POST", url, content=body, headers=headers) as answer:
                async for chunk in answer.aiter_raw():
                    received += chunk
                    if len(received) > limit:
                        raise RemoteError(
                            f"{url} answered with more than {limit >> 10} KiB (max_answer_kb)"
                        )
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise RemoteError(f"{url} cannot be asked: {error!r}") from error
        except httpx.TransportError as error:
            raise _RetryableError(f"{url} cannot be reached: {error!r}") from error
        _check_status(url, answer, bytes(received))
        return bytes(received)

    def _compute_wait_s(self, state: RetryCallState) -> float:
        from tenacity import wait_exponential_jitter

        initial_s, max_s = self._settings.backoff_s, self._settings.max_backoff_s
        backoff_s = wait_exponential_jitter(multiplier=initial_s, max=max_s, jitter=initial_s)(
            state
        )
        error = state.outcome.exception() if state.outcome else None
        retry_after_s = error.wait_s if isinstance(error, _RetryableError) else 0.0
        return max(backoff_s, min(retry_after_s, max_s))


def _parse(body: bytes, url: str) -> dict[str, Any]:
    try:
        return parse_json_object(body, f"the answer of {url}")
    except ConfigError as error:
        raise RemoteError(f"{error}: {shorten_repr(body[:200])}") from error


def _check_status(url: str, answer: httpx.Response, body: bytes) -> None:
    status = answer.status_code
    if 200 <= status < 300:
        return
    message = f"{url} answered {status}: {shorten_repr(body[:200])}"
    if status == 429 or status >= 500:
        raise _RetryableError(message, parse_retry_after(answer.headers.get("Retry-After", "")))
    if 300 <= status < 400:
        raise RemoteError(
            f"{url} leads to {shorten_repr(answer.headers.get('Location', ''))}: give that"
        )
    raise RemoteError(message)


def parse_retry_after(header: str) -> float:
    """Return the seconds of a header Retry-After, a number or a date; 0 if it is neither.

    >>> [parse_retry_after(header) for header in ("120", "soon", "-1", "nan")]
    [120.0, 0.0, 0.0, 0.0]
    """
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return seconds if 0 <= seconds < math.inf else 0.0


@dataclass(frozen=True, kw_only=True)
class HttpSettings(RemoteSettings):
    """Settings of `reward.name=http`."""

    batched: bool = False  # one request for all responses to a prompt, not one for each


@register_reward("http")
async def http(
    texts: Sequence[str],
    fields: Sequence[Mapping[str, Any]],
    finish_reasons: Sequence[str],
    num_tokens: Sequence[int],
    max_tokens: int,
    messages: Sequence[Sequence[Mapping[str, Any]]],
    turns: Sequence[Sequence[str]],
    turn_token_ids: Sequence[Sequence[Sequence[int]]],
    post: Post,
    settings: HttpSettings,
) -> Sequence[object]:
    """Post each response to a server, whose answer is the result of the reward.

    A request has text, fields, finish_reason, num_tokens, max_tokens, messages, turns and
    turn_token_ids. With `batched` it is {"responses": [such objects]}, and the answer
    {"results": [a result for each]}.
    """
    columns = {
        "text": texts,
        "fields": fields,
        "finish_reason": finish_reasons,
        "num_tokens": num_tokens,
        "max_tokens": [max_tokens] * len(texts),
        "messages": messages,
        "turns": turns,
        "turn_token_ids": turn_token_ids,
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if not settings.batched:
        return await asyncio.gather(*map(post, rows), return_exceptions=True)
    results = (await post({"responses": rows})).get("results")
    if not isinstance(results, list) or len(results) != len(rows):
        raise RemoteError(
            f"{settings.url} answered {shorten_repr(results)} as 'results' of {len(rows)} "
            "responses; allowed: a list of as many objects"
        )
    return results


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(RemoteSettings):
    """Settings of `reward.name=judge`; `url` is that of the API, such as http://HOST:8000/v1."""

    url: str = ""
    served_by: str = ""  # instead of url: a frozen model of the run, by its name in `models`
    model: str = ""  # name of the model at `url`
    api_key_env: str = ""  # environment variable with the key; empty: none
    template: str = ""  # the judge's prompt, with {prompt}, {response} and {COLUMN}
    template_file: str = ""  # or a file with the template
    # Python's re with one group: the last match in a verdict is the score. A number that begins a
    # range, as in "Score: 0 to 10", is the scale and no score, as is a "Maximum score: 10".
    pattern: str = (
        r"""(?i:score)[\s*]*+(?:\([^()]*\))?["'\s:*=]*+(-?\d+(?:[.,]\d+)*(?:[eE][+-]?\d+)?)"""
    )
    labels: str = ""  # LABEL=SCORE,...: scores of the group if it is no number
    parser: str = ""  # instead of both: import path of a function of a verdict
    low: float = 0.0  # least score, a reward of 0
    high: float = 1.0  # largest score, a reward of 1
    temperature: float = 0.0  # of the judge
    max_tokens: int = 1024  # per verdict
    votes: int = 1  # verdicts per response; the reward is their mean

    def __post_init__(self) -> None:
        self._check_server()
        check_at_least("temperature", self.temperature, 0)
        check_at_least("max_tokens", self.max_tokens, 1)
        check_at_least("votes", self.votes, 1)
        check_positive("high-low", self.high - self.low)
        if self.votes > 1 and not self.temperature:
            raise ConfigError(f"votes={self.votes} with temperature=0: all would be the same")
        if bool(self.template) == bool(self.template_file):
            raise ConfigError("template='' and template_file=''; allowed: one of them, not both")
        if self.parser and self.labels:
            raise ConfigError(f"labels={self.labels!r} is of pattern, and there is a parser")
        _check_pattern(self.pattern)
        for label, score in _parse_labels(self.labels).items():
            if not self.low <= score <= self.high:
                raise ConfigError(f"labels: {label}={score}; allowed: {self.low} to {self.high}")
        if self.parser:
            load_function("parser", self.parser)
        list_template_fields(self)

    def _check_server(self) -> None:
        if bool(self.url) == bool(self.served_by):
            raise ConfigError(
                f"url={self.url!r} and served_by={self.served_by!r}; allowed: one of them"
            )
        if not self.served_by:
            super().__post_init__()
            if not self.model:
                raise ConfigError("model=''; allowed: what the server at url calls the judge")
            return
        for name in _URL_SETTINGS:
            if getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is of a server at url; models.{self.served_by}"
                    " has what its own servers need"
                )

    @property
    def endpoint(self) -> str:
        """URL of requests; models.NAME for a model of the run."""
        if self.served_by:
            return f"models.{self.served_by}"
        return f"{self.url.rstrip('/')}/chat/completions"

    def secret_headers(self) -> dict[str, str]:
        """Read the headers and the bearer token from environment variables."""
        headers = super().secret_headers()
        if self.api_key_env:
            key = read_secret("api_key_env", self.api_key_env)
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def check_columns(self, key: str, columns: Collection[str]) -> None:
        """Raise ConfigError if the template names a column that the data lacks."""
        for name in list_template_fields(self):
            if name not in (*_RESPONSE_FIELDS, *columns):
                allowed = ", ".join([*_RESPONSE_FIELDS, *sorted(columns)])
                raise ConfigError(f"{key}.template has {{{name}}}; allowed: {allowed}")


@register_reward("judge")
@gives("parsed")
async def judge(
    text: str,
    fields: Mapping[str, Any],
    finish_reason: str,
    messages: Sequence[Mapping[str, Any]],
    post: Post,
    settings: JudgeSettings,
) -> dict[str, float]:
    """Ask a model for verdicts: their mean score, scaled from 0 at `low` to 1 at `high`.

    Verdicts without a score, or with one beyond these bounds, are left out of the mean; `parsed` is
    the share of the rest. Raises RemoteError if none is left.
    """
    values = {**fields, "prompt": format_prompt(messages), "response": text}
    request = {
        "model": settings.model,
        "messages": [{"role": "user", "content": read_template(settings).format_map(values)}],
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        "n": settings.votes,
    }
    verdicts = [*map(find_answer, _list_verdicts(await post(request), settings))]
    results = [await _read_score(verdict, settings) for verdict in verdicts]
    scores = [score for score in results if score is not None]
    if not scores:
        raise RemoteError(
            f"no score from {settings.low} to {settings.high} in {shorten_repr(verdicts)}"
        )
    mean = sum(scores) / len(scores)
    scaled = (mean - settings.low) / (settings.high - settings.low)
    return {"reward": scaled, "parsed": len(scores) / len(verdicts)}


async def _read_score(verdict: str, settings: JudgeSettings) -> float | None:
    """Score a verdict in a thread; RemoteError if that takes too long."""
    try:
        return await wait_within(
            _PARSER_S, call_in_thread(partial(_score_verdict, verdict, settings))
        )
    except CallTimeoutError as error:
        raise RemoteError(f"to read the verdict {shorten_repr(verdict)} {error}") from error


def format_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """Format a prompt: a single message without its role, several with theirs."""
    contents = [(message["role"], message.get("content") or "") for message in messages]
    if not all(isinstance(content, str) for _, content in contents):
        raise ValueError(f"the prompt has a message that is no text: {shorten_repr(messages)}")
    if len(contents) == 1:
        return str(contents[0][1])
    return "\n\n".join(f"{role}: {content}" for role, content in contents)


@cache
def read_template(settings: JudgeSettings) -> str:
    """Return the template; ConfigError if its file cannot be read."""
    if settings.template:
        return settings.template
    try:
        return Path(settings.template_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template_file={settings.template_file!r}: {error}") from error


def list_template_fields(settings: JudgeSettings) -> list[str]:
    """Return the names in braces; ConfigError for a brace with anything else."""
    template = read_template(settings)
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"template: {error}; a brace of the text is doubled") from error
    parts = [part for part in parts if part[1] is not None]
    for _, name, form, conversion in parts:
        if not name or form or conversion or any(mark in name for mark in ".[]"):
            raise ConfigError(
                f"template has the field {name!r}; allowed: a name in braces; a brace of the text "
                "is doubled"
            )
    names = [str(name) for _, name, _, _ in parts]
    if "response" not in names:
        raise ConfigError("template has no {response}, so the judge would not see it")
    return names


def _check_pattern(pattern: str) -> None:
    try:
        groups = regex.compile(pattern).groups
    except regex.error as error:
        raise ConfigError(f"pattern={pattern!r}: {error}") from error
    if groups != 1:
        raise ConfigError(f"pattern={pattern!r} has {groups} groups; allowed: one")


def _parse_labels(labels: str) -> dict[str, float]:
    """Parse the score of each label, in lower case."""
    try:
        pairs = [part.rsplit("=", 1) for part in filter(None, labels.split(","))]
        return {label.strip().casefold(): float(score) for label, score in pairs}
    except ValueError as error:
        raise ConfigError(
            f"labels={labels!r}; allowed: LABEL=SCORE, with commas between, such as yes=1, no=0"
        ) from error


def _list_verdicts(answer: Mapping[str, Any], settings: JudgeSettings) -> list[str]:
    try:
        verdicts = [choice["message"]["content"] or "" for choice in answer["choices"]]
    except (KeyError, TypeError) as error:
        raise RemoteError(
            f"{settings.endpoint} answered {shorten_repr(answer)}: {error!r}"
        ) from error
    if len(verdicts) != settings.votes or not all(isinstance(verdict, str) for verdict in verdicts):
        raise RemoteError(
            f"{settings.endpoint} answered {shorten_repr(verdicts)}; asked for: {settings.votes} "
            "texts (n)"
        )
    return verdicts


def _score_verdict(verdict: str, settings: JudgeSettings) -> float | None:
    """Return the score of a verdict; None without one from `low` to `high`."""
    if settings.parser:
        score = load_function("parser", settings.parser)(verdict)
    else:
        compiled = regex.compile(settings.pattern)
        matches = compiled.finditer(verdict, timeout=_PATTERN_S, concurrent=True)
        scores = [m for m in matches if settings.labels or not _is_scale(m)]
        score = _read_match(scores[-1], settings) if scores else None
    if score is None:
        return None
    return float(score) if settings.low <= score <= settings.high else None  # false for NaN


def _is_scale(match: regex.Match[str]) -> bool:
    """Return whether a match begins a range, or is the largest or least score."""
    end = _RANGE_END.match(match.string, max(match.end(1), 0))
    start = _parse_number(match[1] or "")
    is_range = end is not None and start is not None and start < float(end[1])
    before = match.string[max(0, match.start() - _MAX_LIMIT) : match.start()]
    return is_range or _LIMIT.search(before) is not None


def _read_match(match: regex.Match[str], settings: JudgeSettings) -> float | None:
    """Return the score of a match: that of a label, a number, or a fraction."""
    text = match[1] or ""
    if settings.labels:
        return _parse_labels(settings.labels).get(text.strip().casefold())
    score, part = _parse_number(text), _DENOMINATOR.match(match.string, max(match.end(1), 0))
    if score is None or part is None:
        return score
    denominator = 100.0 if part[2] else _parse_number(part[1])
    if denominator is None or denominator == settings.high:
        return score
    # 4/5 on a scale from 0 to 10 is 8; on another scale the judge has used its own.
    return score / denominator * settings.high if denominator > 0 and settings.low == 0 else None


def _parse_number(text: str) -> float | None:
    """Return a number with a decimal point or comma, or with thousands separators.

    >>> [_parse_number(text) for text in ("7,5", "8,000", "0,500", "1e1", "3,4,5")]
    [7.5, 8000.0, 0.5, 10.0, None]
    """
    if re.fullmatch(r"-?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return None
