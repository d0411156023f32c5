"""Rewards that check a mathematical answer by rule."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.checks import between
from mcore_rl.rewards.base import (
    FindAnswer,
    answer_of,
    gives,
    in_process,
    register_reward,
    with_answers,
)

_UNCHECKED = {"reward": 0.0, "answered": 1.0, "unchecked": 1.0}
_FINAL_LINE = re.compile(r"#### ([0-9]+)")


@dataclass(frozen=True)
class MathSettings:
    """Settings of `reward.name=math`."""

    boxed_only: bool = True  # false: without a \\boxed{}, the last formula or number is the answer
    digits: int = 6  # decimals to which numbers are compared, where one has a decimal point
    timeout_s: float = 5.0  # for one response; one that takes longer is wrong

    def __post_init__(self) -> None:
        between("digits", self.digits, 0, 15)


def _final_line_answers(settings: None) -> FindAnswer:
    def find(text: str, finish_reason: str) -> str | None:
        match = _FINAL_LINE.fullmatch(text.rpartition("\n")[2])
        return match[1] if match and finish_reason == "stop" else None

    return find


def _boxed_answers(settings: MathSettings) -> FindAnswer | None:
    """What is in the box, without blanks, dollars and a full stop: 1/2 and 0.5 are two answers."""

    def find(text: str, finish_reason: str) -> str | None:
        boxed = last_boxed(text)
        return None if boxed is None else re.sub(r"\s|\\[,;:! ]|\\?\$|\.\s*$", "", boxed) or None

    return find if settings.boxed_only else None


@register_reward("final_number")
@gives("format")
@with_answers(_final_line_answers)
def final_number(text: str, fields: Mapping[str, Any], finish_reason: str) -> dict[str, float]:
    """1.0 when the last line is exactly `#### <digits>`, the digits are the answer, and it ended.

    A response cut off by the length limit earns nothing: its last line might have gone on.
    `format` is 1.0 when the response ended in such a line, right or wrong. Answers are compared as
    text, so `07` is not `7`. Raises ConfigError when the fields hold no answer.
    """
    answer = answer_of(fields, "final_number")
    found = _final_line_answers(None)(text, finish_reason)
    return {"reward": float(found == answer), "format": float(found is not None)}


@register_reward("math")
@gives("answered", "unchecked")
@with_answers(_boxed_answers)
@in_process("math_verify", unchecked=_UNCHECKED, memory_mb=2048)
def math(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: MathSettings
) -> dict[str, float]:
    """1.0 if the answer of the response equals the field `answer`, by math-verify.

    The answer is what is in the last \\boxed{}. The field is text or LaTeX: an answer, or a
    solution with a \\boxed{}. Units are not compared, words without regard to case, and 50% equals
    0.5 and, as math-verify has it, 50. `answered` is 1.0 where there is an answer that can be read;
    `unchecked` where the check took longer than timeout_s, or ended its process. Raises ValueError
    if the field cannot be read.
    """
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of its limits being off
    wanted = answer_of(fields, "math")
    boxed = last_boxed(wanted)
    gold = _parsed(_marked(wanted if boxed is None else boxed))
    if not gold:
        raise ValueError(f"the answer {wanted!r} of the data cannot be read as mathematics")
    boxed = last_boxed(text)
    if boxed is not None:
        found = _parsed(_marked(boxed))
    else:
        found = [] if settings.boxed_only else _parsed(text)
    is_equal = verify(
        gold,
        found,
        float_rounding=settings.digits,
        allow_set_relation_comp=True,  # 0 < x < 1 is (0, 1), whichever of them is the answer
        timeout_seconds=None,  # the process has a limit
    )
    return {"reward": float(is_equal), "answered": float(bool(found)), "unchecked": 0.0}


def last_boxed(text: str) -> str | None:
    """What is between the braces of the last \\boxed{}; None without one that is complete.

    >>> last_boxed(r"\\boxed{1}, so \\boxed{\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start + 6 :], re.DOTALL) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if brace[0] == "}" and not depth:
            return text[start + 7 : start + 6 + brace.start()]
    return None


def _marked(answer: str) -> str:
    """An answer as LaTeX that math-verify reads as a whole.

    Without this it reads "1 2/3" as 1, "1 000" as 1 + 0, "12 34" as 12 + 34, "7." not at all, a
    per cent sign inside of \\boxed{} not at all, and words as products of their letters: "tea"
    would equal "eat".
    """
    found = answer.replace("\\$", "").replace("$", "").strip().rstrip(".").strip()
    found = re.sub(r"(?<=\d)(?:\\[,;:! ]|[ ~])(?=\d{3}(?!\d))", "", found)
    found = re.sub(r"(?<![\d.])(\d+) +(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", found)
    found = re.sub(r"(?<=\d)\s+(?=\d)", ",", found)
    number = re.sub(r"\s*(?:\\?%|(?i:per ?cent))$", "", found)
    if re.fullmatch(r"[A-Za-z][A-Za-z ]{2,}", number):
        return f"$\\boxed{{\\text{{{number}}}}}$"
    return f"$\\boxed{{{number}}}${'%' * (number != found)}"


def _parsed(text: str) -> list[Any]:
    """What math-verify makes of the last answer in a text: an expression, and its text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
    return parse(text, kinds, parsing_timeout=None)
