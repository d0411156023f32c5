"""Memory, CPU time and files of the processes of a call, from /proc; standard library only.

Counts mapped memory, and bounds that of deleted open files, sockets and inodes. For all other
kernel memory, the filter refuses the system calls (seccomp_filter.py) or a cgroup counts
(cgroup.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

BLOCK = 4096  # least bytes of a file, with its inode and name

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def find_descendants() -> list[int]:
    """Return all descendants of this process, also those whose parent has died."""
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
        OSError, ValueError, IndexError: the process has ended.
    """
    lines = _read(f"/proc/{pid}/status").splitlines()
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    kinds = "RssAnon", "RssShmem", "VmPTE"  # missing for a zombie
    memory = sum(int(fields.get(kind, "0 kB").split()[0]) for kind in kinds) << 10
    ticks = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:15]
    return memory, sum(map(int, ticks)) * _TICK_S, int(fields["Threads"])


def has_memory(pid: int) -> bool:
    """Return whether a process has its memory, which one that ends gives up before its files.

    From then on the kernel shows the files of the process to root alone, however it ended.
    """
    with contextlib.suppress(OSError, IndexError):
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[20] != "0"
    return False


def bound_socket_bytes(pid: int) -> int:
    """Return an upper bound of the bytes in sockets of the network namespace of a process.

    Counts all sockets, also those not accepted yet or in a message, as full: programs cannot change
    the size of their buffers.
    """
    lines = _read(f"/proc/{pid}/net/sockstat").splitlines()
    [count] = [line.split()[2] for line in lines if line.startswith("sockets:")]
    return int(count) * _get_socket_bytes()


def read_open_files(pid: int, folder: str) -> tuple[int, int]:
    """Return bytes of deleted open files of a process, and an upper bound of bytes in its sockets.

    Raises:
        OSError: the process has ended, hides its descriptors, or maps a deleted file of `folder`
            that it has closed.
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
    return file_bytes, num_sockets * _get_socket_bytes()


def count_inodes(pid: int, folder: str) -> int:
    """Return the number of used inodes in the file system of a folder, as a process sees it."""
    info = os.statvfs(f"/proc/{pid}/root{folder}")
    return info.f_files - info.f_ffree


def is_larger(folder: str, limit: float) -> bool:
    """Return whether files take more bytes than `limit`; an unreadable folder counts as full."""
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
    # A program chooses the names of processes and files, so they may be any bytes.
    return Path(path).read_text("latin-1")


def _get_socket_bytes() -> int:
    # A sender may exceed its buffer by one message.
    return 2 * int(_read("/proc/sys/net/core/wmem_default"))
