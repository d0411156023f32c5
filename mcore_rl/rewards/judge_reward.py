"""The reward `judge`: a model behind a chat-completions server says what a response is worth."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from string import Formatter
from typing import Any

import regex

from mcore_rl.config.checks import check_at_least, check_positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import load_function
from mcore_rl.rewards.base import gives, register_reward, shown
from mcore_rl.rewards.processes import TooLateError, within
from mcore_rl.rewards.remote import Post, RemoteError, RemoteSettings, variable_value
from mcore_rl.rewards.threads import called_in_thread

_PATTERN_S = 1.0  # for one verdict: there are expressions for which it takes years
_PARSER_S = 10.0  # for one verdict, by a function of a user
_RANGE_END = re.compile(r"\s*(?:to|through|[-~\u2013\u2014]|\.{2,3})\s*(\d+(?:\.\d+)?)")
_OF_URL = "model", "api_key_env", "headers", "timeout_s", "requests_per_s"
_OF_RESPONSE = ("prompt", "response")  # fields of a template that are no column


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(RemoteSettings):
    """Settings of `reward.name=judge`; `url` is that of the API, such as http://HOST:8000/v1."""

    url: str = ""
    served_by: str = ""  # in its place, a frozen model of the run: a name of `models`
    model: str = ""  # as the server at `url` calls it
    api_key_env: str = ""  # the environment variable with the key; empty: none
    template: str = ""  # what the judge is asked, with {prompt}, {response} and {COLUMN} in it
    template_file: str = ""  # or the file with it
    # Python's re, with one group: the last match in a verdict has the score. A number that begins
    # a range, as in "Score: 0 to 10", is the scale and no score.
    pattern: str = r"""(?i:score)[\s*]*+(?:\([^()]*\))?["'\s:*=]*+(-?\d+(?:\.\d+)?)"""
    labels: str = ""  # LABEL=SCORE, with commas between: what the group is, where it is no number
    parser: str = ""  # in place of both, the import path of a function of a verdict
    low: float = 0.0  # the score that is a reward of 0; no score is below it
    high: float = 1.0  # the score that is a reward of 1; no score is above it
    temperature: float = 0.0  # of the judge
    max_tokens: int = 1024  # of one verdict
    votes: int = 1  # verdicts on one response; the reward is their mean

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
        for label, score in _scores_of(self.labels).items():
            if not self.low <= score <= self.high:
                raise ConfigError(f"labels: {label}={score}; allowed: {self.low} to {self.high}")
        if self.parser:
            load_function("parser", self.parser)
        template_fields(self)

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
        for name in _OF_URL:
            if getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is of a server at url; models.{self.served_by}"
                    " has what its own servers need"
                )

    @property
    def endpoint(self) -> str:
        if self.served_by:
            return f"models.{self.served_by}"
        return f"{self.url.rstrip('/')}/chat/completions"

    def secret_headers(self) -> dict[str, str]:
        found = super().secret_headers()
        if self.api_key_env:
            key = variable_value("api_key_env", self.api_key_env)
            found["Authorization"] = f"Bearer {key}"
        return found

    def check_columns(self, key: str, columns: Collection[str]) -> None:
        """Raises ConfigError where the template names a column that the data lacks."""
        for name in template_fields(self):
            if name not in (*_OF_RESPONSE, *columns):
                allowed = ", ".join([*_OF_RESPONSE, *sorted(columns)])
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
    """The mean score of the votes, from 0 at `low` to 1 at `high`; `parsed`: the share with one.

    A verdict without a score, or with one beyond these bounds, is left out of the mean. Raises
    RemoteError where all are.
    """
    values = {**fields, "prompt": prompt_text(messages), "response": text}
    asked = {
        "model": settings.model,
        "messages": [{"role": "user", "content": template_of(settings).format_map(values)}],
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        "n": settings.votes,
    }
    verdicts = _verdicts(await post(asked), settings)
    scores = [await _read(verdict, settings) for verdict in verdicts]
    found = [score for score in scores if score is not None]
    if not found:
        raise RemoteError(f"no score from {settings.low} to {settings.high} in {shown(verdicts)}")
    mean = sum(found) / len(found)
    scaled = (mean - settings.low) / (settings.high - settings.low)
    return {"reward": scaled, "parsed": len(found) / len(verdicts)}


