"""Files of a checkpoint: by position with CRC32, in a manifest, published when complete."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from mcore_rl.config.atomic_file import create_file, get_partial_path
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.regular_file import open_regular_fd

if TYPE_CHECKING:
    import torch

INFO_FILE = "mcore_rl.json"  # written last: without it a checkpoint is incomplete
# Keys of INFO_FILE: the megatron-core version that wrote it, and the manifest of the other files.
_VERSION, _FILES = "megatron_core", "files"
Checksum = tuple[int, int]  # size in bytes, CRC32
Manifest = Mapping[str, Checksum]  # by file name
ComputeChecksums = Callable[[Sequence[Path]], list[Checksum]]  # in the order of the files
_NUM_READERS = 8  # files read in parallel
# Bytes per write, which fit into the processor's cache. For larger writes the kernel allocates
# large pages, for which the host of a virtual machine may reclaim memory: 5 times slower.
_WRITE_BYTES = 1 << 18
_READ_BYTES = 1 << 20  # bytes per read: the CRC32 is computed while they are in the cache


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    import torch  # not for who only reads manifests: two CPU seconds

    memory: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory)


def read_at(fd: int, offset: int, memory: memoryview, *, with_crc32: bool = True) -> int:
    """Fill memory with the bytes from `offset` on; return their CRC32, or 0 without `with_crc32`.

    Raises:
        EOFError: The file is truncated.
    """
    crc32, done = 0, 0
    while done < len(memory):
        piece = memory[done : done + _READ_BYTES]
        count = os.preadv(fd, [piece], offset + done)
        if not count:
            raise EOFError("the file is truncated")
        if with_crc32:
            crc32 = isal_zlib.crc32(piece[:count], crc32)
        done += count
    return crc32


def write_at(fd: int, offset: int, memory: memoryview | bytes) -> int:
    """Write bytes at an offset; return their CRC32."""
    memory, crc32, done = memoryview(memory), 0, 0
    while done < len(memory):
        piece = memory[done : done + _WRITE_BYTES]
        count = os.pwrite(fd, piece, offset + done)
        crc32 = isal_zlib.crc32(piece[:count], crc32)
        done += count
    return crc32


def compute_checksum(path: Path) -> Checksum:
    """Return size and CRC32 of a file. Raises OSError if it cannot be read."""
    memory, crc32, size = memoryview(bytearray(_READ_BYTES)), 0, 0
    with open(open_regular_fd(path), "rb", buffering=0) as file:
        while count := file.readinto(memory):
            crc32 = isal_zlib.crc32(memory[:count], crc32)
            size += count
    return size, crc32


def publish_folder(partial_path: Path, path: Path, files: Iterable[Path]) -> None:
    """Sync a complete folder to disk and rename it to its final name.

    Args:
        files: Files in it that have not been synced to disk.
    """
    for entry in (*files, partial_path):
        sync_file(entry)
    partial_path.rename(path)
    sync_file(path.parent)


def sync_file(path: Path) -> None:
    """Sync a file or a folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # folders, on some file systems
            raise
    finally:
        os.close(fd)


