"""Files that data or a checkpoint names: opened without a wait, and read to a limit.

A name may be that of a pipe, whose opening waits for a writer, or of a device, whose contents
never end.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TEXTS = (".json", ".jinja", ".model", ".txt")  # that libraries read whole
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular_fd(path: str | Path) -> int:
    """Open a regular file to read; return its descriptor.

    Raises:
        OSError: It cannot be opened, or is something else, as `strerror` says.
    """
    _check_regular(os.stat(path), path)  # first by name, as opening a device may act on it
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def open_regular(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a regular file to read; raises as `open_regular_fd` does."""
    with open(open_regular_fd(path), "rb") as file:
        yield file


def check_regular(path: str | Path) -> None:
    """Raise OSError unless a path is a regular file that can be opened."""
    os.close(open_regular_fd(path))


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Return the contents of a regular file.

    Raises:
        OSError: As `open_regular_fd`; or it has more than `max_bytes`.
    """
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            reason = f"it has more than {max_bytes} bytes"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read(num_bytes)


def check_entries(folder: str | Path, max_text_bytes: int = 1 << 30) -> None:
    """Check what libraries may read of a model's folder: JSON, vocabularies, templates, weights.

    Raises:
        OSError: An entry is neither a regular file nor a folder, or a text too large for memory.
    """
    for entry in [*os.scandir(folder), *_scan(Path(folder, "additional_chat_templates"))]:
        try:
            status = entry.stat()
        except FileNotFoundError:  # a link to nothing, which none reads
            continue
        if not entry.is_dir():
            _check_regular(status, entry.path)
        if entry.name.endswith(_TEXTS) and status.st_size > max_text_bytes:
            reason = f"it has more than {max_text_bytes} bytes"
            raise OSError(errno.EFBIG, reason, entry.path)


def _scan(folder: Path) -> Iterable[os.DirEntry[str]]:
    return os.scandir(folder) if folder.is_dir() else ()


def find_below(root: str | Path, path: str | Path) -> Path:
    """Return the real path of an entry of a folder, named from there or absolutely.

    Raises:
        OSError: It is elsewhere: by `..`, by its name or by a link.
    """
    real = os.path.realpath(Path(root, path))
    if not Path(real).is_relative_to(os.path.realpath(root)):
        raise OSError(errno.EPERM, f"outside of the folder {root}", str(path))
    return Path(real)


def _check_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise OSError(errno.EINVAL, f"{kind}, no regular file", str(path))
