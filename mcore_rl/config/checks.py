"""The shapes that rules come in: each raises ConfigError naming the setting and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.config.errors import ConfigError


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}; allowed: {', '.join(map(repr, allowed))}")


def at_least(key: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{key}={value}; allowed: at least {least}")


def positive(key: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{key}={value}; allowed: above 0")


def exists(key: str, path: str | Path) -> None:
    if not Path(path).exists():
        raise ConfigError(f"{key}={str(path)!r} does not exist")


def divides(key: str, size: int, what: str, number: int) -> None:
    if number % size:
        raise ConfigError(f"{key}={size} does not divide the model's {number} {what}")
