"""Implementations of a setting: functions with typed settings, by name or by import path."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path, load_user_function

F = TypeVar("F", bound=Callable[..., Any])  # the function, once its settings are bound
G = TypeVar("G", bound=Callable[..., Any])

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Registry(Generic[F]):
    """Maps the values of one setting to functions; filled at import.

    A value is the name of a registered function, or the import path of one outside the package:
    `module:function` or `path/to/file.py:function`. A function takes `parameters` and, where it has
    settings, one more called `settings`, whose annotation is a frozen dataclass of them. It may
    have those of the parameters in `optional` that it needs, and gets them by name.
    """

    def __init__(
        self,
        setting: str,
        parameters: Sequence[str],
        settings_key: str = "",
        optional: Sequence[str] = (),
    ) -> None:
        self.setting = setting  # its full key, for error messages
        self.settings_key = settings_key or f"{setting}_settings"  # where settings are given
        self._parameters, self._optional = tuple(parameters), tuple(optional)
        self._functions: dict[str, Callable[..., Any]] = {}

    def at(self, setting: str, settings_key: str) -> Registry[F]:
        """The same functions for another setting."""
        other = copy.copy(self)
        other.setting, other.settings_key = setting, settings_key
        return other

    def register(self, name: str) -> Callable[[G], G]:
        """Decorator that adds its target under `name`; a name taken twice is a ValueError."""

        def add(function: G) -> G:
            if name in self._functions:
                raise ValueError(f"{self.setting}: {name!r} is registered twice")
            self._functions[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The function as it was written.

        Raises:
            ConfigError: nothing has that name, or the import path leads to no such function.
        """
        if is_import_path(name):
            return load_user_function(self.setting, name)
        try:
            return self._functions[name]
        except KeyError:
            raise ConfigError(
                f"{self.setting}={name!r} is unknown; allowed: {', '.join(self.names)}, or an "
                "import path, module:function or path/to/file.py:function"
            ) from None

    def bound(self, name: str, settings: Mapping[str, object]) -> F:
        """The function with its settings filled in, by their defaults where none are given.

        Raises:
            ConfigError: as for `[name]`; the function takes other parameters; or a setting is
                unknown to it, missing, of another type, or a number that is not finite where its
                default is.
        """
        function, made = self[name], self.settings(name, settings)
        return cast(F, function if made is None else functools.partial(function, settings=made))

    def settings(self, name: str, given: Mapping[str, object]) -> object | None:
        """The settings of a function as its dataclass; None if it has none. Raises as `bound`."""
        kind = self.settings_of(name)
        if kind is not None:
            return self._settings(name, kind, given)
        if given:
            raise ConfigError(
                f"{self.settings_key}={dict(given)}: {self.setting}={name!r} has no settings"
            )
        return None

    def settings_of(self, name: str) -> type | None:
        """The dataclass of the settings of a function, if it has any."""
        function, what = self[name], f"{self.setting}={name!r}"
        try:
            signature = inspect.signature(function, eval_str=True)
        except (NameError, TypeError, ValueError) as error:
            raise ConfigError(f"{what}: its signature cannot be read: {error}") from error
        found = signature.parameters.get("settings")
        by_name = {*self._optional, "settings"} & set(signature.parameters)
        try:
            signature.bind(*self._parameters, **dict.fromkeys(by_name))
        except TypeError:
            more = f", any of {', '.join(self._optional)}" if self._optional else ""
            raise ConfigError(
                f"{what} takes {signature}; allowed: ({', '.join(self._parameters)}){more}, and a "
                "last parameter called settings where it has any"
            ) from None
        if found is None:
            return None
        kind = found.annotation
        if not (isinstance(kind, type) and is_dataclass(kind) and _is_frozen(kind)):
            raise ConfigError(
                f"{what}: its parameter settings is annotated as {kind!r}; allowed: a frozen "
                "dataclass"
            )
        for field, kinds in _kinds_of(kind).items():
            if not set(kinds) <= {*_KINDS, NoneType}:
                raise ConfigError(
                    f"{what}: the field {field} of its settings is annotated as {kinds}; allowed: "
                    f"{', '.join(allowed.__name__ for allowed in _KINDS)}, or None beside one"
                )
        return kind

    @property
    def names(self) -> list[str]:
        return sorted(self._functions)

    def _settings(self, name: str, kind: type, given: Mapping[str, object]) -> object:
        known, what = _kinds_of(kind), f"{self.setting}={name!r}"
        infinite = {f.name for f in fields(kind) if f.default in (math.inf, -math.inf)}
        for key in given:
            if key not in known:
                raise ConfigError(
                    f"{self.settings_key}.{key} is no setting of {what}; allowed: "
                    f"{', '.join(known) or 'none'}"
                )
        for field in fields(kind):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            if not has_default and field.name not in given:
                raise ConfigError(f"{self.settings_key}.{field.name} is needed by {what}")
        values = {
            key: _typed(f"{self.settings_key}.{key}", value, known[key], key in infinite)
            for key, value in given.items()
        }
        try:
            return kind(**values)
        except ValueError as error:  # from the settings' __post_init__
            raise ConfigError(f"{self.settings_key}.{error}") from error


def _is_frozen(kind: type) -> bool:
    return bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _kinds_of(settings: type) -> dict[str, tuple[Any, ...]]:
    """The types that each field of a dataclass may have."""
    hints = get_type_hints(settings)
    names = [field.name for field in fields(settings) if field.init]
    unions = {name: get_origin(hints[name]) in (Union, UnionType) for name in names}
    return {name: get_args(hints[name]) if unions[name] else (hints[name],) for name in names}


def _typed(key: str, value: object, allowed: Sequence[Any], may_be_infinite: bool) -> object:
    """The value as one of these types. NaN, which every check of a range lets pass, is none."""
    for kind in allowed:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind:
            if isinstance(value, float) and (
                math.isnan(value) or (math.isinf(value) and not may_be_infinite)
            ):
                raise ConfigError(f"{key}={value}; allowed: a finite number")
            return value
    words = [_KINDS[kind] for kind in allowed if kind is not NoneType]
    empty = ["null"] if NoneType in allowed else []
    raise ConfigError(f"{key}={value!r}; allowed: {', '.join([*words, *empty])}")