async def _read(verdict: str, settings: JudgeSettings) -> float | None:
    """Its score, found in a thread; RemoteError where that takes too long."""
    try:
        return await within(_PARSER_S, called_in_thread(partial(_score, verdict, settings)))
    except TooLateError as error:
        raise RemoteError(f"to read the verdict {shown(verdict)} {error}") from error


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the prompt says: one message without its role, several each with it."""
    contents = [(message["role"], message.get("content") or "") for message in messages]
    if not all(isinstance(content, str) for _, content in contents):
        raise ValueError(f"the prompt has a message that is no text: {shown(messages)}")
    if len(contents) == 1:
        return str(contents[0][1])
    return "\n\n".join(f"{role}: {content}" for role, content in contents)


@cache
def template_of(settings: JudgeSettings) -> str:
    """Raises ConfigError where its file cannot be read."""
    if settings.template:
        return settings.template
    try:
        return Path(settings.template_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template_file={settings.template_file!r}: {error}") from error


def template_fields(settings: JudgeSettings) -> list[str]:
    """The names in braces; ConfigError where there is more than a name in them."""
    template = template_of(settings)
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"template: {error}; a brace of the text is doubled") from error
    found = [part for part in parts if part[1] is not None]
    for _, name, form, conversion in found:
        if not name or form or conversion or any(mark in name for mark in ".[]"):
            raise ConfigError(
                f"template has the field {name!r}; allowed: a name in braces; a brace of the text "
                "is doubled"
            )
    names = [str(name) for _, name, _, _ in found]
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


def _scores_of(labels: str) -> dict[str, float]:
    """The score of each label, in small letters."""
    try:
        pairs = [part.rsplit("=", 1) for part in filter(None, labels.split(","))]
        return {label.strip().casefold(): float(score) for label, score in pairs}
    except ValueError as error:
        raise ConfigError(
            f"labels={labels!r}; allowed: LABEL=SCORE, with commas between, such as yes=1, no=0"
        ) from error


def _verdicts(answer: Mapping[str, Any], settings: JudgeSettings) -> list[str]:
    try:
        found = [choice["message"]["content"] or "" for choice in answer["choices"]]
    except (KeyError, TypeError) as error:
        raise RemoteError(f"{settings.endpoint} answered {shown(answer)}: {error!r}") from error
    if len(found) != settings.votes or not all(isinstance(verdict, str) for verdict in found):
        raise RemoteError(
            f"{settings.endpoint} answered {shown(found)}; asked for: {settings.votes} texts (n)"
        )
    return found


def _score(verdict: str, settings: JudgeSettings) -> float | None:
    """Of one verdict; None without one from `low` to `high`."""
    if settings.parser:
        found = load_function("parser", settings.parser)(verdict)
    else:
        compiled = regex.compile(settings.pattern)
        matches = compiled.finditer(verdict, timeout=_PATTERN_S, concurrent=True)
        groups = [match[1] or "" for match in matches if not _begins_range(match)]
        found = _number(groups[-1], settings.labels) if groups else None
    if found is None:
        return None
    return float(found) if settings.low <= found <= settings.high else None  # false for NaN


def _begins_range(match: regex.Match[str]) -> bool:
    end = _RANGE_END.match(match.string, max(match.end(1), 0))
    start = _number(match[1] or "", "")
    return end is not None and start is not None and start < float(end[1])


def _number(text: str, labels: str) -> float | None:
    if labels:
        return _scores_of(labels).get(text.strip().casefold())
    try:
        return float(text)
    except ValueError:
        return None
