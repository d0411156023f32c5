"""Checks of settings: each raises ConfigError naming the setting and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from mcore_rl.config.errors import ConfigError


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}; allowed: {', '.join(map(repr, allowed))}")


def at_least(key: str, value: float, least: float) -> None:
    if not least <= value < math.inf:  # false for NaN, as every comparison with it
        raise ConfigError(f"{key}={value}; allowed: at least {least}{_finite(value)}")


def positive(key: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{key}={value}; allowed: above 0{_finite(value)}")


def iso_date(key: str, value: str) -> None:
    try:
        is_date = date.fromisoformat(value).isoformat() == value  # it knows other forms, too
    except ValueError:
        is_date = False
    if not is_date:
        raise ConfigError(f"{key}={value!r}; allowed: a date, YYYY-MM-DD")


def between(key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{key}={value}; allowed: {least} to {most}")


def _finite(value: float) -> str:
    return "" if -math.inf < value < math.inf else ", finite"


def exists(key: str, path: str | Path) -> None:
    if not Path(path).exists():
        raise ConfigError(f"{key}={str(path)!r} does not exist")


def divides(key: str, size: int, what: str, number: int) -> None:
    if number % size:
        raise ConfigError(f"{key}={size} does not divide the model's {number} {what}")


def check_cores(key: str, cores: str, num_workers: int) -> None:
    """Those of a server's workers on a node, or ""."""
    if cores and len(cores.split("|")) != num_workers:
        raise ConfigError(
            f"{key}={cores!r} must list the cores of each of a node's {num_workers} workers of a "
            "server, separated by '|'"
        )
    if cores and not re.fullmatch("[0-9]+([-,|][0-9]+)*", cores):
        raise ConfigError(f"{key}={cores!r}; allowed: numbers and ranges such as '0-3,8|4-7'")
