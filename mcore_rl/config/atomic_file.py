"""Files that appear complete or not at all: written as `.NAME.partial`, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path


def get_partial_path(path: Path) -> Path:
    """Return the name under which a file or folder is written."""
    return path.with_name(f".{path.name}.partial")


def create_file(path: Path) -> int:
    """Create a new file in place of any other; return its descriptor, to read and write.

    A killed run may have left the name, and in a folder that others can write to it may be a link
    to somebody's file: it is removed, never followed.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def create_folder(path: Path) -> None:
    """Create a new folder in place of any other file or folder; links are not followed."""
    shutil.rmtree(path, ignore_errors=True)  # which leaves files and links
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.mkdir(parents=True)


def open_lock(path: Path) -> int:
    """Open a lock file, which stays for the next process; return its descriptor.

    Raises:
        OSError: `path` is a link or no regular file, or cannot be opened.
    """
    # Non-blocking: a pipe that nobody writes to would keep this process waiting.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield an empty file to write to; rename it to `path` at the end, remove it on an error.

    Raises:
        OSError: It cannot be created or renamed.
    """
    partial_path = get_partial_path(path)
    os.close(create_file(partial_path))
    try:
        yield partial_path
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file, text as UTF-8, atomically. Raises OSError if it cannot be written."""
    with write_atomically(path) as partial_path:
        partial_path.write_bytes(content.encode() if isinstance(content, str) else content)
