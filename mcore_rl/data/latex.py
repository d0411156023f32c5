"""LaTeX boxes around the answers of solutions and responses."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(\{|(?<=\s)[^\s{$\\]+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def find_last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{} or \fbox{}; None if there is no complete box.

    As in TeX, blanks before the brace are allowed, and a box without braces ends at a blank or a
    dollar.

    >>> find_last_boxed(r"\boxed{1}, so \boxed {\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> find_last_boxed(r"the answer is $\boxed 12$.")
    '12'
    """
    boxes = list(_BOX.finditer(text))
    if not boxes or boxes[-1][1] != "{":
        return boxes[-1][1] if boxes else None
    begin, depth = boxes[-1].end(), 1
    for brace in _BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[begin : brace.start()]
    return None


def has_balanced_braces(text: str) -> bool:
    r"""Return whether \boxed{text} ends at its last brace."""
    return find_last_boxed(f"\\boxed{{{text}}}") == text
