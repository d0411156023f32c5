"""Rewards for the form of a response, or for a text in it."""

from __future__ import annotations

import functools
import re
import unicodedata
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

    It is matched with its thoughts. `unchecked` is 1.0 if the match took longer than timeout_s: an
    expression may backtrack for years.
    """
    matched = re.fullmatch(settings.pattern, turns[-1] if turns else text, re.DOTALL)
    return {"reward": float(matched is not None), "unchecked": 0.0}


_QUOTES_AND_DASHES = str.maketrans(
    dict.fromkeys("\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}", "'")
    | dict.fromkeys("\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}\xab\xbb", '"')
    | dict.fromkeys("\N{EN DASH}\N{EM DASH}\N{RIGHTWARDS ARROW}", "-")
)
# Patterns of `choice`, without regard to case. Possessive, because backtracking over many stars
# takes cubic time and blocks the event loop.
_OPENS = r"[\s*_(\[{\"'`]*+"
_CLOSES = r"[\s*_)\]}\"'`.:]*+"
_NAME = (
    r"(?:(?:the\s++)?(?:(?:correct|right|best)\s++)?(?:option|choice|letter)(?![a-z])[\s*_:]*+)?+"
)
_LEADS = (
    r"(?:answer|(?:correct|right|best|final)\s++(?:option|choice)|答案)(?![a-z])[\s*_\"')\]]*+"
    r"(?:(?:to|for)\s++(?:the|this)\s++(?:question|problem)\s++)?+"
)
_IS = (
    r"(?:(?:is|(?:would|should|must|will)\s++be)(?![a-z])[\s*_]*+"
    r"(?:(?:therefore|thus|hence|clearly|definitely|indeed)(?![a-z])[\s,]*+)?+:?|"
    r"[:=]++|-++>?|[是为选]:?)"
)
# Words that may follow a letter; before others "a" and "I" are words of a sentence.
_CONTINUES = (
    r"(?:because|since|as|is|and|or|which|due|given|for|with|by|from|based|in|on|that|while|not|"
    r"but|if|when|so|according)(?![a-z])"
)
_HEDGE = r"(?:(?:possibly|maybe|perhaps|also|even)(?![a-z])\s*+)?+"
_NO_CLAUSE = r"(?!\s++(?:is|was|does|has|can|would)(?![a-z]))"
_MACRO = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathsf|mathit|mathtt|boldsymbol|"
    r"operatorname)\s*\{"
)
_MATH_MARK = re.compile(r"\\?\$|\\[()\[\] ,;:!]|~|\\q?quad(?![A-Za-z])")  # and blanks of LaTeX


@functools.cache
def _build_letter_finder(settings: ChoiceSettings) -> FindAnswer:
    """Find the letter that a response chooses; none if it chooses several."""
    upper, lower = settings.letters, settings.letters.lower()
    # No word, formula, possessive or abbreviation: AB, A_1, A + B, A's, A-level, A.I.
    is_longer = (
        r"[a-z0-9+#^]|_[a-z0-9]|['-][a-z0-9]|\.[a-z0-9](?![a-z])|\s*+[+^=<>]\s*+[a-z0-9(\\]|"
        rf"\s*+\\[a-z]|(?-i:(?<=[{lower}AI]))[ \t]++(?!{_CONTINUES})[a-z]"
    )
    begin = f"{_OPENS}{_NAME}{_OPENS}"
    letter = rf"{begin}([{upper}])(?!{is_longer})"
    statement = rf"{_LEADS}(?:{_IS}{letter}|{letter}(?=[*_)\].]*+[ \t]*+(?:\n|\Z)))"
    another = rf"{begin}(?:(?-i:[{upper}])(?![a-z0-9'])|[{upper}](?=[\W_]*+(?:\n|\Z)))"
    is_list = rf"{_CLOSES}(?:\Z|\n|[,;/&|]|(?:or|and|are|both)(?![a-z]))"
    is_refuted = r"[^\n.]*\b(?:wrong|incorrect|false)\b"
    several = (
        r"[,;]?\s*+\(?(?:(?:and/or|or|versus|vs\.?)(?![a-z])|\\?&|[/|])[\s,}]*+"
        rf"{_HEDGE}{another}",
        rf"[,;]?\s*+and(?![a-z])[\s}}]*+{_HEDGE}{another}{_NO_CLAUSE}",
        rf"(?:[,;]|(?<=[^.:\s][ \t]))\s*+{another}(?={is_list})(?!{is_refuted})",
    )
    patterns = letter, rf"{letter}{_CLOSES}\Z", statement, rf"{_CLOSES}(?:{'|'.join(several)})"
    first_pattern, only_pattern, statement_pattern, several_pattern = (
        re.compile(pattern, re.IGNORECASE) for pattern in patterns
    )

    def find(text: str, finish_reason: str) -> str | None:
        boxed = find_last_boxed(text)
        marked = _find_last_tagged(text) if boxed is None else boxed
        plain = unicodedata.normalize("NFKC", text if marked is None else marked)
        plain = plain.translate(_QUOTES_AND_DASHES)
        plain = _MATH_MARK.sub(" ", _MACRO.sub("", plain))
        choices = [] if boxed is not None else list(statement_pattern.finditer(plain))
        start = only_pattern if marked is None else first_pattern
        match = choices[-1] if choices else start.match(plain)
        if match is None or several_pattern.match(plain, match.end(match.lastindex or 1)):
            return None
        return match[match.lastindex or 1].upper()

    return find


def _find_last_tagged(text: str) -> str | None:
    """Return the content of the last <answer></answer>."""
    _, begin, content = text.rpartition("</answer>")[0].rpartition("<answer>")
    return content if begin else None


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

    The choice is the content of the last \\boxed{}, else of the last <answer></answer>; else the
    last letter after "answer" or "correct option", with "is", ":" or the like between; else the
    response, if it is a letter only. (B), b., **B**, "B" and Option B are B. Several letters are no
    choice. Raises ConfigError if the field is none of the letters.
    """
    answer = _parse_letter(get_answer(fields, "choice"), settings)
    letter = _build_letter_finder(settings)(text, finish_reason)
    return {"reward": float(letter == answer), "answered": float(letter is not None)}


def _normalize_answer(answer: object, settings: SubstringSettings | None = None) -> str:
    text = _normalize_text(format_answer(answer, "substring"))
    if not text:
        raise build_answer_error(answer, "substring", "a text")
    return text


def _normalize_text(text: str) -> str:
    """Compose accents (NFC), and replace each run of blanks and line breaks by a blank."""
    return " ".join(unicodedata.normalize("NFC", text).split())


@register_reward("substring")
@reads_answer(_normalize_answer)
@gives()
def substring(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: SubstringSettings
) -> dict[str, float]:
    """Return 1.0 if the response contains the text in `answer`; line breaks count as blanks.

    Raises ConfigError if the field is empty.
    """
    answer, response = _normalize_answer(get_answer(fields, "substring")), _normalize_text(text)
    if settings.ignore_case:
        answer, response = answer.casefold(), response.casefold()
    edges = (r"(?<!\w)", r"(?!\w)") if settings.whole_words else ("", "")
    return {"reward": float(re.search(re.escape(answer).join(edges), response) is not None)}
