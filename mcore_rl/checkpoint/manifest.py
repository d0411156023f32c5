"""The files of a folder with their sizes and checksums: what is there is what was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mcore_rl.checkpoint.raw_file import size_and_checksum
from mcore_rl.config.errors import ConfigError

Manifest = Mapping[str, tuple[int, int]]  # by name: bytes and CRC32
_NUM_READERS = 8  # files read at once


def manifest_of(files: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """By name. Raises OSError when one cannot be read."""
    return {file.name: size_and_checksum(file) for file in files}


def check_files(folder: Path, listed: object, *, besides: Iterable[str] = ()) -> None:
    """Raise ConfigError, naming the file, unless the folder holds what is listed, bit for bit.

    `listed` is a Manifest as JSON gives it back. `besides` are files that it does not list.
    """
    expected = _parsed(folder, listed)
    try:
        _compare(folder, expected, set(besides))
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be read: {error.strerror}") from error


def _compare(folder: Path, expected: Manifest, besides: set[str]) -> None:
    found = {entry.name for entry in folder.iterdir()} - besides
    for name in sorted(expected.keys() - found):
        raise ConfigError(f"{folder / name} is missing")
    for name in sorted(found - expected.keys()):
        raise ConfigError(f"{folder / name} does not belong to it")
    for name, (size, _) in expected.items():
        if (size_there := (folder / name).stat().st_size) != size:
            raise ConfigError(f"{folder / name} has {size_there} bytes instead of {size}")
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        read = readers.map(size_and_checksum, (folder / name for name in expected))
        for name, sums in zip(expected, read, strict=True):
            if sums != expected[name]:
                raise ConfigError(f"{folder / name} is damaged: its checksum differs")


def _parsed(folder: Path, listed: Any) -> dict[str, tuple[int, int]]:
    """Names are those of files in the folder itself."""
    try:
        parsed = {str(name): (int(size), int(crc32)) for name, (size, crc32) in listed.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(f"{folder}: its list of files is damaged") from None
    if any(Path(name).name != name for name in parsed):
        raise ConfigError(f"{folder}: its list of files names one elsewhere")
    return parsed
