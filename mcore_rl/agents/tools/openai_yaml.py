"""Tools from a file of OpenAI's function schemas, bound to Python functions.

A list in YAML or JSON; `python` is the import path of the function, as everywhere:

    - type: function
      function:
        name: weather
        description: The weather in a city.
        parameters: {type: object, properties: {city: {type: string}}, required: [city]}
      python: path/to/file.py:weather
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, SchemaError

from mcore_rl.agents.tools.base import Tool
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import load_function

_MAX_BYTES = 1 << 20
_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}


def tools_of_file(path: str | Path) -> list[Tool]:
    """The tools in a file.

    Raises:
        ConfigError: it cannot be read, an entry is no schema, or its function does not take the
            parameters that the schema has.
    """
    try:
        content = Path(path).read_bytes()
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{path}: {len(content)} bytes; allowed: {_MAX_BYTES}")
        entries = yaml.safe_load(content)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: allowed: a list of tools, not empty")
    return [_tool(f"{path}[{number}]", entry) for number, entry in enumerate(entries)]


def _tool(where: str, entry: object) -> Tool:
    if not isinstance(entry, Mapping) or set(entry) != {"type", "function", "python"}:
        raise ConfigError(f"{where}: allowed: an object with the keys type, function and python")
    function: Any = entry["function"]
    if entry["type"] != "function" or not isinstance(function, Mapping):
        raise ConfigError(f"{where}: allowed: type: function, and an object as function")
    if unknown := set(function) - _FUNCTION_KEYS:
        raise ConfigError(
            f"{where}.function: {', '.join(sorted(map(str, unknown)))}; allowed: "
            f"{', '.join(sorted(_FUNCTION_KEYS))}"
        )
    for key in ("name", "description"):
        if not isinstance(function.get(key), str):
            raise ConfigError(f"{where}.function.{key}={function.get(key)!r}; allowed: text")
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ConfigError(f"{where}.function.parameters: {error.message}") from error
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise ConfigError(f"{where}.function.parameters: allowed: a schema of type object")
    python = load_function(f"{where}.python", str(entry["python"]))
    _check_takes(f"{where}.python={entry['python']!r}", python, parameters)
    return Tool(function["name"], function["description"], parameters, python)


def _check_takes(where: str, function: Any, parameters: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    for names in (properties, required):
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigError(
                f"{where} takes {signature}; the schema has {', '.join(names)}: {error}"
            ) from None
