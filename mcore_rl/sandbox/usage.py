"""What the processes of a call hold, read from /proc; standard library only.

A look sees what processes map, and bounds what they hold otherwise: files that have no name any
more, sockets, inodes. What else the kernel keeps for a program, the filter refuses
(seccomp_filter.py) or a cgroup counts (cgroup.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

BLOCK = 4096  # the least that a file counts for, with its inode and its name

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def find_descendants() -> list[int]:
    """Processes started by this one, by those, and so on; also where a parent has died."""
    descendants: list[int] = []
    frontier = [os.getpid()]
    while frontier:
        folder = f"/proc/{frontier.pop()}/task"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(folder):
                with open(f"{folder}/{task}/children") as file:
                    children = [int(pid) for pid in file.read().split()]
                descendants += children
                frontier += children
    return descendants


def read_process(pid: int) -> tuple[int, float, int]:
    """Return bytes of memory, seconds of CPU time with reaped children, and threads.

    Raises:
        OSError, ValueError, IndexError: it has ended.
    """
    lines = _read(f"/proc/{pid}/status").splitlines()
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    kinds = "RssAnon", "RssShmem", "VmPTE"  # which a zombie has not
    memory = sum(int(fields.get(kind, "0 kB").split()[0]) for kind in kinds) << 10
    ticks = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:15]
    return memory, sum(map(int, ticks)) * _TICK_S, int(fields["Threads"])


def bound_socket_bytes(pid: int) -> int:
    """Return at most how much is in sockets of a network namespace of its own.

    All sockets count, also those that wait to be accepted or are in a message. Each may be full:
    programs cannot change how much one may have.
    """
    lines = _read(f"/proc/{pid}/net/sockstat").splitlines()
    [count] = [line.split()[2] for line in lines if line.startswith("sockets:")]
    return int(count) * _socket_bytes()


def read_open_files(pid: int, folder: str) -> tuple[int, int]:
    """Return bytes of files without a name, and at most how much is in sockets, of a process.

    Raises:
        OSError: it has ended, or hides what it has open, or maps such a file of `folder` that it
            has closed.
    """
    file_bytes = num_sockets = 0
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(f"/proc/{pid}/fd/{name}")
            num_sockets += stat.S_ISSOCK(info.st_mode)
            if stat.S_ISREG(info.st_mode) and not info.st_nlink and info.st_ino not in inodes:
                file_bytes += BLOCK + info.st_blocks * 512
                inodes.add(info.st_ino)
    mapped = re.findall(
        rf" (\d+) +{re.escape(folder)}/.* \(deleted\)$",
        _read(f"/proc/{pid}/maps"),
        re.MULTILINE,
    )
    if closed := set(map(int, mapped)) - inodes:
        raise PermissionError(f"maps {len(closed)} nameless files that it has closed")
    return file_bytes, num_sockets * _socket_bytes()


def count_inodes(pid: int, folder: str) -> int:
    """Return how many inodes are used in the file system of a folder, as a process sees it."""
    info = os.statvfs(f"/proc/{pid}/root{folder}")
    return info.f_files - info.f_ffree


def is_larger(folder: str, limit: float) -> bool:
    """Whether the files in it take more; a folder that cannot be looked into counts as full."""
    size, frontier = 0, [folder]
    while frontier:
        try:
            with os.scandir(frontier.pop()) as entries:
                for entry in entries:
                    size += BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        frontier.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return True
        if size > limit:
            return True
    return False


def _read(path: str) -> str:
    # Names of processes and of files are any bytes: a program chooses them.
    return Path(path).read_text("latin-1")


def _socket_bytes() -> int:
    # A sender may go beyond the size of its buffer by one message.
    return 2 * int(_read("/proc/sys/net/core/wmem_default"))
