"""Memory cgroups for calls of the sandbox, where the machine allows them.

A cgroup counts memory that /proc does not show: kernel memory, such as sockets and inodes, and
pages that no process maps. It needs a writable cgroup folder, as root has on a machine and a user
in a delegated subtree; most containers have none. Standard library only. Kernel interfaces:
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "mcore-rl-sandbox-"  # of names of cgroups and scratch folders, before a process id

_TCP_BYTES = 32 << 20  # version 1 counts TCP buffers separately
_REMOVE_S = 2.0  # a cgroup is in use for a moment after its last process has been reaped
# Required and optional files of a cgroup that limits all memory, for each version.
_LIMITS = (
    (("memory.max",), ("memory.swap.max", "memory.oom.group")),
    (
        ("memory.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes"),
        ("memory.memsw.limit_in_bytes",),
    ),
)


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """A folder for new memory cgroups, and the files that limit one."""

    folder: str
    files: tuple[str, ...]

    def build_limits(self, num_bytes: int) -> dict[str, int]:
        """Return the value to write to each file, in this order."""
        fixed = {
            "memory.swap.max": 0,
            "memory.oom.group": 1,  # all processes of a call end together
            "memory.kmem.tcp.limit_in_bytes": _TCP_BYTES,
        }
        return {name: fixed.get(name, num_bytes) for name in self.files}


@functools.cache
def find_parent() -> CgroupParent | None:
    """Find a folder for memory cgroups, at or above that of this process; None: there is none."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
        membership = Path("/proc/self/cgroup").read_text()
        options = Path("/proc/cmdline").read_text()
    except OSError:
        return None
    # Options of cgroup.memory without which kernel memory is not counted.
    if "nokmem" in options or "nosocket" in options:
        return None
    for folder in list_candidate_folders(mounts, membership):
        with contextlib.suppress(OSError):
            return _try_folder(folder)
    return None


def list_candidate_folders(mounts: str, membership: str) -> Iterator[str]:
    """Yield folders whose new cgroups would count memory, from that of this process upwards.

    Args:
        mounts: Text of /proc/self/mountinfo.
        membership: Text of /proc/self/cgroup.
    """
    paths: dict[str, str] = {}  # by controller; "" is version 2
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in mounts.splitlines():
        place, _, kind = line.partition(" - ")
        root, mount = place.split()[3:5]
        name, _, options = kind.split()[:3]
        controller = {"cgroup": "memory", "cgroup2": ""}.get(name)
        if controller is None or controller not in paths:
            continue
        if controller and controller not in options.split(","):
            continue
        path = paths[controller]
        path = path.removeprefix(root) if root != "/" else path
        folder = Path(f"{mount}/{path}")
        if controller:
            yield str(folder)
            continue
        # Version 2: children count memory if subtree_control has it, which a cgroup with
        # processes does not allow.
        while folder.is_relative_to(mount):
            with contextlib.suppress(OSError):
                if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                    yield str(folder)
            folder = folder.parent


def _try_folder(folder: str) -> CgroupParent:
    """Make a cgroup in a folder and remove it; raise OSError if that is not allowed."""
    trial = f"{folder}/{PREFIX}{os.getpid()}-trial"
    os.mkdir(trial)
    try:
        present = set(os.listdir(trial))
        files = [
            (*required, *optional) for required, optional in _LIMITS if present.issuperset(required)
        ]
        if not files:
            raise OSError(f"{folder} does not limit all memory")
        parent = CgroupParent(folder, tuple(name for name in files[0] if name in present))
        for name, value in parent.build_limits(1 << 30).items():
            Path(trial, name).write_text(str(value))
        return parent
    finally:
        os.rmdir(trial)


class Cgroup:
    """Memory cgroup of a call."""

    def __init__(self, parent: str, limits: dict[str, int]) -> None:
        """Make the cgroup, and remove those of killed supervisors. Raises OSError."""
        for name in os.listdir(parent):
            pid = name.removeprefix(PREFIX)
            if pid != name and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{parent}/{name}")
        self.folder = f"{parent}/{PREFIX}{os.getpid()}"
        os.mkdir(self.folder)
        for name, value in limits.items():
            Path(self.folder, name).write_text(str(value))

    def join(self) -> None:
        """Move the calling process into the cgroup. Raises OSError."""
        Path(self.folder, "cgroup.procs").write_text("0")

    def has_killed(self) -> bool:
        """Return whether the kernel has killed a process because the cgroup's memory was full."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(FileNotFoundError):
                text = Path(self.folder, name).read_text()
                return re.search("^oom_kill [1-9]", text, re.MULTILINE) is not None
        return False

    def remove(self) -> None:
        """Remove the cgroup once its processes are gone, or leave it to a later call."""
        deadline = time.monotonic() + _REMOVE_S
        while os.path.exists(self.folder) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
                return
            time.sleep(0.002)
