"""The files of a folder with their sizes and checksums: what is there is what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mcore_rl.checkpoint.raw_file import size_and_checksum
from mcore_rl.config.errors import ConfigError

Sum = tuple[int, int]  # bytes and CRC32
Manifest = Mapping[str, Sum]  # by name
ReadSums = Callable[[Sequence[Path]], list[Sum]]  # of whole files, in their order
_NUM_READERS = 8  # files read at once


def sums_read_here(files: Sequence[Path]) -> list[Sum]:
    """Of whole files, some read at once. Raises OSError when one cannot be read."""
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        return list(readers.map(size_and_checksum, files))


def manifest_of(files: Iterable[Path]) -> dict[str, Sum]:
    """By name. Raises OSError when one cannot be read."""
    return {file.name: size_and_checksum(file) for file in files}


def check_files(
    folder: Path,
    listed: object,
    *,
    besides: Iterable[str] = (),
    read_sums: ReadSums = sums_read_here,
) -> None:
    """Raise ConfigError, naming the file, unless the folder holds what is listed, bit for bit.

    `listed` is a Manifest as JSON gives it back. `besides` are files that it does not list.
    """
    expected = _parsed(folder, listed)
    try:
        _compare(folder, expected, set(besides), read_sums)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be read: {error.strerror}") from error


def _compare(folder: Path, expected: Manifest, besides: set[str], read_sums: ReadSums) -> None:
    found = {entry.name for entry in folder.iterdir()} - besides
    for name in sorted(expected.keys() - found):
        raise ConfigError(f"{folder / name} is missing")
    for name in sorted(found - expected.keys()):
        raise ConfigError(f"{folder / name} does not belong to it")
    for name, (size, _) in expected.items():
        if (size_there := (folder / name).stat().st_size) != size:
            raise ConfigError(f"{folder / name} has {size_there} bytes instead of {size}")
    found_sums = read_sums([folder / name for name in expected])
    for name, found_sum in zip(expected, found_sums, strict=True):
        if found_sum != expected[name]:
            raise ConfigError(f"{folder / name} is damaged: its checksum differs")


def _parsed(folder: Path, listed: Any) -> dict[str, Sum]:
    """Names are those of files in the folder itself."""
    try:
        parsed = {str(name): (int(size), int(crc32)) for name, (size, crc32) in listed.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(f"{folder}: its list of files is damaged") from None
    if any(Path(name).name != name for name in parsed):
        raise ConfigError(f"{folder}: its list of files names one elsewhere")
    return parsed
