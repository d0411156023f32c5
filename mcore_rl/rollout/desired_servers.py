"""The servers that a run is to have: `servers.json` in its folder, written by `mcore-rl servers`.

The driver reads it before each push of weights. Without it a run has all of rollout.num_servers.
The command imports this module without Ray.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from mcore_rl.config.atomic_file import write_file
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object

FILE = "servers.json"
_KEY = "servers"


def read_desired_servers(folder: Path, num_servers: int) -> set[int]:
    """Read the numbers of the servers that the run in `folder` is to have.

    Raises:
        ConfigError: the file does not name some of 0 to `num_servers` - 1.
    """
    file = folder / FILE
    if not file.exists():
        return {*range(num_servers)}
    numbers, allowed = read_json_object(file).get(_KEY), range(num_servers)
    if not isinstance(numbers, list) or not numbers or any(n not in allowed for n in numbers):
        raise ConfigError(
            f"{file}: {_KEY!r} is {numbers!r}; allowed: a list of some of {[*allowed]}"
        )
    return {*numbers}


def write_desired_servers(folder: Path, numbers: Collection[int]) -> None:
    """Write the numbers of the servers that the run in `folder` is to have.

    Raises:
        ConfigError: the file cannot be written.
    """
    file = folder / FILE
    try:
        write_file(file, json.dumps({_KEY: sorted(numbers)}) + "\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
