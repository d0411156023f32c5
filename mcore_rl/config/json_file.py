"""Untrusted JSON: limited in size and depth, and always an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.regular_file import read_regular

MAX_BYTES = 100_000_000  # what the safetensors library allows a header


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: the file cannot be read, or has other contents.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json_object(data, str(path))


def read_json_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a file with one a line, each after its place for errors.

    A last line that was cut short is left out; a missing file has none.

    Raises:
        ConfigError: A line is no JSON object.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    rows = [(f"{path}, row {i}", line) for i, line in enumerate(lines) if line.endswith(b"\n")]
    return [(where, parse_json_object(line, where)) for where, line in rows]


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the object in UTF-8 text.

    Raises:
        ConfigError: it is no JSON object; the message begins with `where`.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{where} has more than {MAX_BYTES} bytes")
    try:
        value = json.loads(data.decode())
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    except RecursionError:  # raised by the parser for nesting, long before the stack ends
        raise ConfigError(f"{where} is not valid JSON: it is nested too deep") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is a JSON {type(value).__name__}, not an object")
    return value
