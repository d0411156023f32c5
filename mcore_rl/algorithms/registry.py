"""Registry of the functions that a setting names, with typed settings of their own."""

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
from mcore_rl.config.limits import TYPE_NAMES

F = TypeVar("F", bound=Callable[..., Any])  # the function, once its settings are bound
G = TypeVar("G", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Map from the values of one setting to functions; filled at import.

    A value is the name of a registered function, or the import path of one outside the package:
    `module:function` or `path/to/file.py:function`. A function takes `parameters`, or only the
    first `min_parameters` or more of them, any of `optional` by name, and, if it has settings, a
    parameter `settings` annotated with a frozen dataclass.
    """

    def __init__(
        self,
        setting: str,
        parameters: Sequence[str],
        settings_key: str = "",
        optional: Sequence[str] = (),
        min_parameters: int | None = None,
    ) -> None:
        self.setting = setting  # full key, for error messages
        self.settings_key = settings_key or f"{setting}_settings"  # key of the settings
        self._parameters, self._optional = tuple(parameters), tuple(optional)
        self._min_parameters = len(parameters) if min_parameters is None else min_parameters
        self._functions: dict[str, Callable[..., Any]] = {}
        self._paths: dict[str, str] = {}  # import paths of functions that are loaded on use

    def copy_for(self, setting: str, settings_key: str) -> Registry[F]:
        """Return a registry of the same functions for another setting."""
        registry = copy.copy(self)
        registry.setting, registry.settings_key = setting, settings_key
        return registry

    def register(self, name: str) -> Callable[[G], G]:
        """Add a function under `name`, as a decorator; a name taken twice is a ValueError."""

        def add(function: G) -> G:
            if name in self._functions:
                raise ValueError(f"{self.setting}: {name!r} is registered twice")
            self._functions[name] = function
            return function

        return add

    def register_path(self, name: str, path: str) -> None:
        """Add the function of an import path under `name`; it is loaded on use."""
        self._paths[name] = path

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return the function of a name or an import path.

        Raises:
            ConfigError: nothing has that name, or the import path leads to no such function.
        """
        path = self._paths.get(name, name)
        if is_import_path(path):
            return load_user_function(self.setting, path)
        try:
            return self._functions[name]
        except KeyError:
            raise ConfigError(
                f"{self.setting}={name!r} is unknown; allowed: {', '.join(self.names)}, or an "
                "import path, module:function or path/to/file.py:function"
            ) from None

    def bind(self, name: str, values: Mapping[str, object]) -> F:
        """Return the function with its settings bound; those not in `values` have their defaults.

        Raises:
            ConfigError: as for `[name]`; the function takes other parameters; or a setting is
                unknown to it, missing, of another type, or a number that is not finite where its
                default is.
        """
        function, settings = self[name], self.build_settings(name, values)
        bound = function if settings is None else functools.partial(function, settings=settings)
        return cast(F, bound)

    def build_settings(self, name: str, values: Mapping[str, object]) -> object | None:
        """Build the settings of a function as its dataclass; None if it has none.

        Raises:
            ConfigError: as for `bind`.
        """
        cls = self.get_settings_class(name)
        if cls is None:
            if values:
                raise ConfigError(
                    f"{self.settings_key}={dict(values)}: {self.setting}={name!r} has no settings"
                )
            return None
        types, what = _get_field_types(cls), f"{self.setting}={name!r}"
        for key in values:
            if key not in types:
                raise ConfigError(
                    f"{self.settings_key}.{key} is no setting of {what}; allowed: "
                    f"{', '.join(types) or 'none'}"
                )
        for field in fields(cls):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            if not has_default and field.name not in values:
                raise ConfigError(f"{self.settings_key}.{field.name} is needed by {what}")
        infinite = {f.name for f in fields(cls) if f.default in (math.inf, -math.inf)}
        converted = {
            key: _convert(f"{self.settings_key}.{key}", value, types[key], key in infinite)
            for key, value in values.items()
        }
        try:
            return cast(object, cls(**converted))
        except ValueError as error:  # from the settings' __post_init__
            raise ConfigError(f"{self.settings_key}.{error}") from error

    def count_parameters(self, name: str) -> int:
        """Return how many of `parameters` a function takes.

        Raises:
            ConfigError: as for `get_settings_class`.
        """
        signature = self._get_signature(name)
        by_name = {*self._optional, "settings"} & set(signature.parameters)
        for number in range(len(self._parameters), self._min_parameters - 1, -1):
            try:
                signature.bind(*self._parameters[:number], **dict.fromkeys(by_name))
            except TypeError:
                continue
            return number
        fewer = f" or the first {self._min_parameters} or more of these"
        fewer = fewer if self._min_parameters < len(self._parameters) else ""
        more = f", any of {', '.join(self._optional)}" if self._optional else ""
        raise ConfigError(
            f"{self.setting}={name!r} takes {signature}; allowed: "
            f"({', '.join(self._parameters)}){fewer}{more}, and a last parameter called settings "
            "where it has any"
        )

    def _get_signature(self, name: str) -> inspect.Signature:
        try:
            return inspect.signature(self[name], eval_str=True)
        except (NameError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.setting}={name!r}: its signature cannot be read: {error}"
            ) from error

    def get_settings_class(self, name: str) -> type | None:
        """Return the dataclass of the settings of a function, if it has any.

        Raises:
            ConfigError: as for `[name]`, or the signature is none that the registry can call.
        """
        self.count_parameters(name)
        signature, what = self._get_signature(name), f"{self.setting}={name!r}"
        parameter = signature.parameters.get("settings")
        if parameter is None:
            return None
        cls: type = parameter.annotation
        if not _is_frozen_dataclass(cls):
            raise ConfigError(
                f"{what}: its parameter settings is annotated as {cls!r}; allowed: a frozen "
                "dataclass"
            )
        for field, types in _get_field_types(cls).items():
            if not set(types) <= {*TYPE_NAMES, NoneType}:
                raise ConfigError(
                    f"{what}: the field {field} of its settings is annotated as {types}; allowed: "
                    f"{', '.join(allowed.__name__ for allowed in TYPE_NAMES)}, or None beside one"
                )
        return cls

    @property
    def names(self) -> list[str]:
        return sorted(self._functions.keys() | self._paths.keys())


def _is_frozen_dataclass(cls: object) -> bool:
    return is_dataclass(cls) and isinstance(cls, type) and bool(cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _get_field_types(cls: type) -> dict[str, tuple[Any, ...]]:
    """Return the types that each field of a dataclass may have."""
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls) if field.init]
    unions = {name: get_origin(hints[name]) in (Union, UnionType) for name in names}
    return {name: get_args(hints[name]) if unions[name] else (hints[name],) for name in names}


def _convert(key: str, value: object, allowed: Sequence[Any], may_be_infinite: bool) -> object:
    """Return the value as one of the types; refuse NaN, which passes every check of a range."""
    for cls in allowed:
        if cls is float and type(value) is int:
            return float(value)
        if type(value) is cls:
            if isinstance(value, float) and (
                math.isnan(value) or (math.isinf(value) and not may_be_infinite)
            ):
                raise ConfigError(f"{key}={value}; allowed: a finite number")
            return value
    words = [TYPE_NAMES[cls] for cls in allowed if cls is not NoneType]
    empty = ["null"] if NoneType in allowed else []
    raise ConfigError(f"{key}={value!r}; allowed: {', '.join([*words, *empty])}")
