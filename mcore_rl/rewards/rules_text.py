"""Rewards that look at the form of a response, or for a text in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.latex import find_last_boxed
from mcore_rl.rewards.base import (
    FindAnswer,
    answer_of,
    answer_text,
    gives,
    in_process,
    reads_answer,
    register_reward,
    with_answers,
    wrong_answer,
)

_MATH_MARK = re.compile(r"\\?\$|\\[()\[\]]")  # where mathematics begins and ends in a text


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
    text: str,
    fields: Mapping[str, Any],
    finish_reason: str,
    settings: FormatSettings,
    turns: Sequence[str] = (),
    prompt_end: str = "",
) -> dict[str, float]:
    """1.0 if the response is made of the tags, each once, with anything inside but these tags.

    With tags=think,answer: <think>...</think><answer>...</answer>, and blanks or line breaks around
    them. A first tag that the chat template has opened at the end of the prompt counts. Of an agent
    it is the last turn, with its reasoning or without.
    """
    first = f"<{settings.names[0]}>"
    opened = first if prompt_end.rstrip().endswith(first) else ""
    bodies = text, *turns[-1:]
    return {"reward": float(any(_has_form(opened + body, settings.names) for body in bodies))}


def _has_form(text: str, tags: Sequence[str]) -> bool:
    rest = text
    marks = [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]
    for tag in tags:
        rest = rest.lstrip()
        if not rest.startswith(f"<{tag}>"):
            return False
        inside, end, rest = rest[len(tag) + 2 :].partition(f"</{tag}>")
        if not end or any(mark in inside for mark in marks):
            return False
    return not rest.strip()


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
    style = r"[\s*_(\[]*+(?:\\(?:text|mathrm|mathbf|textbf|boldsymbol)\{[\s*_(\[]*+)?"
    letter = rf"{style}([{settings.letters}])(?![A-Za-z0-9']|\\text\{{[A-Za-z0-9])"

    def find(text: str, finish_reason: str) -> str | None:
        boxed = find_last_boxed(text)
        plain = _MATH_MARK.sub(" ", text if boxed is None else boxed)
        if boxed is not None:
            letters = re.findall(rf"\A{letter}", plain)
        else:
            letters = re.findall(rf"(?i:answer)[*_]*+(?:\s++(?i:is))?[*_]*+:?{letter}", plain)
            letters = letters or re.findall(rf"\A{letter}[\s*_)}}\].]*\Z", plain)
        return letters[-1] if letters else None

    return find


def _right_letter(answer: object, settings: ChoiceSettings) -> str:
    letter = answer_text(answer, "choice").strip().strip("().").upper()
    if letter not in list(settings.letters):
        raise wrong_answer(answer, "choice", f"one of {', '.join(settings.letters)}")
    return letter


@register_reward("choice")
@reads_answer(_right_letter)
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
    answer = _right_letter(answer_of(fields, "choice"), settings)
    letter = _chosen_letters(settings)(text, finish_reason)
    return {"reward": float(letter == answer), "answered": float(letter is not None)}


def _wanted_text(answer: object, settings: SubstringSettings | None = None) -> str:
    text = " ".join(answer_text(answer, "substring").split())
    if not text:
        raise wrong_answer(answer, "substring", "a text")
    return text


@register_reward("substring")
@reads_answer(_wanted_text)
@gives()
def substring(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: SubstringSettings
) -> dict[str, float]:
    """1.0 if the text in the field `answer` is in the response; line breaks count as blanks.

    Raises ConfigError if the field is empty: that is in every text.
    """
    answer, response = _wanted_text(answer_of(fields, "substring")), " ".join(text.split())
    if settings.ignore_case:
        answer, response = answer.casefold(), response.casefold()
    edges = (r"(?<!\w)", r"(?!\w)") if settings.whole_words else ("", "")
    return {"reward": float(re.search(re.escape(answer).join(edges), response) is not None)}
