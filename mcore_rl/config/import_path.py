"""Functions outside the package, by import path: `module:function`, `path/to/file.py:function`.

Objects of a Python session have names of another form (python_objects.py), which lead to them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.config.errors import ConfigError, describe_error
from mcore_rl.config.python_objects import get_object, is_object_name

_refuses_imports: ContextVar[bool] = ContextVar("refuses_imports", default=False)


def is_import_path(name: str) -> bool:
    return ":" in name


@contextmanager
def refuse_imports() -> Iterator[None]:
    """Import nothing inside: settings that somebody else has recorded may name any code."""
    token = _refuses_imports.set(True)
    try:
        yield
    finally:
        _refuses_imports.reset(token)


def load_object(setting: str, path: str) -> Any:
    """Return the object of an import path; import its module once a process.

    Modules are also searched in the current folder, as files are: Ray's workers run there, too.

    Raises:
        ConfigError: the module cannot be imported, or has no such name; names the setting.
    """
    if is_object_name(path):
        return get_object(setting, path)
    where, module = _import(setting, path)
    name = path.rpartition(":")[2]
    if not hasattr(module, name):
        names = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(
            f"{setting}={path!r}: {where!r} has no {name!r}; it has: {', '.join(names) or 'none'}"
        )
    return getattr(module, name)


def load_function(setting: str, path: str) -> Callable[..., Any]:
    """Return the function of an import path, as `load_object`.

    Raises:
        ConfigError: the module cannot be imported, or has no such function; names the setting.
    """
    if is_object_name(path):
        named: Callable[..., Any] = get_object(setting, path)
        return named
    where, module = _import(setting, path)
    name = path.rpartition(":")[2]
    target: Any = getattr(module, name, None)
    if not callable(target):
        functions = [key for key, value in vars(module).items() if _is_own(value, module)]
        raise ConfigError(
            f"{setting}={path!r}: {where!r} has no function {name!r}; it has: "
            f"{', '.join(functions) or 'none'}"
        )
    function: Callable[..., Any] = target
    return function


def load_user_function(setting: str, path: str) -> Callable[..., Any]:
    """Load a function that was written for a setting; refuse Python's own, such as os:system.

    Raises:
        ConfigError: as `load_function`, or the function comes with Python.
    """
    function = load_function(setting, path)
    home = getattr(function, "__module__", None) or "builtins"
    is_written = inspect.isroutine(function) or inspect.isclass(function)
    if is_written and home.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{setting}={path!r} is Python's own {home}.{function.__name__}; allowed: a function "
            "that was written for this setting"
        )
    return function


def _import(setting: str, path: str) -> tuple[str, ModuleType]:
    """Return the module of an import path, and how the path names it."""
    where = path.rpartition(":")[0]
    if _refuses_imports.get():
        raise ConfigError(f"{setting}={path!r}: {where!r} is not imported for recorded settings")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except Exception as error:
        raise ConfigError(
            f"{setting}={path!r}: {where!r} cannot be imported: {describe_error(error)}"
        ) from error
    return where, module


def load_user_class(setting: str, path: str, base: type, names: Iterable[str]) -> Any:
    """Return the subclass of `base` that was written for a setting.

    Args:
        names: Values of the setting that are no import paths, for errors.

    Raises:
        ConfigError: As `load_user_function`, or it is no subclass, or it lacks abstract methods.
    """
    loaded = load_user_function(setting, path)
    contract = f"{base.__module__}.{base.__qualname__}"
    if not (inspect.isclass(loaded) and issubclass(loaded, base)):
        raise ConfigError(
            f"{setting}={path!r} is no subclass of {contract}; allowed: one, or {', '.join(names)}"
        )
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        raise ConfigError(
            f"{setting}={path!r} does not define {', '.join(missing)}; allowed: a subclass of "
            f"{contract} that defines all abstract methods"
        )
    return loaded


def _is_own(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", "") == module.__name__


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # a console script has its own folder there instead
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module with a unique name, which two files of one name do not share."""
    path = path.resolve()
    name = f"{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
