"""Files read and written by position, with checksums, and renamed when they are complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib

# Written at a time, while the processor's cache holds it. For larger pieces the kernel takes large
# blocks of memory, which a virtual machine's host may first have to give back: 5 times slower.
_WRITE_BYTES = 1 << 18
_READ_BYTES = 1 << 20  # read, then summed up while the processor's cache still holds it


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    memory: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory)


def read(fd: int, offset: int, memory: memoryview, *, summed: bool = True) -> int:
    """Fill memory with the bytes from `offset` on; their CRC32 if `summed`, else 0.

    Raises:
        EOFError: the file is truncated.
    """
    crc32, done = 0, 0
    while done < len(memory):
        piece = memory[done : done + _READ_BYTES]
        count = os.preadv(fd, [piece], offset + done)
        if not count:
            raise EOFError("the file is truncated")
        if summed:
            crc32 = isal_zlib.crc32(piece[:count], crc32)
        done += count
    return crc32


def write(fd: int, offset: int, memory: memoryview | bytes) -> int:
    """Bytes to a place in a file; their CRC32."""
    memory, crc32, done = memoryview(memory), 0, 0
    while done < len(memory):
        piece = memory[done : done + _WRITE_BYTES]
        count = os.pwrite(fd, piece, offset + done)
        crc32 = isal_zlib.crc32(piece[:count], crc32)
        done += count
    return crc32


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Of a whole file: its bytes, and their CRC32. Raises OSError when it cannot be read."""
    memory, crc32, size = memoryview(bytearray(_READ_BYTES)), 0, 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(memory):
            crc32 = isal_zlib.crc32(memory[:count], crc32)
            size += count
    return size, crc32


def name_folder(aside: Path, path: Path, files: Iterable[Path]) -> None:
    """A complete folder gets its name, which a power loss then leaves whole.

    `files` are those in it that whoever wrote them has not forced onto the disk.
    """
    for one in (*files, aside):
        _force(one)
    aside.rename(path)
    _force(path.parent)


def _force(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems: of folders
            raise
    finally:
        os.close(fd)


@contextmanager
def file_aside(path: Path, num_bytes: int = 0) -> Iterator[int]:
    """A file to write into; it becomes `path` at the end, on an error nothing.

    `num_bytes` are reserved first: a full disk shows then, and writing is half as fast again.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("w+b", buffering=0) as file:
            if num_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            yield file.fileno()
        aside.rename(path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        aside.unlink(missing_ok=True)
