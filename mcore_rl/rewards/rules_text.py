"""Rewards that look at the form of a response, or for a text in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.latex import last_boxed
from mcore_rl.rewards.base import (
    FindAnswer,
    answer_of,
    gives,
    in_process,
    register_reward,
    with_answers,
)


@dataclass(frozen=True)
class FormatSettings:
    """Settings of `reward.name=format`."""

    tags: str = "think,answer"  # that the response has to be made of, in this order

    def __post_init__(self) -> None:
        if not all(re.fullmatch("[A-Za-z_][A-Za-z0-9_-]*", tag) for tag in self.names):
            raise ConfigError(f"tags={self.tags!r}; allowed: names with commas between them")

    @property
    def names(self) -> list[str]:
        return [tag.strip() for tag in self.tags.split(",")]


@dataclass(frozen=True)
class PatternSettings:
    """Settings of `reward.name=pattern`."""

    pattern: str  # Python's re, which the whole response has to match; . is a line break, too
    timeout_s: float = 1.0  # for one response; one that takes longer does not match

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"pattern={self.pattern!r}: {error}") from error


@dataclass(frozen=True)
class ChoiceSettings:
    """Settings of `reward.name=choice`."""

    letters: str = "ABCD"  # of the choices

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z]{2,}", self.letters):
            raise ConfigError(f"letters={self.letters!r}; allowed: two or more of A to Z")


@dataclass(frozen=True)
class SubstringSettings:
    """Settings of `reward.name=substring`."""

    ignore_case: bool = True  # whether Paris and paris are the same
    whole_words: bool = True  # whether 12 is not in 123


@register_reward("format")
@gives()
def format_of_tags(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: FormatSettings
) -> dict[str, float]:
    """1.0 if the response is made of the tags, each once, with anything inside but these tags.

    With tags=think,answer: <think>...</think><answer>...</answer>, and blanks or line breaks around
    them.
    """
    rest = text
    for tag in settings.names:
        rest = rest.lstrip()
        if not rest.startswith(f"<{tag}>"):
            return {"reward": 0.0}
        inside, found, rest = rest[len(tag) + 2 :].partition(f"</{tag}>")
        marks = [f"<{slash}{name}>" for name in settings.names for slash in ("", "/")]
        if not found or any(mark in inside for mark in marks):
            return {"reward": 0.0}
    return {"reward": float(not rest.strip())}


@register_reward("pattern")
@gives("unchecked")
@in_process(unchecked={"reward": 0.0, "unchecked": 1.0})
def matches_pattern(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: PatternSettings
) -> dict[str, float]:
    """1.0 if the whole response matches a regular expression.

    `unchecked` is 1.0 where the match took longer than timeout_s: there are expressions for which
    it takes years.
    """
    matched = re.fullmatch(settings.pattern, text, re.DOTALL)
    return {"reward": float(matched is not None), "unchecked": 0.0}


def _chosen_letters(settings: ChoiceSettings) -> FindAnswer:
    # Possessive: a response of many stars would take its length cubed, and the server waits.
    letter = rf"[\s*_(\[]*+([{settings.letters}])(?![A-Za-z0-9'])"
    # At the start only, for the same reason.
    styled = re.compile(r"\A([\s*_(\[]*+[A-Z]?)\\(?:text|mathrm|textbf)\{(.*)\}")

    def find(text: str, finish_reason: str) -> str | None:
        boxed = last_boxed(text)
        if boxed is not None:
            found = re.findall(rf"\A{letter}", styled.sub(r"\1\2", boxed))
        else:
            found = re.findall(rf"(?i:answer)[*_]*+(?:\s++(?i:is))?[*_]*+:?{letter}", text)
            found = found or re.findall(rf"\A{letter}[\s*_)\].]*\Z", text)
        return found[-1] if found else None

    return find


@register_reward("choice")
@gives("answered")
@with_answers(_chosen_letters)
def choice(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: ChoiceSettings
) -> dict[str, float]:
    """1.0 if the response chooses the letter in the field `answer`; `answered`: if any.

    Its choice is what is in its last \\boxed{}; else the last letter after "answer" and at most
    "is", ":" and marks around it; else the response, if that is a letter only. (B), B. and **B**
    are B. Raises ConfigError if the answer is none of the letters.
    """
    answer = answer_of(fields, "choice").strip().strip("().").upper()
    if answer not in list(settings.letters):
        raise ConfigError(
            f"data.answer_column has {answer!r}; allowed with reward.name='choice': one of "
            f"{', '.join(settings.letters)}"
        )
    found = _chosen_letters(settings)(text, finish_reason)
    return {"reward": float(found == answer), "answered": float(found is not None)}


@register_reward("substring")
@gives()
def substring(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: SubstringSettings
) -> dict[str, float]:
    """1.0 if the text in the field `answer` is in the response; line breaks count as blanks.

    Raises ConfigError if the field is empty: that is in every text.
    """
    answer, response = (" ".join(part.split()) for part in (answer_of(fields, "substring"), text))
    if not answer:
        raise ConfigError("data.answer_column has ''; allowed with reward.name='substring': a text")
    if settings.ignore_case:
        answer, response = answer.casefold(), response.casefold()
    edges = (r"(?<!\w)", r"(?!\w)") if settings.whole_words else ("", "")
    return {"reward": float(re.search(re.escape(answer).join(edges), response) is not None)}
