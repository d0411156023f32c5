"""Functions, classes and rows of a Python session, by names that settings can have.

Settings are text, which a command line, a recipe and `config.json` hold. A script or notebook may
put an object there instead (object_settings.py), whose name is its import path where every process
of a run can import it, else `<python>:name`. Such a name is looked up in the tables of this file.
Workers receive the objects by value (controller/worker_group.py), as Ray ships functions: pickled
in memory, never on disk.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.config.errors import ConfigError, describe_error

_PREFIX = "<python>:"
_PACKAGE = str(Path(__file__).parents[2])
_objects: dict[str, Any] = {}  # of this process, by name
_pickles: dict[str, bytes] = {}  # of those that workers may need, by name


@contextlib.contextmanager
def keep_objects() -> Iterator[None]:
    """Forget at the end the objects that were registered inside."""
    tables = _objects, _pickles
    before = [{**table} for table in tables]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def is_object_name(text: str) -> bool:
    return text.startswith(_PREFIX)


def get_object(setting: str, name: str) -> Any:
    """Return the object of a name.

    Raises:
        ConfigError: This process does not have it.
    """
    if name not in _objects:
        if name not in _pickles:
            raise ConfigError(
                f"{setting}={name!r} is an object of the Python session that started the run; "
                "allowed: run it from there again, or set an import path"
            )
        _objects[name] = pickle.loads(_pickles[name])  # of the run's driver, by memory
    return _objects[name]


def export_objects(*names: str) -> dict[str, bytes]:
    """Return the pickled objects of some names, for another process; without names all of them."""
    return {name: data for name, data in _pickles.items() if not names or name in names}


def import_objects(pickles: Mapping[str, bytes]) -> None:
    """Add the objects that another process of the run has exported."""
    for name in pickles:
        _objects.pop(name, None)  # of an earlier run in this process
    _pickles.update(pickles)


def register_rows(name: str, rows: Any) -> str:
    """Return the name of rows, or of a function that returns some, which only the driver reads."""
    name = _choose_name(name, rows)
    _objects[name] = rows
    return name


def register_function(setting: str, function: Any) -> str:
    """Return the import path or name of a function, a class or an object that can be called.

    Raises:
        ConfigError: It cannot be sent to the workers.
    """
    if path := _find_import_path(function):
        return path
    plain_name = getattr(function, "__name__", type(function).__name__)
    name = _choose_name("function" if plain_name == "<lambda>" else plain_name, function)
    _objects[name], _pickles[name] = function, _pickle(setting, function)
    return name


def _choose_name(name: str, value: object) -> str:
    """Return `<python>:name`, with a number if another object has that name."""
    numbered = (f"{_PREFIX}{name}{'' if n == 1 else f'_{n}'}" for n in range(1, len(_objects) + 2))
    return next(n for n in numbered if n not in _objects or _objects[n] is value)


def _pickle(setting: str, function: Any) -> bytes:
    """Pickle a function, with the modules of the user that other processes cannot import."""
    import cloudpickle  # the sandbox, which imports this file, may run in another Python

    modules = [module for module in [*sys.modules.values()] if _is_session_module(module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:
        raise ConfigError(
            f"{setting}={function!r} cannot be sent to the workers: {describe_error(error)}; "
            "allowed: a function that holds no open file, lock or connection"
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _find_import_path(function: Any) -> str:
    """Return the import path of a function or class; "" if other processes cannot import it."""
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        return ""
    module, name = getattr(function, "__module__", None) or "", function.__qualname__
    loaded = sys.modules.get(module)
    if loaded is None or module == "__main__" or getattr(loaded, name, None) is not function:
        return ""
    return "" if _is_session_module(loaded) else f"{module}:{name}"


def _is_session_module(module: ModuleType) -> bool:
    """Return whether a module is neither installed nor importable from the current folder."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(file, str) or name == "__main__" or sys.modules.get(name) is not module:
        return False
    if file.startswith(_list_installed_folders()):
        return False
    below = Path.cwd().joinpath(*name.split("."))
    return Path(file).resolve() not in (below.with_suffix(".py"), below / "__init__.py")


@cache
def _list_installed_folders() -> tuple[str, ...]:
    folders = {*sysconfig.get_paths().values(), *site.getsitepackages(), _PACKAGE}
    folders |= {site.getusersitepackages(), *(p for p in sys.path if p.endswith("-packages"))}
    return tuple(sorted(f"{folder}/" for folder in folders if folder))
