"""Settings that a script or notebook has given as Python objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import Importable, OneOf, RowsOf, list_limits, read_hints
from mcore_rl.config.python_objects import keep_objects, register_function, register_rows

T = TypeVar("T")


@contextlib.contextmanager
def name_objects(config: T) -> Iterator[T]:
    """Yield a copy of settings with names in place of Python objects, which are found inside.

    Functions and classes may stand where a setting takes an import path, and in the settings of
    functions; rows where it takes a file of rows.

    Raises:
        ConfigError: A setting takes no object, or workers cannot have this one.
    """
    with keep_objects():
        yield _name_objects("", config, type(config))


def _name_objects(key: str, value: Any, hint: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        hints = read_hints(type(value))
        names = {name: f"{key}.{name}".lstrip(".") for name in hints}
        entries = {n: _name_objects(names[n], getattr(value, n), hints[n]) for n in hints}
        return replace(value, **entries)
    if isinstance(value, Path):
        return str(value)
    kind = hint
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    parts = get_args(kind)
    if isinstance(value, Mapping) and (kind is Any or get_origin(kind) is dict):
        inner = parts[1] if parts else Any
        return {n: _name_objects(f"{key}.{n}", entry, inner) for n, entry in value.items()}
    if isinstance(value, list | tuple) and (kind is Any or get_origin(kind) is list):
        inner = parts[0] if parts else Any
        return [_name_objects(f"{key}[{i}]", entry, inner) for i, entry in enumerate(value)]
    return _name_object(key, value, hint)


def _name_object(key: str, value: Any, hint: Any) -> Any:
    """Return the name of an object, and any other value as it is."""
    limits = [*list_limits(hint)]
    takes_rows = any(isinstance(limit, RowsOf) for limit in limits)
    takes_functions = hint is Any or any(
        isinstance(limit, Importable) or (isinstance(limit, OneOf) and limit.contract)
        for limit in limits
    )
    if isinstance(value, str) or value is None:
        return value
    if takes_rows:
        return _name_rows(key, value)
    if callable(value) and not takes_functions:
        raise ConfigError(f"{key}={value!r}; allowed: no Python object in this setting")
    return register_function(key, value) if callable(value) else value


def _name_rows(key: str, rows: Any) -> str:
    name = key.rpartition(".")[2].replace("[", "_").rstrip("]")
    if callable(rows):
        return register_rows(name, rows)
    if isinstance(rows, bytes | Mapping) or not hasattr(rows, "__iter__"):
        raise ConfigError(
            f"{key} is a {type(rows).__name__}; allowed: a file or folder, an import path, a list "
            "of dicts, a Dataset of `datasets`, or a function that returns one of these"
        )
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        rows = [*rows]  # a generator gives its rows once
    return register_rows(name, rows)
