"""Parts of all commands: parsers with suggestions in errors, layouts as text, printing."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mcore_rl.config.atomic_file import write_file
from mcore_rl.config.checks import find_closest
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import find_smallest_dp
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout

L = TypeVar("L", Layout, GenerationLayout)
AXES = "tp pp cp dp ep etp vpp; without dp, the smallest that fits"
FAMILY = "import path of a model family of your own, as model.family"
SERVED_AXES = "tp pp dp ep, of vLLM; without dp, the smallest that fits"


def wrap_descriptions(meanings: Mapping[str, str], indent: int = 0) -> Iterator[str]:
    """Yield lines of names and meanings, in columns that fit on the screen."""
    width = min(shutil.get_terminal_size().columns, 100)
    beside = max(map(len, meanings)) + 2
    for name, meaning in meanings.items():
        first = f"{' ' * indent}{name:{beside}}"
        yield from textwrap.wrap(
            meaning, width, initial_indent=first, subsequent_indent=" " * len(first)
        )


def write_option_file(path: Path, text: str, option: str) -> None:
    """Write a file that an option names, never a part of it.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        write_file(path, text)
    except OSError as error:
        raise ConfigError(f"{option}={str(path)!r} cannot be written: {error.strerror}") from error


class Parser(argparse.ArgumentParser):
    """Parser that raises ConfigError for unknown words, with similar ones."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse unknown words of a subcommand here, not in the command around it.

        Settings may stand before and after options.
        """
        known = [name for action in self._actions for name in action.option_strings]
        if self._subparsers is None:
            for name in (arg.partition("=")[0] for arg in args or () if arg.startswith("--")):
                if not any(option.startswith(name) for option in known):
                    self._refuse("option", name, known)
        if any(action.dest == "settings" for action in self._actions):
            args = self._move_settings(args or ())
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self._refuse("argument", rest[0], known)
        return options, rest

    def _move_settings(self, args: Sequence[str]) -> list[str]:
        """Return the words with the settings first: argparse takes those of one place only."""
        settings, flags = [], []
        option: argparse.Action | None = None  # whose values may follow
        for word in args:
            if word.startswith("-"):
                flags.append(word)
                option = None if "=" in word else self.find_option(word)
            elif option is not None and (option.nargs is None or "=" not in word):
                flags.append(word)
                option = option if option.nargs else None
            else:
                settings.append(word)
        return [*settings, *flags]

    def find_option(self, word: str) -> argparse.Action | None:
        """Return the option that a word names, or its first letters, if it takes a value."""
        names = self._option_string_actions
        matches = [name for name in names if len(word) > 2 and name.startswith(word)]
        option = names.get(word) or (names[matches[0]] if matches else None)
        return option if option is not None and option.nargs != 0 else None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self._refuse(action.dest, str(value), [str(choice) for choice in action.choices])

    def _refuse(self, what: str, word: str, known: Sequence[str]) -> NoReturn:
        close = find_closest(word, known)
        hint = f"did you mean {' or '.join(close)}?" if close else f"allowed: {', '.join(known)}"
        self.error(f"unknown {what} {word!r}; {hint}")


def parse_layout(option: str, text: str, kind: type[L]) -> L:
    """Parse the axes of a layout, such as "tp=2,pp=4".

    An axis that is left out has its default, except dp: the smallest that fits the other axes.

    >>> parse_layout("--layout", "tp=2,ep=4", Layout).dp
    2
    >>> parse_layout("--layout", "tp=2,pp=4,first_stage_layers=3", Layout).first_stage_layers
    3

    Raises:
        ConfigError: An unknown axis, or a value that is no whole number.
    """
    allowed = [field.name for field in fields(kind)]
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in allowed or name in sizes:
            what = "given twice" if name in sizes else "unknown"
            raise ConfigError(f"{option}={text}: {name!r} is {what}; allowed: {', '.join(allowed)}")
        if not re.fullmatch(r"[0-9]{1,6}", value):
            raise ConfigError(f"{option}={text}: {part!r}; allowed: {name}=NUMBER")
        sizes[name] = int(value)
    if "dp" in sizes or 0 in sizes.values():  # a rule of the layout refuses the 0 by its name
        return kind(**sizes)
    if kind is GenerationLayout:  # experts are split over tp ranks of as many engines as needed
        return kind(**sizes, dp=max(1, sizes.get("ep", 1) // sizes.get("tp", 1)))
    return kind(**sizes, dp=find_smallest_dp(Layout(**sizes)))


def print_text(text: str) -> None:
    """Print; ignore a reader that closes the pipe early, as `| head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python would complain about the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
