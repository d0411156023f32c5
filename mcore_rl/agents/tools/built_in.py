"""The tools `calculator`, `search` and `python`."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np

from mcore_rl.agents.tools.base import ToolError, tool
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.regular_file import open_regular_fd
from mcore_rl.sandbox.sandbox import Sandbox

Number = Fraction | float

_ZERO = Fraction(0)
_MAX_CHARS = 1000  # of an expression
_MAX_BITS = 4096  # of numerator and denominator: about 1233 digits
_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": lambda x, digits=_ZERO: round(Fraction(x), _parse_digits(digits)),
    "floor": lambda x: Fraction(math.floor(x)),
    "ceil": lambda x: Fraction(math.ceil(x)),
    "sqrt": lambda x: _take_root(x),
    **{name: getattr(math, name) for name in ("exp", "log", "log2", "log10", "sin", "cos", "tan")},
}


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression, as Python has it.

    It knows + - * / // % **, parentheses, pi, e, abs, min, max, round, floor, ceil, sqrt, exp, log,
    log2, log10, sin, cos and tan.

    Args:
        expression: for example (1 + 2) * 3 / 4
    """
    return format_number(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Return the value of an expression, computed on its syntax tree without `eval`.

    It is exact (a Fraction) for numbers as written, + - * / // % and whole powers: 0.1 + 0.2 is
    3/10, and 1/3 * 3 is 1. It is a float with an irrational root, a power that is not whole, pi, e
    or another function.

    Raises:
        ToolError: It is no arithmetic, has no value, or is too large.
    """
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"{len(expression)} characters; allowed: {_MAX_CHARS}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _evaluate_node(tree.body, expression.strip())
    except SyntaxError as error:
        raise ToolError(f"{expression!r} cannot be read: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ToolError("too many parentheses") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (OverflowError, TypeError, ValueError) as error:
        raise ToolError(f"it has no value: {error}") from error


def format_number(value: Number) -> str:
    """Write a number: a whole number, a decimal, or a fraction and its value in some 16 digits."""
    if isinstance(value, float):
        return repr(value)
    if value.denominator == 1:
        return str(value.numerator)
    rest, digits = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        digits = max(digits, count)
    if rest == 1 and digits <= 30:
        text = f"{abs(value.numerator) * 10**digits // value.denominator:0{digits + 1}d}"
        return f"{'-' * (value < 0)}{text[:-digits]}.{text[-digits:]}"
    return f"{value} (about {float(value)!r})"


def _evaluate_node(node: ast.expr, source: str) -> Number:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _check_bits(_parse_literal(ast.get_source_segment(source, node) or ""))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate_node(operand, source)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate_node(operand, source)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _raise_to_power(_evaluate_node(left, source), _evaluate_node(right, source))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _check_bits(
                _OPERATORS[type(op)](_evaluate_node(left, source), _evaluate_node(right, source))
            )
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _check_bits(_FUNCTIONS[name](*(_evaluate_node(arg, source) for arg in args)))
    part = ast.get_source_segment(source, node)
    hint = "; a power is written **" if "^" in source else ""
    raise ToolError(f"{part!r} is no arithmetic that the calculator knows{hint}")


def _parse_literal(text: str) -> Fraction:
    text = text.lower().replace("_", "")
    if text[:2] in ("0x", "0o", "0b"):
        return Fraction(int(text, 0))
    _, _, exponent = text.partition("e")
    if exponent and abs(int(exponent)) > _MAX_BITS:  # the fraction would fill the memory
        raise ToolError(f"{text} is too large or too small")
    return Fraction(text)


def _raise_to_power(base: Number, exponent: Number) -> Number:
    if not isinstance(base, Fraction) or not _is_parse_digits(exponent):
        return _check_bits(math.pow(base, exponent))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    times = abs(int(exponent))
    if bits > 1 and (bits - 1) * times > _MAX_BITS:
        raise ToolError(f"the power is too large; allowed: {_MAX_BITS} bits")
    return _check_bits(Fraction(base) ** int(exponent))


def _is_parse_digits(value: Number) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _parse_digits(value: Number) -> int:
    if not _is_parse_digits(value) or not -30 <= value <= 30:
        raise ToolError("round: allowed as digits: whole numbers up to 30")
    return int(value)


def _take_root(value: Number) -> Number:
    if isinstance(value, Fraction) and value >= 0:
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    return math.sqrt(value)


def _check_bits(value: Number) -> Number:
    if isinstance(value, int):  # of round
        value = Fraction(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ToolError("the value is too large")
    elif max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError(f"a number is too large; allowed: {_MAX_BITS} bits")
    return value


_WORD = re.compile(r"\w+")
_MAX_RESULTS = 20


class SearchTool:
    """BM25 over a JSONL file: a text per line in the field `text`, and an optional `title`.

    Score of a text d for a query (Robertson and Zaragoza 2009, eq. 3.15, with the idf of Lucene,
    which is never negative): the sum over the words w of the query of
    ln(1 + (N - df + 0.5) / (df + 0.5)) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * |d| / mean |d|)).
    Words are those of Python's re, in lower case. Trajectories share the index.
    """

    def __init__(self, path: str | Path, k1: float = 1.2, b: float = 0.75) -> None:
        """Index a file; raise ConfigError naming the line that cannot be read."""
        self._rows = _read_texts(Path(path))
        words = [_split_words(" ".join(row)) for row in self._rows]
        lengths = np.array([len(text_words) for text_words in words], dtype=np.float64)
        self._norms = k1 * (1 - b + b * lengths / max(lengths.mean(), 1.0))
        postings: dict[str, list[tuple[int, int]]] = {}
        for number, text_words in enumerate(words):
            for word, count in Counter(text_words).items():
                postings.setdefault(word, []).append((number, count))
        self._postings = {word: np.array(pairs).T for word, pairs in postings.items()}
        self._k1 = k1

    def compute_scores(self, query: str) -> np.ndarray:
        """Return the score of each text, float64[number of texts]."""
        scores = np.zeros(len(self._rows))
        for word in _split_words(query):
            if word in self._postings:
                numbers, counts = self._postings[word]
                idf = math.log(1 + (len(scores) - len(numbers) + 0.5) / (len(numbers) + 0.5))
                weights = counts * (self._k1 + 1) / (counts + self._norms[numbers])
                scores[numbers] += idf * weights
        return scores

    @tool
    def search(self, query: str, top_k: int = 3) -> str:
        """Search a collection of texts, and return those that fit best.

        Args:
            query: words to look for
            top_k: how many texts, 1 to 20
        """
        scores = self.compute_scores(query)
        best = np.argsort(-scores, kind="stable")[: min(max(top_k, 1), _MAX_RESULTS)]
        rows = [self._rows[number] for number in best if scores[number] > 0]
        if not rows:
            return "Nothing was found."
        texts = [f"{title}\n{text}" if title else text for title, text in rows]
        return "\n\n".join(f"[{place}] {text}" for place, text in enumerate(texts, 1))


def _read_texts(path: Path) -> list[tuple[str, str]]:
    """Return titles and texts."""
    rows = []
    try:
        with open(open_regular_fd(path), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    raise ConfigError(f"{path}:{number}: allowed: an object with text as `text`")
                rows.append((str(row.get("title", "")), row["text"]))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{len(rows) + 1} is no JSON: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"{path} is empty; allowed: at least one text")
    return rows


def _split_words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


_STATUS_TEXTS = {
    "timeout": "it took too long",
    "memory": "it needed too much memory",
    "output": "it wrote too much",
    "processes": "it started too many processes",
    "disk": "it filled its folder",
    "killed": "a signal ended it",
}


class PythonTool:
    """Runs programs of the model in the sandbox; each call is a program of its own."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @tool(timeout_s=math.inf)  # the sandbox has limits; the wait for a place in it has none
    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between calls.

        Args:
            code: the whole program
        """
        result = await self._sandbox.run_async(code)
        parts = [result.stdout, result.stderr]
        if result.status in _STATUS_TEXTS:
            parts.append(f"The program was ended: {_STATUS_TEXTS[result.status]}.")
        elif not any(parts):
            parts.append(f"It printed nothing and ended with status {result.exit_code}.")
        return "\n".join(part.rstrip("\n") for part in parts if part)
