"""What this process may use of its node: cores and memory, by affinity and cgroups; no Ray.

Of cgroups version 2 alone. A limit counts wherever it is: at the group of the process or above.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def num_cores() -> int:
    """Whole ones, and at least one."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit():
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def memory_left() -> int:
    """Bytes until the first limit; what the kernel keeps of files that were read counts as free."""
    left = sys.maxsize
    for group in _groups():
        limit = _read(group / "memory.max")
        if limit.isdigit():
            parts = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            used = int(_read(group / "memory.current") or 0) - int(parts.get("inactive_file", 0))
            left = min(left, int(limit) - used)
    return max(0, left)


def _groups() -> Iterator[Path]:
    for line in _read(_OWN_GROUP).splitlines():
        if line.startswith("0::"):
            own = _GROUPS / line.removeprefix("0::").strip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(_GROUPS))


def _read(file: Path) -> str:
    """Empty where it is not there, as limits of the root are not."""
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return ""
