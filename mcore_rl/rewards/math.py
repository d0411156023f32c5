"""Rewards that check a mathematical answer by rule."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cache
from typing import Any

from mcore_rl.config.checks import check_between
from mcore_rl.data.latex import find_last_boxed, has_balanced_braces
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

_UNCHECKED = {"reward": 0.0, "answered": 1.0, "unchecked": 1.0}
_NUMBER = r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
_CURRENCY = r"(?:\\?\$|[\xa3\xa5\N{EURO SIGN}])?"
_FINAL_LINE = re.compile(rf"#### (?:(-){_CURRENCY}(?!-)|{_CURRENCY})({_NUMBER})")


@dataclass(frozen=True)
class MathSettings:
    """Settings of `reward.name=math`."""

    boxed_only: bool = True  # false: without a \\boxed{}, take the last formula or number
    # Decimals to which numbers are compared if one has a decimal point; below 10^(-digits/2)
    # significant digits.
    digits: int = 6
    timeout_s: float = 5.0  # per response; a longer check counts as wrong

    def __post_init__(self) -> None:
        check_between("digits", self.digits, 0, 15)


def _build_final_line_finder(settings: None) -> FindAnswer:
    """Return the finder of the number in a last line `#### NUMBER` of a finished response."""

    def find(text: str, finish_reason: str) -> str | None:
        match = _FINAL_LINE.fullmatch(text.rstrip().rpartition("\n")[2])
        if match is None or finish_reason != "stop":
            return None
        return f"{match[1] or ''}{match[2]}".replace(",", "")

    return find


def _build_box_finder(settings: MathSettings) -> FindAnswer | None:
    """Find the content of the box, without blanks, dollars and a full stop: 1/2 is not 0.5."""

    def find(text: str, finish_reason: str) -> str | None:
        boxed = find_last_boxed(text)
        return None if boxed is None else re.sub(r"\s|\\[,;:! ]|\\?\$|\.\s*$", "", boxed) or None

    return find if settings.boxed_only else None


def _check_number(answer: object, settings: None) -> None:
    """Raise ConfigError unless the field `answer` is a number as `final_number` reads it."""
    if not re.fullmatch(_NUMBER, format_answer(answer, "final_number").strip()):
        raise build_answer_error(answer, "final_number", "a number such as 7, -3, 2.5 or 1,234")


@register_reward("final_number")
@gives("format")
@reads_answer(_check_number)
@with_answers(_build_final_line_finder)
def final_number(text: str, fields: Mapping[str, Any], finish_reason: str) -> dict[str, float]:
    """Return 1.0 if the last line of a finished response is `#### ` and the number in `answer`.

    Blanks and line breaks may follow, and a sign of a currency may precede the digits. A response
    cut off by the length limit earns nothing: its last line may be incomplete. `format` is 1.0 if
    the response ends with such a line, right or wrong. Numbers are compared as text without
    thousands separators, so `07` is not `7`. Raises ConfigError if the field is missing, or neither
    text nor a number.
    """
    answer = get_answer(fields, "final_number").strip().replace(",", "")
    number = _build_final_line_finder(None)(text, finish_reason)
    return {"reward": float(number == answer), "format": float(number is not None)}


def _convert_answer(answer: object, settings: MathSettings | None = None) -> str:
    """Return the field `answer` as LaTeX; ConfigError if it cannot be the content of a box."""
    text = format_answer(answer, "math")
    boxed = find_last_boxed(text)
    latex = text if boxed is None else boxed
    if not _DELIMITER.sub("", latex).strip(" \t\n.") or not has_balanced_braces(latex):
        raise build_answer_error(answer, "math", "what can be in a \\boxed{}")
    if escape := _ESCAPED_COMMAND.search(latex):
        allowed = f"a backslash in place of {escape[0]!r}, which an escape sequence has replaced"
        raise build_answer_error(answer, "math", allowed)
    return spell_as_latex(latex)


@register_reward("math")
@reads_answer(_convert_answer)
@gives("answered", "unchecked")
@with_answers(_build_box_finder)
@run_in_process("math_verify", unchecked=_UNCHECKED, memory_mb=2048)
def math(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: MathSettings
) -> dict[str, float]:
    """Return 1.0 if the answer of the response equals the field `answer`, by math-verify.

    The answer is the content of the last \\boxed{} or \\fbox{}. The field is text or LaTeX: an
    answer, or a solution with such a box. Units are ignored, as is the case of words; 50% equals
    0.5 and, in math-verify, 50. `answered` is 1.0 if the answer can be parsed, `unchecked` if the
    check took longer than timeout_s or ended its process. Raises ValueError if the field cannot be
    parsed.
    """
    grader = _load_grader()
    answer = get_answer(fields, "math")
    gold_latex = _convert_answer(answer)
    gold = _parse_whole(gold_latex)
    if not gold:
        raise ValueError(f"the answer {answer!r} of the data cannot be read as mathematics")
    boxed = find_last_boxed(text)
    latex = "" if boxed is None else spell_as_latex(boxed)
    if boxed is not None:
        parsed = _parse_whole(latex)
    else:
        parsed = [] if settings.boxed_only else _parse_last(text)
    is_comparable = _has_same_bases(gold_latex, latex) and _has_same_moduli(answer, boxed or "")
    is_equal = is_comparable and grader.verify(
        gold,
        parsed,
        float_rounding=settings.digits,
        allow_set_relation_comp=True,  # 0 < x < 1 equals (0, 1), either way round
        timeout_seconds=None,  # the process has a limit
    )
    return {"reward": float(is_equal), "answered": float(bool(parsed)), "unchecked": 0.0}


_SIGNS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{FRACTION SLASH}": "/",
        "\N{DIVISION SIGN}": "/",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "\N{MIDDLE DOT}": r"\cdot ",
        "\N{DOT OPERATOR}": r"\cdot ",
        "\N{DEGREE SIGN}": r"^\circ ",
        "\N{INFINITY}": r"\infty ",
        "\N{EMPTY SET}": r"\emptyset ",
        "\N{SQUARE ROOT}": "sqrt",
        "\N{LESS-THAN OR EQUAL TO}": r"\le ",
        "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
        "\N{UNION}": r"\cup ",
        "\N{INTERSECTION}": r"\cap ",
        "\N{GREEK SMALL LETTER PI}": r"\pi ",
        "\N{GREEK SMALL LETTER THETA}": r"\theta ",
    }
)
_SUPERSCRIPT = re.compile("[\N{SUPERSCRIPT ZERO}-\N{SUPERSCRIPT MINUS}\xb9\xb2\xb3]+")
_NAMES = (
    "pi|theta|alpha|beta|gamma|delta|lambda|phi|omega|infty|"
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|log|ln|exp"
)
_OPENS = r"(?:\(|\\(?:text|mathrm)\{|(?<![A-Za-z}])\{)"
_DIGITS_IN_BASE = re.compile(r"([0-9A-Z]*\d[0-9A-Z]*)_\{?(\d+)")
_DELIMITER = re.compile(r"\$|(?<!\\)\\[()\[\]]")
# Commands such as \frac, \boxed and \theta as a program reads them in a text that is not raw.
_ESCAPED_COMMAND = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|"
    r"\t(?:ext\w*|frac|imes|heta|an|au|o|riangle)(?![A-Za-z])|"
    r"\r(?:ight|ho|angle|brace|brack|floor|ceil|vert)(?![A-Za-z])|\n(?:eq|eg|otin|abla)(?![A-Za-z])"
)
_CIRC = r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)"
_DEGREES = re.compile(rf"(\\[dt]?frac\{{\d+\}}\{{\d+\}}|\d+\.?\d*|\.\d+|\\?[A-Za-z]+){_CIRC}")
_ANGLE = (
    rf"(?:\\left)?\((?:[^()]|\([^()]*\))*\)|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|{_DEGREES.pattern}"
)
_TRIGONOMETRY = re.compile(
    rf"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*(?:\{{[^{{}}]*\}}|\d))?\s*)({_ANGLE})"
)
_REPEATING = re.compile(
    r"(\d{1,3}(?:,\d{3})+|\d{0,50})\.(\d{0,50})"
    r"(?:\\(?:overline|bar)\s*\{?(\d{1,50})\}?|\\dot\s*\{?(\d)\}?(?:(\d{0,50})\\dot\s*\{?(\d)\}?)?)"
)
# A modulus behind a number: \pmod{12}, (\bmod 12), (mod 12).
_MODULUS = re.compile(
    r"(?:\s|~|\\[ ,;:!]|\\q?quad){0,20}(?:\\pmod\s*(?:\{([^{}]+)\}|(\w))|"
    r"\(\s*(?:\\[bp]?mod|\\(?:text|mathrm|operatorname)\{\s*mod\s*\}?|mod)(?![A-Za-z])"
    r"(?:[\s{]|\\[ ,;:!])*([^(){}]{1,40}?)[\s}]{0,40}\))"
)
_FRACTION = r"\\([dt]?(?:frac|binom))\s*(\d)\s*(\d)"
# Spellings that are no LaTeX, or LaTeX that math-verify misreads, with a replacement; in order.
_SPELLINGS = [
    (re.compile(pattern), latex)
    for pattern, latex in [
        (r"\\l(?:brace|Brace)(?![A-Za-z])", r"\\{"),
        (r"\\r(?:brace|Brace)(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\mathrm\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\\bmod(?![A-Za-z])", r"\\mod"),
        (r"\\lg(?![A-Za-z])", r"\\log_{10} "),
        (_FRACTION, r"\\\1{\2}{\3}"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\degree(?![A-Za-z])", r"^\\circ "),
        (r"(\^\{?\\circ\}?)\s*(?:\\(?:text|mathrm)\{\s*)?[CF]\}?$", r"\1"),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
        (rf"(?<![A-Za-z\\])({_NAMES})(?![A-Za-z])", r"\\\1 "),
        (r"\\log\s*_\s*(\d+)\s+", r"\\log_{\1} "),
        (r"(?<![A-Za-z\\])sqrt\s*(?=[\da-zA-Z])", r"\\sqrt "),
        (r"\\\\\s*\[[\d.]+\s*[a-z]{2}\]", r"\\\\"),  # the distance to the next row
        (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])", r"\1\\times 10^{\2}"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))", r"\\times "),
        (r"\*\*", "^"),
        (r"\^\s*([+-]?\d+)", r"^{\1}"),
        (rf"{_OPENS}([0-9A-Z]*\d[0-9A-Z]*)[)}}]_", r"\1_"),  # (n)_{k} would be a factorial
        # math-verify reads "1 000" as 1 + 0, "1 2/3" as 1, and "12 34" as 12 + 34.
        (r"(?<=\d)(?:\\[,;:! ]|[ ~])(?=\d{3}(?!\d))", ""),
        (r"(?<![\d.])(\d+) +(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
        (r"(?<=\d)\s+(?=\d)", ","),
    ]
]


def spell_as_latex(answer: str) -> str:
    r"""Write an answer as LaTeX that math-verify parses completely.

    Otherwise it parses 1e-3 as a product with e, pi as a product of p and i, fails on "7." and on a
    per cent sign in \boxed{}, and parses words as products of their letters: "tea" equals "eat".

    >>> spell_as_latex("1e-3")
    '$\\boxed{1\\times 10^{-3}}$'
    """
    text = _DELIMITER.sub(" ", answer.replace("\\$", "").replace("$", ""))
    text = text.strip().rstrip(".").strip()
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = re.sub(r"(?<=\d)(?=[\xbc-\xbe])", " ", text)  # 3 and a half
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)
    words = re.sub(r"\s*(?:\\?%|(?i:per ?cent))$", "", text)
    percent = "%" * (words != text)
    if re.fullmatch(rf"(?!(?:{_NAMES}|inf|infinity)\Z)[A-Za-z][A-Za-z ]{{2,}}", words):
        return f"$\\boxed{{\\text{{{words}}}}}${percent}"
    words = _REPEATING.sub(_write_fraction, _MODULUS.sub("", words))
    for pattern, latex in _SPELLINGS:
        words = pattern.sub(latex, words)
    words = _TRIGONOMETRY.sub(_write_radians, words)
    return f"$\\boxed{{{words}}}${percent}"


def _write_fraction(match: re.Match[str]) -> str:
    """Write a repeating decimal, such as 0.1\\overline{6}, as a fraction."""
    integer, first, period, begin, middle, end = (group or "" for group in match.groups())
    integer, period = integer.replace(",", ""), period + begin + middle + end
    nines = 10 ** len(period) - 1
    numerator = int(integer + first + period) - int(f"0{integer}{first}")
    return f"\\frac{{{numerator}}}{{{nines * 10 ** len(first)}}}"


def _write_radians(match: re.Match[str]) -> str:
    """Write the degrees in the argument of a trigonometric function as radians.

    math-verify drops them, as a unit.
    """
    return match[1] + _DEGREES.sub(r"\\left(\\frac{\1 \\pi}{180}\\right)", match[2])


def _has_same_moduli(gold: str, answer: str) -> bool:
    """Return whether moduli are equal, if both answers have any."""
    moduli = [
        sorted("".join(groups).replace(" ", "") for groups in _MODULUS.findall(text))
        for text in (gold, answer)
    ]
    return not all(moduli) or moduli[0] == moduli[1]


def _has_same_bases(gold: str, answer: str) -> bool:
    """Return whether numbers with a base have equal digits and bases, if both answers have any."""
    bases = [
        sorted((digits.lstrip("0"), base) for digits, base in _DIGITS_IN_BASE.findall(latex))
        for latex in (gold, answer)
    ]
    return not all(bases) or bases[0] == bases[1]


def _parse_whole(latex: str) -> list[Any]:
    """Parse an answer as one formula: an expression, if it can be parsed, and its text."""
    from math_verify import LatexExtractionConfig, parse

    kinds = (LatexExtractionConfig(boxed_match_priority=0),)
    parsed = parse(latex, kinds, parsing_timeout=None, extraction_mode="first_match")
    return [*map(_replace_unit, parsed)]


def _replace_unit(parsed: Any) -> Any:
    """Replace i by the imaginary unit in a formula without other symbols, and in x = i."""
    from sympy import Basic, Eq, I, Symbol

    if isinstance(parsed, Eq) and isinstance(parsed.lhs, Symbol):
        return Eq(parsed.lhs, _replace_unit(parsed.rhs), evaluate=False)
    symbols = parsed.free_symbols if isinstance(parsed, Basic) else ()
    is_complex = {symbol.name for symbol in symbols} == {"i"}
    return parsed.subs(dict.fromkeys(symbols, I)) if is_complex else parsed


def _parse_last(text: str) -> list[Any]:
    """Parse the last formula or number of a text without a box."""
    from math_verify import parse

    return [*parse(text, parsing_timeout=None)]


@cache
def _load_grader() -> Any:
    """Load math-verify, and replace its comparison of numbers.

    math-verify 0.9.0 compares the difference with 10^-15, or both numbers rounded to some decimals,
    so that all small numbers are equal.
    """
    from math_verify import grader

    # It warns that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    original = grader.sympy_numeric_eq

    def compare(first: Any, second: Any, digits: int, precision: int) -> bool:
        return _compare_numbers(first, second, digits, precision, original)

    grader.sympy_numeric_eq = compare
    return grader


def _compare_numbers(first: Any, second: Any, digits: int, precision: int, original: Any) -> bool:
    """Return whether two expressions are equal numbers: exactly, or to `digits` if one has a point.

    `original` compares matrices, whole percentages and formulas with a decimal point.
    """
    from math_verify.grader import get_pct_val, is_atomic_or_pct_atomic, safe_sympy_doit
    from sympy import Expr, Float, Integer

    is_percentage = get_pct_val(first) is not None or get_pct_val(second) is not None
    is_whole = all(is_atomic_or_pct_atomic(number, Integer) for number in (first, second))
    are_numbers = isinstance(first, Expr) and isinstance(second, Expr)
    if not are_numbers or (is_percentage and is_whole):
        return bool(original(first, second, digits, precision))
    first, second = safe_sympy_doit(first), safe_sympy_doit(second)
    has_point = first.has(Float) or second.has(Float)
    if first.free_symbols or second.free_symbols:
        return has_point and bool(original(first, second, digits, precision))
    if not has_point:
        return _is_zero(first - second)
    pairs = list(zip(*(n.evalf(30).as_real_imag() for n in (first, second)), strict=True))
    if not all(part.is_Float or part.is_Rational for pair in pairs for part in pair):
        return bool(first == second)
    return all(_is_close(left, right, digits) for left, right in pairs)


def _is_zero(difference: Any) -> bool:
    """Return whether a number without a decimal point is 0, to 300 digits."""
    parts = difference.evalf(15, maxn=300).as_real_imag()
    return all(part == 0 or (part.is_Float and part._prec == 1) for part in parts)


def _is_close(first: Any, second: Any, digits: int) -> bool:
    """Compare to `digits` decimals; numbers below 10^(-digits/2) to `digits` significant digits."""
    precise = Context(prec=400)
    numbers = [precise.create_decimal(str(number)) for number in (first, second)]
    largest = max(map(abs, numbers))
    if abs(precise.subtract(*numbers)) <= largest * Decimal("1e-14"):  # precision of a float
        return True
    if largest < Decimal(10) ** -(digits // 2):
        significant = Context(prec=max(digits, 1))
        return significant.plus(numbers[0]) == significant.plus(numbers[1])
    step = Decimal(1).scaleb(-digits)
    return precise.quantize(numbers[0], step) == precise.quantize(numbers[1], step)
