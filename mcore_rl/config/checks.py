"""Checks of single settings. Each raises ConfigError with the setting and what is allowed."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import Above, AtLeast, Between, OneOf, check_limit
from mcore_rl.config.regular_file import check_entries

MAX_INT = 2**53  # what JSON and float64 hold, and int64 holds a multiple of
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095  # of Linux: NAME_MAX, PATH_MAX without its NUL
_IS_PATH = re.compile(r"(^|[._])(resume|(dir|path|file)s?(\.\w+)?|sets\.\w+)$")
_IS_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_LIKE_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def check_values(config: Any) -> None:
    """Check all settings for huge numbers, NUL characters and paths that are too long.

    Raises:
        ConfigError: a number beyond 2**53, a text with NUL, or a path that Linux finds too long.
    """
    for key, value in list_values("", config):
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise ConfigError(f"{key}={value}; allowed: -2**53 to 2**53")
        if not isinstance(value, str):
            continue
        if "\0" in value:
            raise ConfigError(f"{key}={shorten(value)}; allowed: text without NUL characters")
        if _IS_PATH.search(key):
            check_path(key, value)
        if key in ("output_dir", "resume") and is_url(value):
            raise ConfigError(
                f"{key}={value!r} is a URL; allowed: a local folder (checkpoint.export_to copies "
                "the result to a URL)"
            )


def is_url(text: str) -> bool:
    """Return whether a text begins with a protocol, as s3://bucket/name does."""
    return _IS_URL.match(text) is not None


def list_values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value inside a config, with its full key."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from list_values(f"{key}.{name}" if key else str(name), entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from list_values(key, entry)
    else:
        yield key, value


def check_path(key: str, path: str) -> None:
    """Check that Linux takes a text as a path: not too long, and without half a surrogate pair."""
    try:
        size, longest = (max(map(len, map(os.fsencode, p))) for p in ([path], path.split("/")))
    except UnicodeEncodeError as error:
        raise ConfigError(f"{key}={shorten(path)}; allowed: text that UTF-8 can write") from error
    if longest > _MAX_NAME_BYTES or size > _MAX_PATH_BYTES:
        raise ConfigError(
            f"{key}={shorten(path)} is too long: {size} bytes, {longest} in one name; allowed: up "
            f"to {_MAX_PATH_BYTES}, and {_MAX_NAME_BYTES} in one name"
        )


def shorten(value: object, most: int = 80) -> str:
    """Return the repr of a value; cut the middle out of a long one, so that it fills no screen.

    >>> shorten("a" * 200, 20)
    "'aaaaaaaa...aaaaaa'"
    """
    text = repr(value)
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[: half + 1]}...{text[-half + 1 :]}"


def find_closest(word: str, words: Iterable[str]) -> list[str]:
    """Return up to three of `words` that are spelled like `word`, the most similar first."""
    return difflib.get_close_matches(word, list(words), n=3, cutoff=0.7)


def check_choice(key: str, value: str, allowed: Iterable[str]) -> None:
    check_limit(key, value, OneOf(*allowed))


def check_at_least(key: str, value: float, least: float) -> None:
    check_limit(key, value, AtLeast(least))


def check_positive(key: str, value: float) -> None:
    check_limit(key, value, Above(0))


def check_between(key: str, value: float, least: float, most: float) -> None:
    check_limit(key, value, Between(least, most))


def check_exists(key: str, path: str | Path) -> None:
    try:
        is_there = Path(path).exists()
    except OSError as error:  # a folder on the way that is closed to this user
        raise ConfigError(f"{key}={shorten(str(path))} cannot be read: {error.strerror}") from error
    if not is_there:
        raise ConfigError(f"{key}={str(path)!r} does not exist")


def check_model_exists(key: str, path: str | Path) -> None:
    """Check that a model's folder exists and has regular files; say how models are fetched."""
    try:
        check_exists(key, path)
        if Path(path).is_dir():
            check_entries(path)
    except OSError as error:
        raise ConfigError(
            f"{key}={str(path)!r}: {error.filename} cannot be read: {error.strerror}"
        ) from error
    except ConfigError as error:
        name, hint = str(path), ""
        if "models--" in name or os.environ.get("MCORE_RL_CACHE", "\0") in name:
            hint = (
                " on this node; on several nodes HF_HOME or MCORE_RL_CACHE must be in a file system"
                " that all share"
            )
        elif _LIKE_HUB_NAME.fullmatch(name) and not Path(name).parent.exists():
            hint = f"; did you mean hf:{name}?"
        raise ConfigError(f"{error}{hint}") from error


def check_divides(key: str, size: int, what: str, number: int) -> None:
    if number % size:
        raise ConfigError(f"{key}={size} does not divide the model's {number} {what}")


def check_cores(key: str, cores: str, num_workers: int) -> None:
    """Check the CPU cores of the workers of a server on a node; "" sets none."""
    if cores and len(cores.split("|")) != num_workers:
        raise ConfigError(
            f"{key}={cores!r} must list the cores of each of a node's {num_workers} workers of a "
            "server, separated by '|'"
        )
    if cores and not re.fullmatch("[0-9]+([-,|][0-9]+)*", cores):
        raise ConfigError(f"{key}={cores!r}; allowed: numbers and ranges such as '0-3,8|4-7'")


def read_secret(setting: str, variable: str) -> str:
    """Read an environment variable that a setting names; ConfigError if it is no valid header."""
    value = os.environ.get(variable, "")
    if not value or not (value.isascii() and value.isprintable()):
        what = "is no printable ASCII" if value else "is not set"
        raise ConfigError(
            f"{setting} names the environment variable {variable!r}, which {what}; allowed: one "
            "that is set where the run starts and on each node with generation servers"
        )
    return value
