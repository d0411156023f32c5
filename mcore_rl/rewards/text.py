"""Rewards for the form of a response, or for a text in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.latex import find_last_boxed
from mcore_rl.rewards.registry import (
    FindAnswer,
    build_answer_error,
    format_answer,
    get_answer,
    gives,
    reads_answer,
    register_reward,
    run_in_process,
    with_answers,
)

_MATH_MARK = re.compile(r"\\?\$|\\[()\[\]]")  # delimiters of mathematics


@dataclass(frozen=True)
class FormatSettings:
    """Settings of `reward.name=format`."""

    tags: str = "think,answer"  # tags of the response, in this order

    def __post_init__(self) -> None:
        if not all(re.fullmatch("[A-Za-z_][A-Za-z0-9_-]*", tag) for tag in self.names):
            raise ConfigError(f"tags={self.tags!r}; allowed: names with commas between them")

    @property
    def names(self) -> list[str]:
        """Names of the tags."""
        return [tag.strip() for tag in self.tags.split(",")]


@dataclass(frozen=True)
class PatternSettings:
    """Settings of `reward.name=pattern`."""

    pattern: str  # Python's re, to match the whole response; . matches a line break, too
    timeout_s: float = 1.0  # per response; a longer match counts as none

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"pattern={self.pattern!r}: {error}") from error


@dataclass(frozen=True)
class ChoiceSettings:
    """Settings of `reward.name=choice`."""

    letters: str = "ABCD"  # letters of the choices

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z]{2,}", self.letters):
            raise ConfigError(f"letters={self.letters!r}; allowed: two or more of A to Z")


@dataclass(frozen=True)
class SubstringSettings:
    """Settings of `reward.name=substring`."""

    ignore_case: bool = True  # paris is Paris
    whole_words: bool = True  # 12 is not in 123


@register_reward("format")
@gives()
def check_tags(
    text: str,
    fields: Mapping[str, Any],
    finish_reason: str,
    settings: FormatSettings,
    turns: Sequence[str] = (),
    prompt_end: str = "",
) -> dict[str, float]:
    """Return 1.0 if the response consists of the tags, each once, with any text in them.

    With tags=think,answer: <think>...</think><answer>...</answer>, with blanks or line breaks
    around them. The chat template may have opened the first tag at the end of the prompt, or also
    closed it. The response, or the last turn of an agent, is checked with its thoughts, and
    without.
    """
    first = settings.names[0]
    opened = re.search(rf"<{first}>(\s*</{first}>)?\s*\Z", prompt_end)
    prefixes = [opened[0]] if opened else [""]
    if opened and opened[1]:
        prefixes.append("")  # thoughts that the prompt has closed may begin again
    bodies = [prefix + body for prefix in prefixes for body in (text, *turns[-1:])]
    return {"reward": float(any(_has_tags(body, settings.names) for body in bodies))}


def _has_tags(text: str, tags: Sequence[str]) -> bool:
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
@run_in_process(unchecked={"reward": 0.0, "unchecked": 1.0})
def match_pattern(
    text: str,
    fields: Mapping[str, Any],
    finish_reason: str,
    settings: PatternSettings,
    turns: Sequence[str] = (),
) -> dict[str, float]:
    """Return 1.0 if the whole response, or last turn, matches a regular expression.

    With its thoughts. `unchecked` is 1.0 if the match took longer than timeout_s: an expression may backtrack for
    years.
    """
    matched = re.fullmatch(settings.pattern, turns[-1] if turns else text, re.DOTALL)
    return {"reward": float(matched is not None), "unchecked": 0.0}


def _build_letter_finder(settings: ChoiceSettings) -> FindAnswer:
    # Possessive, because backtracking over many stars takes cubic time and blocks the event loop.
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


def _parse_letter(answer: object, settings: ChoiceSettings) -> str:
    letter = format_answer(answer, "choice").strip().strip("().").upper()
    if letter not in list(settings.letters):
        raise build_answer_error(answer, "choice", f"one of {', '.join(settings.letters)}")
    return letter


@register_reward("choice")
@reads_answer(_parse_letter)
@gives("answered")
@with_answers(_build_letter_finder)
def choice(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: ChoiceSettings
) -> dict[str, float]:
    """Return 1.0 if the response chooses the letter in the field `answer`; `answered`: any letter.

    The choice is the content of the last \\boxed{}; else the last letter after "answer", with at
    most "is", ":" and marks between; else the response, if it is a letter only. (B), B. and **B**
    are B. Raises ConfigError if the field is none of the letters.
    """
    answer = _parse_letter(get_answer(fields, "choice"), settings)
    letter = _build_letter_finder(settings)(text, finish_reason)
    return {"reward": float(letter == answer), "answered": float(letter is not None)}


def _normalize_answer(answer: object, settings: SubstringSettings | None = None) -> str:
    text = " ".join(format_answer(answer, "substring").split())
    if not text:
        raise build_answer_error(answer, "substring", "a text")
    return text


@register_reward("substring")
@reads_answer(_normalize_answer)
@gives()
def substring(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: SubstringSettings
) -> dict[str, float]:
    """Return 1.0 if the response contains the text in `answer`; line breaks count as blanks.

    Raises ConfigError if the field is empty.
    """
    answer, response = _normalize_answer(get_answer(fields, "substring")), " ".join(text.split())
    if settings.ignore_case:
        answer, response = answer.casefold(), response.casefold()
    edges = (r"(?<!\w)", r"(?!\w)") if settings.whole_words else ("", "")
    return {"reward": float(re.search(re.escape(answer).join(edges), response) is not None)}
