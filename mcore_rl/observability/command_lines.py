"""Commands on a screen: lines that can be pasted into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_WIDTH = 80


def wrap_command(words: Sequence[str], head: str = "") -> list[str]:
    r"""Return the lines of a command, behind `head`; what is too long for one goes on in the next.

    >>> wrap_command(["chat", "a b"], "next: mcore-rl")
    ["next: mcore-rl chat 'a b'"]
    """
    begin = len(head) - len(head.lstrip())
    lines, line = [], head
    for word in map(shlex.quote, words):
        if len(f"{line} {word} \\") > _WIDTH:
            lines.append(f"{line} \\")
            line = " " * (begin + 5)
        line += f" {word}"
    return [*lines, line]
