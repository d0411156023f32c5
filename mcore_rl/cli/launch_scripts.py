"""The settings that a launch script of verl passes, read without running it.

Of bash it knows assignments, arrays, quotes, ${NAME:-default} and $((arithmetic)). What is inside
of if, for, while and case is not followed, and commands in $(...) are not run.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.config.errors import ConfigError

_PROGRAM = re.compile(r"(.*[./])?main_\w+(\.py)?")  # verl.trainer.main_ppo, recipe.dapo.main_dapo
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SEPARATORS = ("&&", "||", ";;", ";", "|", "&", "\n")
_OPENING, _CLOSING = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


@dataclass(slots=True)
class LaunchScript:
    """Words that a script passes to verl, such as key=value and --config-name=..., in order."""

    arguments: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_script(text: str, where: str) -> LaunchScript:
    """Return what a script passes to the first program of verl that it starts.

    Raises:
        ConfigError: It starts none, or a quote or bracket is not closed; begins with `where`.
    """
    return _Reader(text, where).read()


class _Reader:
    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.place = text.replace("\\\n", " "), where, 0
        self.variables: dict[str, str | list[str]] = {"HOME": str(Path.home())}
        self.remarks: dict[str, None] = {}
        self.depth = 0  # of if, for, while and case

    def read(self) -> LaunchScript:
        for words in self._list_commands():
            programs = [i for i, word in enumerate(words) if _PROGRAM.fullmatch(word)]
            if programs:
                return LaunchScript(words[programs[0] + 1 :], list(self.remarks))
        raise ConfigError(
            f"{self.where} starts no program of verl; allowed: a script with a line such as "
            "python3 -m verl.trainer.main_ppo key=value ..."
        )

    def _list_commands(self) -> Iterator[list[str]]:
        """Yield the words of each command, and keep what assignments say."""
        words: list[str] = []
        while self.place < len(self.text):
            if self._skip_blanks():
                if words:
                    yield words
                words = []
                continue
            if self.place >= len(self.text):
                break
            if (not words or words[0] == "export") and self._read_assignment():
                continue
            new = self._read_word()
            if not words and new in (["then"], ["do"], ["else"], ["elif"]):
                continue
            if not words and new and new[0] in _OPENING:
                self.depth += 1
                self.remarks[f"the script's {new[0]} is not followed"] = None
            elif not words and new and new[0] in _CLOSING:
                self.depth -= 1
            words += new
        if words:
            yield words

    def _skip_blanks(self) -> str:
        """Skip blanks and a comment; return the separator of commands that follows, if any."""
        while self.text[self.place : self.place + 1] in (" ", "\t", "\r") and self._has_more():
            self.place += 1
        if self.text.startswith("#", self.place):
            end = self.text.find("\n", self.place)
            self.place = len(self.text) if end < 0 else end
        for separator in _SEPARATORS:
            if self.text.startswith(separator, self.place):
                self.place += len(separator)
                return separator
        return ""

    def _has_more(self) -> bool:
        return self.place < len(self.text)

    def _read_assignment(self) -> bool:
        match = _ASSIGNMENT.match(self.text, self.place)
        if match is None:
            return False
        self.place = match.end()
        name, adds = match[1], bool(match[2])
        value: str | list[str]
        if self.text.startswith("(", self.place):
            self.place += 1
            value = self._read_array()
        else:
            is_empty = not self._has_more() or self.text[self.place].isspace()
            value = "" if is_empty else " ".join(self._read_word())
        if self.depth:
            return True
        old = self.variables.get(name)
        if adds and type(old) is type(value):
            value = old + value  # type: ignore[operator]
        self.variables[name] = value
        return True

    def _read_array(self) -> list[str]:
        words: list[str] = []
        while self._has_more():
            if self._skip_blanks():
                continue
            if self.text.startswith(")", self.place):
                self.place += 1
                return words
            words += self._read_word()
        raise ConfigError(f"{self.where}: an array has no ')'")

    def _read_word(self) -> list[str]:
        """Read a word; an array in it, as "${DATA[@]}", is as many words as it has entries."""
        parts, start = [""], self.place
        while self._has_more():
            character = self.text[self.place]
            if character.isspace() or character in ";|&()":
                break
            self.place += 1
            if character == "'":
                end = self._find("'")
                parts[-1] += self.text[self.place : end]
                self.place = end + 1
            elif character == '"':
                self._read_quoted(parts)
            elif character == "$":
                self._expand_unquoted(parts)
            elif character == "`":
                self._skip_command(self._find("`"), parts)
            elif character == "\\":
                parts[-1] += self.text[self.place : self.place + 1]
                self.place += 1
            else:
                parts[-1] += character
        if self.place == start:  # a bracket that starts no array
            self.place += 1
        is_empty = parts == [""] and self.text[start : start + 1] == "$"
        return [] if is_empty else parts

    def _expand_unquoted(self, parts: list[str]) -> None:
        """Expand a variable; without quotes blanks in it separate words."""
        values = [""]
        self._expand(values)
        is_command = values[0].startswith("COMMAND(")
        words = values if is_command else [word for value in values for word in value.split()]
        self._append(words, parts)

    def _read_quoted(self, parts: list[str]) -> None:
        while self._has_more():
            character = self.text[self.place]
            self.place += 1
            if character == '"':
                return
            if character == "$":
                self._expand(parts)
            elif character == "`":
                self._skip_command(self._find("`"), parts)
            elif character == "\\" and self.text[self.place : self.place + 1] in ('"', "$", "\\"):
                parts[-1] += self.text[self.place]
                self.place += 1
            else:
                parts[-1] += character
        raise ConfigError(f'{self.where}: a " is not closed')

    def _find(self, end: str) -> int:
        place = self.text.find(end, self.place)
        if place < 0:
            raise ConfigError(f"{self.where}: {end} is missing")
        return place

    def _skip_command(self, end: int, parts: list[str]) -> None:
        command = self.text[self.place : end].strip()
        self.remarks[f"the script's command {command!r} is not run"] = None
        parts[-1] += f"COMMAND({command})"
        self.place = end + 1

    def _expand(self, parts: list[str]) -> None:
        """Expand what follows a "$"."""
        if self.text.startswith("((", self.place):
            end = self._find("))")
            while self.text.startswith(")", end + 2):  # brackets inside
                end += 1
            inner = "".join(self._expand_text(self.text[self.place + 2 : end]))
            parts[-1] += self._compute(inner)
            self.place = end + 2
        elif self.text.startswith("(", self.place):
            end = self._find_closing("(", ")")
            self.place += 1
            self._skip_command(end, parts)
        elif self.text.startswith("{", self.place):
            end = self._find_closing("{", "}")
            self._expand_braces(self.text[self.place + 1 : end], parts)
            self.place = end + 1
        elif match := _NAME.match(self.text, self.place):
            self.place = match.end()
            self._append(self._look_up(match[0], None), parts)
        elif self.text[self.place : self.place + 1] in tuple("@*#?0123456789"):
            self.place += 1  # arguments of the script, of which there are none
        else:
            parts[-1] += "$"

    def _find_closing(self, opening: str, closing: str) -> int:
        """Return the place of the bracket that closes the next one."""
        depth = 0
        for place in range(self.place, len(self.text)):
            depth += {opening: 1, closing: -1}.get(self.text[place], 0)
            if not depth:
                return place
        raise ConfigError(f"{self.where}: a {closing} is missing")

    def _expand_braces(self, inner: str, parts: list[str]) -> None:
        match = re.fullmatch(r"(\w+)(\[[@*]\])?(:?[-=?+](.*))?", inner, re.DOTALL)
        if match is None:
            self.remarks[f"the script's ${{{inner}}} is not expanded"] = None
            parts[-1] += f"${{{inner}}}"
            return
        default = None if match[3] is None or "+" in match[3][:2] else match[4]
        if match[1].isdigit():  # an argument of the script
            self._append("".join(self._expand_text(default or "")), parts)
            return
        self._append(self._look_up(match[1], default), parts)

    def _look_up(self, name: str, default: str | None) -> str | list[str]:
        if name in self.variables and self.variables[name] != "":
            return self.variables[name]
        if default is not None:
            return "".join(self._expand_text(default))
        if name not in self.variables:
            self.remarks[f"the script does not set ${name}"] = None
            return f"${name}"
        return ""

    def _append(self, value: str | list[str], parts: list[str]) -> None:
        if isinstance(value, str):
            parts[-1] += value
        elif value:
            parts[-1] += value[0]
            parts += value[1:]

    def _expand_text(self, text: str) -> list[str]:
        """Expand a default value, or the inside of an arithmetic expression."""
        inner = _Reader(text, self.where)
        inner.variables, inner.remarks = self.variables, self.remarks
        parts = [""]
        while inner._has_more():
            character = inner.text[inner.place]
            inner.place += 1
            if character == "$":
                inner._expand(parts)
            elif character != '"':
                parts[-1] += character
        return parts

    def _compute(self, expression: str) -> str:
        """Compute whole numbers, as bash does; variables may stand without a dollar."""
        names = _NAME.sub(lambda name: str(self._look_up(name[0], "0")), expression)
        try:
            return str(_evaluate(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, TypeError, ZeroDivisionError):
            self.remarks[f"the script's $(({expression})) is not computed"] = None
            return f"$(({expression}))"


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise TypeError(f"{ast.dump(node)} is no arithmetic of bash")
