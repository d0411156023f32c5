"""Functions outside the package, by import path: `module:function`, `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.config.errors import ConfigError


def is_import_path(name: str) -> bool:
    return ":" in name


def load(setting: str, path: str) -> Callable[..., Any]:
    """The function that an import path leads to. A module is imported once a process.

    Modules are looked for in the current folder, too, as files are. Ray's workers run there and
    look there.

    Raises:
        ConfigError: the module cannot be imported, or has no such function; names the setting.
    """
    where, _, name = path.rpartition(":")
    try:
        module = _of_file(Path(where)) if where.endswith(".py") else _of_name(where)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{setting}={path!r}: {where!r} cannot be imported: {reason}") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if _is_own(value, module)]
        raise ConfigError(
            f"{setting}={path!r}: {where!r} has no function {name!r}; it has: "
            f"{', '.join(functions) or 'none'}"
        )
    function: Callable[..., Any] = found
    return function


def load_own(setting: str, path: str) -> Callable[..., Any]:
    """Load a function that was written for a setting: none of Python's own, such as os:system.

    Raises:
        ConfigError: as `load`, or the function comes with Python.
    """
    found = load(setting, path)
    home = getattr(found, "__module__", None) or "builtins"
    is_written = inspect.isroutine(found) or inspect.isclass(found)
    if is_written and home.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{setting}={path!r} is Python's own {home}.{found.__name__}; allowed: a function that "
            "was written for this setting"
        )
    return found


def _is_own(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", "") == module.__name__


def _of_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # a console script has its own folder there instead
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _of_file(path: Path) -> ModuleType:
    """Under a name of its own, which two files of one name do not share."""
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
