"""Checkpoint info: which program wrote a checkpoint, and that it is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mcore_rl.checkpoint.manifest import Manifest, ReadSums, check_files, sums_read_here
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object

INFO_FILE = "mcore_rl.json"  # written last: a folder of ours without it is no checkpoint
_VERSION = "megatron_core"  # who wrote it
_FILES = "files"  # the others, with sizes and checksums


def write_checkpoint_info(
    folder: Path, facts: Mapping[str, Any], files: Manifest | None = None
) -> None:
    """Mark a checkpoint as complete, with what its readers have to know.

    With `files`, all others of the folder, check_checkpoint can tell damage.
    """
    info = {_VERSION: metadata.version("megatron-core"), **facts}
    if files is not None:
        info[_FILES] = files
    (folder / INFO_FILE).write_text(json.dumps(info, indent=1))


def check_checkpoint(path: Path, read_sums: ReadSums = sums_read_here) -> None:
    """Read all files of a checkpoint that has a list of them.

    Raises:
        ConfigError: `path` is no complete checkpoint, or a file is missing, cut short, changed or
            not of it.
    """
    listed = read_checkpoint_info(path).get(_FILES)
    check_files(path, listed, besides=(INFO_FILE,), read_sums=read_sums)


def read_checkpoint_info(path: Path) -> dict[str, Any]:
    """The facts that a checkpoint was saved with, and the version of megatron-core that wrote it.

    Raises:
        ConfigError: `path` is no complete checkpoint, or a newer megatron-core wrote it.
    """
    if not path.is_dir():
        raise ConfigError(f"checkpoint folder {path} does not exist")
    if not (path / INFO_FILE).exists():
        raise ConfigError(f"{path} is not a complete checkpoint: it has no {INFO_FILE}")
    info = read_json_object(path / INFO_FILE)
    if not isinstance(info.get(_VERSION), str):
        raise ConfigError(f"{path / INFO_FILE} does not say which megatron-core wrote it")
    installed = metadata.version("megatron-core")
    if _version(info[_VERSION]) > _version(installed):
        raise ConfigError(
            f"{path} was written by megatron-core {info[_VERSION]}; {installed} is installed and "
            "reads checkpoints of its own version and older ones"
        )
    return info


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
