"""Cores and memory that this process may use: of affinity and of cgroups.

The cgroups are those of version 2: that of the process, and those above it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROCESS_CGROUP = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")


def count_cores() -> int:
    """Return the cores that this process may use: a whole number, and at least one."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _list_cgroups():
        quota, _, period = _read_limit(group / "cpu.max").partition(" ")
        if quota.isdigit():
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def get_free_memory_bytes() -> int:
    """Return the bytes left until the first cgroup limit.

    Pages of files that were read count as free: the kernel gives them back.
    """
    return min((max(0, limit - used) for used, limit in _iter_memory()), default=sys.maxsize)


def compute_memory_use() -> float:
    """Return the share of the memory that is in use: of the machine, or of a cgroup if larger."""
    lines = (line.split() for line in _MEMORY.read_text().splitlines())
    sizes = {name: int(size) for name, size, *_ in lines}
    of_machine = 1 - sizes["MemAvailable:"] / sizes["MemTotal:"]
    return max([of_machine, *(used / limit for used, limit in _iter_memory())])


def _iter_memory() -> Iterator[tuple[int, int]]:
    """Yield the bytes in use and the limit of each cgroup that has one."""
    for group in _list_cgroups():
        limit = _read_limit(group / "memory.max")
        if limit.isdigit():
            parts = dict(line.split() for line in _read_limit(group / "memory.stat").splitlines())
            used = int(_read_limit(group / "memory.current") or 0)
            yield used - int(parts.get("inactive_file", 0)), int(limit)


def _list_cgroups() -> Iterator[Path]:
    """Yield the cgroup of this process, and those above it."""
    for line in _read_limit(_PROCESS_CGROUP).splitlines():
        if line.startswith("0::"):
            group = _CGROUPS / line.removeprefix("0::").strip("/")
            yield from (g for g in (group, *group.parents) if g.is_relative_to(_CGROUPS))


def _read_limit(file: Path) -> str:
    with contextlib.suppress(OSError):  # the root has no limits
        return file.read_text().strip()
    return ""
