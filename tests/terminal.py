"""A command on a pseudo-terminal, and the text that a person sees there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROWS = 50
_SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Screen:
    """Lines as a terminal shows them, those that have scrolled off the top before the others.

    It knows what programs here write: text, and moves and erasures of rich's live displays.
    """

    def __init__(self, columns: int, rows: int = _ROWS) -> None:
        self._columns, self._rows = columns, rows
        self._lines: list[list[str]] = [[]]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        """Raise ValueError for a sequence that is not known."""
        place = 0
        while place < len(text):
            if text[place] != "\x1b":
                self._put(text[place])
                place += 1
                continue
            sequence = _SEQUENCE.match(text, place)
            if sequence is None:
                raise ValueError(f"the terminal was sent {text[place : place + 20]!r}")
            self._obey(*sequence.groups())
            place = sequence.end()

    @property
    def lines(self) -> list[str]:
        """The lines, without blanks at their ends, and without empty lines at the end."""
        lines = ["".join(line).rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _obey(self, private: str, number: str, letter: str) -> None:
        if letter == "m" or private:  # a colour; the cursor is shown or hidden
            return
        if letter == "A":
            self._row = max(self._row - int(number or 1), len(self._lines) - self._rows, 0)
        elif letter == "K" and number == "2":
            self._lines[self._row] = []
        else:
            raise ValueError(f"the terminal was sent ESC [ {private}{number}{letter}")

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            if self._row == len(self._lines):
                self._lines.append([])
        elif character.isprintable():
            if self._column == self._columns:
                self._put("\n")
                self._column = 0
            line = self._lines[self._row]
            line += " " * (self._column - len(line))
            line[self._column : self._column + 1] = [character]
            self._column += 1
        else:
            raise ValueError(f"the terminal was sent {character!r}")


def read_terminal(
    command: Sequence[str], columns: int, variables: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run a command on a terminal; return its exit status and the lines of the screen."""
    status, written = run_on_terminal(command, columns, variables)
    screen = Screen(columns)
    screen.feed(written)
    return status, screen.lines


def run_on_terminal(
    command: Sequence[str],
    columns: int = 80,
    variables: Mapping[str, str] | None = None,
    *,
    keys: str = "",
    folder: Path | None = None,
) -> tuple[int, str]:
    """Run a command on a terminal and type `keys`; return its exit status and its output."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", _ROWS, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", **(variables or {})}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        environment.pop(name, None)
    streams = {"stdin": follower, "stdout": follower, "stderr": follower}
    written = b""
    with subprocess.Popen(
        command, **streams, env=environment, cwd=folder, start_new_session=True
    ) as process:
        os.close(follower)
        os.write(leader, keys.encode())
        while data := _read(leader):
            written += data
    os.close(leader)
    return process.returncode, written.decode()


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # Linux, when nobody has the other end any more
        return b""
