"""Limits of settings, written into the types of their fields, and the check of a config by them.

tp: PositiveInt = 1
top_k: NonNegativeInt | None = None
schedule: Annotated[str, OneOf("constant", "linear")] = "constant"
modules: list[Annotated[str, OneOf("core_attn", "mlp")]] = field(default_factory=list)
"""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import date
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path

T = TypeVar("T")
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Limit(ABC):
    """The values that a setting may have. Its text says so in errors: "at least 1"."""

    @abstractmethod
    def allows(self, value: Any) -> bool:
        """Return whether a setting may have this value."""

    @abstractmethod
    def __str__(self) -> str: ...


class Range(Limit):
    """A limit of numbers. NaN is outside of each: every comparison with it is false."""


@dataclass(frozen=True)
class AtLeast(Range):
    least: float

    def allows(self, value: float) -> bool:
        return self.least <= value < math.inf

    def __str__(self) -> str:
        return f"at least {self.least}"


@dataclass(frozen=True)
class Above(Range):
    bound: float

    def allows(self, value: float) -> bool:
        return self.bound < value < math.inf

    def __str__(self) -> str:
        return f"above {self.bound}"


@dataclass(frozen=True)
class Between(Range):
    least: float
    most: float
    includes_least: bool = True
    includes_most: bool = True

    def allows(self, value: float) -> bool:
        is_high_enough = self.least <= value if self.includes_least else self.least < value
        return is_high_enough and (value <= self.most if self.includes_most else value < self.most)

    def __str__(self) -> str:
        if not self.includes_most:
            return f"at least {self.least}, below {self.most}"
        if not self.includes_least:
            return f"above {self.least}, up to {self.most}"
        return f"{self.least} to {self.most}"


@dataclass(frozen=True)
class MultipleOf(Range):
    size: int

    def allows(self, value: int) -> bool:
        return value >= self.size and value % self.size == 0

    def __str__(self) -> str:
        return f"multiples of {self.size}, at least one"


@dataclass(frozen=True)
class Finite(Limit):
    """No NaN and no infinity in a value of any type, at any depth."""

    def allows(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return all(map(self.allows, value.values()))
        if isinstance(value, list | tuple):
            return all(map(self.allows, value))
        return not isinstance(value, float) or math.isfinite(value)

    def __str__(self) -> str:
        return "a finite number"


@dataclass(frozen=True, init=False)
class OneOf(Limit):
    """Some texts; with a contract the import paths of its subclasses, too."""

    names: tuple[str, ...]
    contract: str

    def __init__(self, *names: str, contract: str = "") -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "contract", contract)

    def allows(self, value: str) -> bool:
        return value in self.names or bool(self.contract and is_import_path(value))

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.names))
        if not self.contract:
            return names
        return f"{names}, or the import path of a {self.contract}, path/to/file.py:Name"


class MegatronName(OneOf):
    """Some texts, which Megatron's backend checks: an engine of a user's own may have others."""

    def allows(self, value: str) -> bool:
        return True


class Importable(Limit):
    """A name of a registry, which checks it, or an import path; from Python a function or class."""

    def allows(self, value: Any) -> bool:
        return True

    def __str__(self) -> str:
        return "a name, or an import path"


class RowsOf(Limit):
    """A file, a folder or an import path, which their reader checks; from Python a list of rows."""

    def allows(self, value: Any) -> bool:
        return True

    def __str__(self) -> str:
        return "a file, a folder, or an import path"


class PoolName(OneOf):
    """Some texts, or any name of a pool of devices."""

    def allows(self, value: str) -> bool:
        is_own = value != "auto" and re.fullmatch("[A-Za-z][A-Za-z0-9_]*", value)
        return value in self.names or bool(is_own)

    def __str__(self) -> str:
        return f"{super().__str__()}, or the name of a pool, of letters, digits and '_'"


@dataclass(frozen=True)
class Matches(Limit):
    """A text that a regular expression matches in full."""

    pattern: str
    description: str

    def allows(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value, re.DOTALL) is not None

    def __str__(self) -> str:
        return self.description


@dataclass(frozen=True)
class NotEmpty(Limit):
    description: str = "a text that is not empty"

    def allows(self, value: str) -> bool:
        return bool(value)

    def __str__(self) -> str:
        return self.description


