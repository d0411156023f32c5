"""Settings that are passed to a class of an engine's library by field: checks by name and type.

A mapping such as actor.megatron or rollout.engine names fields of the installed class. Fields that
other settings decide, and fields that would be wrong here, are refused with the reason. Pure: the
engine gives the classes.
"""

from __future__ import annotations

import enum
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from mcore_rl.config.checks import find_closest, shorten
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import TYPE_NAMES

_SEQUENCES: dict[Any, Callable[[list[Any]], Any]] = {list: list, tuple: tuple, set: set}


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Fields that are refused. Names may be patterns of fnmatch, such as "fp8_*".

    Attributes:
        library: Name and version in errors, such as "megatron-core 0.19.2".
        owned: The settings that decide a field, by its name. "{key}" stands for the settings of
            the engine or server, such as "actor".
        denied: Why a field would be wrong here, by its name.
        values: The values that are allowed of a field, and why no others are.
    """

    library: str
    owned: Mapping[str, str]
    denied: Mapping[str, str]
    values: Mapping[str, tuple[Sequence[Any], str]] = field(default_factory=dict)


class _MismatchError(Exception):
    """A value is not of a field's type; `path` leads to it inside the field."""

    def __init__(self, path: str, value: object, allowed: str) -> None:
        super().__init__(path, value, allowed)
        self.path, self.value, self.allowed = path, value, allowed


def check_refused(key: str, values: Mapping[str, Any], rules: FieldRules) -> None:
    """Check fields against the rules alone, without the library.

    Args:
        key: Name of the mapping, such as "actor.megatron".
        values: By field.

    Raises:
        ConfigError: A field is refused.
    """
    owner = key.rpartition(".")[0] or key
    for name, value in values.items():
        where = f"{key}.{name}={shorten(value)}"
        if setting := find_rule(rules.owned, name):
            setting = setting.format(key=owner)
            raise ConfigError(f"{where}: {setting} decides this field; allowed: {setting}")
        if reason := find_rule(rules.denied, name):
            raise ConfigError(f"{where}: {reason.format(key=owner)}; allowed: not to set it")
        if name in rules.values:
            allowed, reason = rules.values[name]
            if value not in allowed:
                raise ConfigError(f"{where}: {reason}; allowed: {', '.join(map(repr, allowed))}")


def find_rule(table: Mapping[str, str], name: str) -> str:
    """Return the entry of a field in `owned` or `denied`; "" if there is none."""
    if name in table:
        return table[name]
    return next((text for pattern, text in table.items() if fnmatchcase(name, pattern)), "")


def convert_fields(
    key: str, values: Mapping[str, Any], classes: Sequence[type], rules: FieldRules
) -> dict[type, dict[str, Any]]:
    """Return the fields of each class, with values of their types. All that have a name get it.

    Raises:
        ConfigError: A field is refused, no class has it, or its value has another type.
    """
    check_refused(key, values, rules)
    hints = {cls: read_hints(cls) for cls in classes}
    known = sorted({name for names in hints.values() for name in names})
    converted: dict[type, dict[str, Any]] = {cls: {} for cls in classes}
    for name, value in values.items():
        if name not in known:
            names = " or ".join(cls.__name__ for cls in classes)
            close = find_closest(str(name), known)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(
                f"{key}.{name}: {rules.library} has no such field; allowed: fields of {names}{hint}"
            )
        for cls in classes:
            if name not in hints[cls]:
                continue
            try:
                converted[cls][name] = _convert(hints[cls][name], value)
            except _MismatchError as error:
                raise ConfigError(
                    f"{key}.{name}{error.path}={shorten(error.value)}; allowed: {error.allowed}"
                ) from error
    return converted


@cache
def read_hints(cls: type) -> dict[str, Any]:
    """Return the types of the arguments of a dataclass by field.

    A type that the class's module imports for type checkers only is Any.
    """
    names: dict[str, Any] = {}
    while True:
        try:
            hints = typing.get_type_hints(cls, localns=names)
        except NameError as error:
            if error.name is None or error.name in names:
                raise
            names[error.name] = Any
        else:
            break
    return {entry.name: hints[entry.name] for entry in fields(cls) if entry.init}


