"""A reward for Countdown: an expression of the given numbers that makes the target."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown(text: str, fields: Mapping[str, Any], finish_reason: str) -> dict[str, float]:
    """Return 1 if the last <answer> makes `target` of `nums`, each used at most once.

    `format` is 1 if it has an expression of whole numbers, + - * / and parentheses.
    """
    answers = re.findall(r"<answer>([-+*/() 0-9]{1,200})</answer>", text)
    try:
        expression = ast.parse(answers[-1].strip(), mode="eval").body
        value, numbers = _evaluate(expression), Counter(_list_numbers(expression))
    except (IndexError, SyntaxError, ValueError, ZeroDivisionError):
        return {"reward": 0.0, "format": 0.0}
    is_right = value == fields["target"] and numbers <= Counter(fields["nums"])
    return {"reward": float(is_right), "format": 1.0}


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("neither a number nor a sum, difference, product or quotient")


def _list_numbers(node: ast.expr) -> Iterator[int]:
    constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return (value for value in constants if isinstance(value, int))