@dataclass(frozen=True)
class Date(Limit):
    may_be_empty: bool = False

    def allows(self, value: str) -> bool:
        try:  # fromisoformat knows other forms, too
            is_date = date.fromisoformat(value).isoformat() == value
        except ValueError:
            is_date = False
        return is_date or (self.may_be_empty and not value)

    def __str__(self) -> str:
        return "a date, YYYY-MM-DD"


@dataclass(frozen=True)
class FieldsOf(Limit):
    """A mapping of settings that are the fields of a dataclass, with their types and limits."""

    settings: type

    def allows(self, value: Any) -> bool:
        return isinstance(value, Mapping)

    def __str__(self) -> str:
        return f"settings, as in {{{fields(self.settings)[0].name}: VALUE}}"


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]
Fraction = Annotated[float, Between(0, 1)]
PlainName = Annotated[str, Matches("[A-Za-z0-9_-]+", "letters, digits, '_' and '-'")]


def check_limit(key: str, value: Any, limit: Limit) -> None:
    """Raise ConfigError, with the key and what is allowed, for a value outside of a limit."""
    if limit.allows(value):
        return
    is_one_sided = isinstance(limit, AtLeast | Above)
    finite = ", finite" if is_one_sided and not math.isfinite(value) else ""
    raise ConfigError(f"{key}={value!r}; allowed: {limit}{finite}")


def check_limits(key: str, config: Any) -> None:
    """Check the settings in a dataclass by the limits of their fields, at any depth.

    Args:
        key: Name of the settings, such as actor; "" for those of a whole run.

    Raises:
        ConfigError: A setting is outside of its limit.
    """
    hints = read_hints(config.__class__)
    for field in fields(config):
        name = f"{key}.{field.name}" if key else field.name
        check_value(name, getattr(config, field.name), hints[field.name])


def check_value(key: str, value: Any, hint: Any) -> None:
    """Check a value by the limits in its type, such as list[PositiveInt]; None has none.

    Raises:
        ConfigError: The value, or one inside it, is outside of its limit.
    """
    if value is None:
        return
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for limit in hint.__metadata__:
            check_limit(key, value, limit)
            if isinstance(limit, FieldsOf):
                build_settings(key, limit.settings, value)
        check_value(key, value, parts[0])
    elif origin in (Union, UnionType):
        for part in parts:
            check_value(key, value, part)
    elif is_dataclass(value):
        check_limits(key, value)
    elif isinstance(value, Mapping) and parts:
        for name, entry in value.items():
            for limit in list_limits(parts[0]):
                if not limit.allows(str(name)):
                    raise ConfigError(f"{key}.{name}; allowed: names of {limit}")
            check_value(f"{key}.{name}", entry, parts[1])
    elif isinstance(value, list | tuple) and parts:
        for index, entry in enumerate(value):
            check_value(f"{key}[{index}]", entry, parts[0])


def build_settings(key: str, cls: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass of settings from a mapping of its fields.

    Raises:
        ConfigError: A field is unknown, of another type, or outside of its limit.
    """
    types, settings = get_type_hints(cls), {}
    limits = read_hints(cls)  # type: ignore[arg-type]  # mypy: type[T] might not be hashable
    for name, value in values.items():
        if name not in types:
            raise ConfigError(f"{key}.{name} is unknown; allowed: {', '.join(types)}")
        is_union = get_origin(types[name]) in (Union, UnionType)
        allowed = get_args(types[name]) if is_union else [types[name]]
        kinds = [get_origin(kind) or kind for kind in allowed]
        if type(value) is int and float in kinds:
            value = float(value)
        if type(value) not in kinds:
            names = [TYPE_NAMES.get(k, "{name: value}") for k in kinds if k is not NoneType]
            raise ConfigError(f"{key}.{name}={value!r}; allowed: {', '.join(names)}")
        check_value(f"{key}.{name}", value, limits[name])
        settings[name] = value
    return cls(**settings)


@functools.cache
def read_hints(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, with their limits."""
    return get_type_hints(cls, include_extras=True)


def list_limits(hint: Any) -> Iterator[Limit]:
    """Yield the limits in a type: of the value itself, or of the entries of a list."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    if get_origin(hint) in (Annotated, Union, UnionType, list):
        for part in get_args(hint):
            yield from list_limits(part)