@contextmanager
def open_atomic(path: Path, num_bytes: int = 0) -> Iterator[int]:
    """Open a temporary file that is renamed to `path` at the end, or removed on an error.

    Args:
        num_bytes: Bytes to allocate first: a full disk shows at once, and writing is 1.5 times as
            fast.

    Raises:
        OSError: It cannot be written; names `path`.
    """
    partial_path = get_partial_path(path)
    try:
        with open(create_file(partial_path), "w+b", buffering=0) as file:
            if num_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            yield file.fileno()
        partial_path.rename(path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial_path.unlink(missing_ok=True)


def compute_checksums(files: Sequence[Path]) -> list[Checksum]:
    """Compute the checksums of files in parallel. Raises OSError if one cannot be read."""
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        return list(readers.map(compute_checksum, files))


def build_manifest(files: Iterable[Path]) -> dict[str, Checksum]:
    """Return the checksums of files by name. Raises OSError if one cannot be read."""
    return {file.name: compute_checksum(file) for file in files}


def check_files(
    folder: Path,
    listed: object,
    *,
    ignored: Iterable[str] = (),
    compute_sums: ComputeChecksums = compute_checksums,
) -> None:
    """Raise ConfigError with the file's name unless a folder has exactly the files of a manifest.

    Args:
        listed: The manifest, parsed from JSON.
        ignored: Names in the folder that the manifest does not list.
    """
    expected = _parse_manifest(folder, listed)
    try:
        _compare_files(folder, expected, set(ignored), compute_sums)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be read: {error.strerror}") from error


def _compare_files(
    folder: Path, expected: Manifest, ignored: set[str], compute_sums: ComputeChecksums
) -> None:
    """Compare names, then sizes, then checksums; may raise OSError."""
    names = {entry.name for entry in folder.iterdir()} - ignored
    for name in sorted(expected.keys() - names):
        raise ConfigError(f"{folder / name} is missing")
    for name in sorted(names - expected.keys()):
        raise ConfigError(f"{folder / name} does not belong to it")
    for name, (size, _) in expected.items():
        if (actual_size := (folder / name).stat().st_size) != size:
            raise ConfigError(f"{folder / name} has {actual_size} bytes instead of {size}")
    checksums = compute_sums([folder / name for name in expected])
    for name, checksum in zip(expected, checksums, strict=True):
        if checksum != expected[name]:
            raise ConfigError(f"{folder / name} is damaged: its checksum differs")


def _parse_manifest(folder: Path, listed: Any) -> dict[str, Checksum]:
    """Parse a manifest; raise ConfigError if it is damaged or names files elsewhere."""
    try:
        parsed = {str(name): (int(size), int(crc32)) for name, (size, crc32) in listed.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(f"{folder}: its list of files is damaged") from None
    if any(Path(name).name != name for name in parsed):
        raise ConfigError(f"{folder}: its list of files names one elsewhere")
    return parsed


def write_checkpoint_info(
    folder: Path, facts: Mapping[str, Any], files: Manifest | None = None
) -> None:
    """Mark a checkpoint as complete.

    Args:
        facts: Information for readers.
        files: Manifest of the other files, so that check_checkpoint detects damage.
    """
    info = {_VERSION: metadata.version("megatron-core"), **facts}
    if files is not None:
        info[_FILES] = files
    (folder / INFO_FILE).write_text(json.dumps(info, indent=1))


def check_checkpoint(path: Path, compute_sums: ComputeChecksums = compute_checksums) -> None:
    """Compare all files of a checkpoint with its manifest.

    Raises:
        ConfigError: `path` is no complete checkpoint, or a file is missing, truncated, changed or
            unexpected.
    """
    listed = read_checkpoint_info(path).get(_FILES)
    check_files(path, listed, ignored=(INFO_FILE,), compute_sums=compute_sums)


def read_checkpoint_info(path: Path) -> dict[str, Any]:
    """Read the facts that a checkpoint was saved with, and the megatron-core version that wrote it.

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
    if _parse_version(info[_VERSION]) > _parse_version(installed):
        raise ConfigError(
            f"{path} was written by megatron-core {info[_VERSION]}; {installed} is installed and "
            "reads checkpoints of its own version and older ones"
        )
    return info


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError if a value is NaN or infinite: damage of a tensor without a checksum.

    aminmax runs at memory bandwidth.
    """
    import torch

    if not tensor.numel():
        return
    smallest, largest = torch.aminmax(tensor)
    if bool(torch.isfinite(smallest) & torch.isfinite(largest)):
        return
    index = tuple(torch.isfinite(tensor).logical_not_().nonzero()[0].tolist())
    raise ConfigError(f"tensor {name} is damaged: it has {tensor[index].item()} at {list(index)}")
