"""What command lines have in common: a parser that raises ConfigError, and axes as text."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from mcore_rl.config.errors import ConfigError

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parse_axes(option: str, text: str, kind: type[T]) -> T:
    """A layout of this kind from its axes, such as "tp=2,pp=4"; what is left out has its default.

    >>> from mcore_rl.config.schema import Layout
    >>> parse_axes("--layout", "tp=2,pp=4,first_stage_layers=3", Layout).first_stage_layers
    3

    Raises:
        ConfigError: an axis that there is not, or a value that is no whole number.
    """
    layout_class: Any = kind
    allowed = [field.name for field in fields(layout_class)]
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in allowed or name in found:
            what = "given twice" if name in found else "unknown"
            raise ConfigError(f"{option}={text}: {name!r} is {what}; allowed: {', '.join(allowed)}")
        if not re.fullmatch(r"[0-9]{1,6}", value):
            raise ConfigError(f"{option}={text}: {part!r}; allowed: {name}=NUMBER")
        found[name] = int(value)
    return kind(**found)
