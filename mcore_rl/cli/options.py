"""Shared by all command lines: parsers with suggestions in errors, layouts as text, printing."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_engine import smallest_dp
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout

L = TypeVar("L", Layout, GenerationLayout)
AXES = "tp pp cp dp ep etp vpp; without dp, the smallest that fits"
SERVED_AXES = "tp pp dp ep, of vLLM; without dp, the smallest that fits"


def closest(word: str, words: Iterable[str]) -> list[str]:
    """Up to three of `words` that are spelled like `word`, the most similar first."""
    return difflib.get_close_matches(word, list(words), n=3, cutoff=0.7)


def wrap_descriptions(meanings: Mapping[str, str], indent: int = 0) -> Iterator[str]:
    """Lines of names and what they mean, in columns that fit on the screen."""
    width = min(shutil.get_terminal_size().columns, 100)
    beside = max(map(len, meanings)) + 2
    for name, meaning in meanings.items():
        first = f"{' ' * indent}{name:{beside}}"
        yield from textwrap.wrap(
            meaning, width, initial_indent=first, subsequent_indent=" " * len(first)
        )


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for what it does not know, with similar words."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """What a subcommand does not know is refused by it, not by the command around it."""
        known = [name for action in self._actions for name in action.option_strings]
        if not self.has_subcommands:
            for name in (arg.partition("=")[0] for arg in args or () if arg.startswith("--")):
                if not any(option.startswith(name) for option in known):
                    self._refuse("option", name, known)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self._refuse("argument", rest[0], known)
        return found, rest

    @property
    def has_subcommands(self) -> bool:
        return self._subparsers is not None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self._refuse(action.dest, str(value), [str(choice) for choice in action.choices])

    def _refuse(self, what: str, word: str, known: Sequence[str]) -> NoReturn:
        close = closest(word, known)
        hint = f"did you mean {' or '.join(close)}?" if close else f"allowed: {', '.join(known)}"
        self.error(f"unknown {what} {word!r}; {hint}")


def parse_layout(option: str, text: str, kind: type[L]) -> L:
    """A layout of this kind from its axes, such as "tp=2,pp=4".

    What is left out has its default, but for dp: it is the smallest that fits the other axes.

    >>> parse_layout("--layout", "tp=2,ep=4", Layout).dp
    2
    >>> parse_layout("--layout", "tp=2,pp=4,first_stage_layers=3", Layout).first_stage_layers
    3

    Raises:
        ConfigError: an axis that there is not, or a value that is no whole number.
    """
    allowed = [field.name for field in fields(kind)]
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in allowed or name in found:
            what = "given twice" if name in found else "unknown"
            raise ConfigError(f"{option}={text}: {name!r} is {what}; allowed: {', '.join(allowed)}")
        if not re.fullmatch(r"[0-9]{1,6}", value):
            raise ConfigError(f"{option}={text}: {part!r}; allowed: {name}=NUMBER")
        found[name] = int(value)
    if "dp" in found or 0 in found.values():  # a rule of the layout refuses the 0 by its name
        return kind(**found)
    if kind is GenerationLayout:  # experts are split over tp ranks of as many engines as needed
        return kind(**found, dp=max(1, found.get("ep", 1) // found.get("tp", 1)))
    return kind(**found, dp=smallest_dp(Layout(**found)))


def show(text: str) -> None:
    """Print; a reader that has seen enough (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python would complain about the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