def _convert(hint: Any, value: Any) -> Any:
    """Return a value of YAML as one of a type; raise _MismatchError if it is none."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _convert(arguments[0], value)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, arguments, value)
    if hint is Any:
        return value
    is_right = False
    if origin is typing.Literal:
        is_right = any(type(value) is type(entry) and value == entry for entry in arguments)
    elif hint is float:
        is_right = type(value) in (int, float)
    elif hint in (bool, int, str):
        is_right = type(value) is hint
    elif hint in (None, type(None)):
        is_right = value is None
    elif (origin or hint) in _SEQUENCES and isinstance(value, list | tuple):
        return _convert_sequence(hint, value)
    elif (origin or hint) is dict and isinstance(value, Mapping):
        return {
            name: _convert_inside(f".{name}", arguments[1], entry) if arguments else entry
            for name, entry in value.items()
        }
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = [m for m in hint if value in (m.name, m.value) and not isinstance(value, bool)]
        is_right, value = bool(members), members[0] if members else value
    elif _is_torch_dtype(hint):
        converted = getattr(sys.modules["torch"], str(value), None)
        is_right, value = isinstance(converted, hint), converted or value
    elif is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return _build(hint, value)
    if not is_right:
        raise _MismatchError("", value, describe(hint))
    return value


def _convert_union(hint: Any, arguments: tuple[Any, ...], value: Any) -> Any:
    inner: _MismatchError | None = None
    for argument in arguments:
        try:
            return _convert(argument, value)
        except _MismatchError as error:
            inner = error if error.path else inner
    raise inner or _MismatchError("", value, describe(hint))


def _convert_sequence(hint: Any, value: Sequence[Any]) -> Any:
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    is_fixed = kind is tuple and arguments and arguments[-1] is not ...
    if is_fixed and len(value) != len(arguments):
        raise _MismatchError("", list(value), describe(hint))
    hints = arguments if is_fixed else [arguments[0] if arguments else Any] * len(value)
    pairs = enumerate(zip(hints, value, strict=True))
    return _SEQUENCES[kind]([_convert_inside(f"[{i}]", hint, entry) for i, (hint, entry) in pairs])


def _convert_inside(path: str, hint: Any, value: Any) -> Any:
    try:
        return _convert(hint, value)
    except _MismatchError as error:
        raise _MismatchError(path + error.path, error.value, error.allowed) from error


def _build(cls: type, value: Mapping[str, Any]) -> Any:
    """Build a dataclass that is the type of a field from a mapping of its own fields."""
    hints = read_hints(cls)
    for name in value:
        if name not in hints:
            raise _MismatchError(f".{name}", value[name], f"fields of {cls.__name__}")
    arguments = {name: _convert_inside(f".{name}", hints[name], v) for name, v in value.items()}
    try:
        return cls(**arguments)
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise _MismatchError("", dict(value), f"what {cls.__name__} takes ({reason})") from error


def _is_torch_dtype(hint: Any) -> bool:
    return (getattr(hint, "__module__", ""), getattr(hint, "__name__", "")) == ("torch", "dtype")


def describe(hint: Any) -> str:
    """Return the values of a type in words.

    >>> describe(int | None)
    'a whole number or null'
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return describe(arguments[0])
    if hint in TYPE_NAMES:
        return TYPE_NAMES[hint]
    if hint in (None, type(None)):
        return "null"
    if origin is typing.Literal:
        return ", ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if (origin or hint) in _SEQUENCES:
        inner = {describe(argument) for argument in arguments if argument is not ...}
        return f"a list of {' and '.join(sorted(inner))}" if inner else "a list"
    if (origin or hint) is dict:
        return "a mapping, {name: value}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(repr(member.name) for member in hint)
    if _is_torch_dtype(hint):
        return "a dtype of torch, such as 'bfloat16'"
    if is_dataclass(hint) and isinstance(hint, type):
        return f"a mapping of fields of {hint.__name__}"
    return f"nothing that a setting can say (the field takes {hint})"
