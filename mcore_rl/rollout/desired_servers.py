"""Which servers a run is to have: a file in its folder, which `mcore-rl servers` writes.

The driver reads it before each push of weights. Without it a run has all of rollout.num_servers.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object

FILE = "servers.json"
_KEY = "servers"


def read_wanted_servers(folder: Path, num_servers: int) -> set[int]:
    """The numbers of the servers that the run in `folder` is to have.

    Raises:
        ConfigError: the file does not name some of 0 to `num_servers` - 1.
    """
    file = folder / FILE
    if not file.exists():
        return {*range(num_servers)}
    found = read_json_object(file).get(_KEY)
    there_are = range(num_servers)
    if not isinstance(found, list) or not found or any(number not in there_are for number in found):
        raise ConfigError(
            f"{file}: {_KEY!r} is {found!r}; allowed: a list of some of {[*there_are]}"
        )
    return {*found}


def write_wanted_servers(folder: Path, numbers: Collection[int]) -> None:
    """Raises ConfigError when it cannot be written."""
    file, aside = folder / FILE, folder / f".{FILE}.partial"
    try:
        aside.write_text(json.dumps({_KEY: sorted(numbers)}) + "\n")
        aside.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
