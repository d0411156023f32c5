"""Memory cgroups: where this machine lets us make them, and one for a call.

A cgroup counts what no look at processes can see: kernel memory, such as sockets and inodes, and
pages that nothing maps. It needs a folder of cgroups that we may write to, as root has on a machine
and a user in a delegated subtree; most containers have none. Standard library only. Kernel
interfaces: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
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

PREFIX = "mcore-rl-sandbox-"  # of cgroups, and of scratch folders; a process id follows

_TCP_BYTES = 32 << 20  # version 1 counts buffers of TCP apart
_REMOVE_S = 2.0  # a cgroup is in use for a moment after its last process has been reaped
# The files that a cgroup of each version must have to limit all memory, and those that it may have.
_LIMITS = (
    (("memory.max",), ("memory.swap.max", "memory.oom.group")),
    (
        ("memory.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes"),
        ("memory.memsw.limit_in_bytes",),
    ),
)


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """A folder in which memory cgroups can be made, and the files that limit one."""

    folder: str
    files: tuple[str, ...]

    def limits(self, num_bytes: int) -> dict[str, int]:
        """Return what to write into each file, in this order."""
        fixed = {
            "memory.swap.max": 0,
            "memory.oom.group": 1,  # all processes of a call end together
            "memory.kmem.tcp.limit_in_bytes": _TCP_BYTES,
        }
        return {name: fixed.get(name, num_bytes) for name in self.files}


@functools.cache
def find_parent() -> CgroupParent | None:
    """Try where a memory cgroup can be made, at or above our own; None: nowhere."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
        membership = Path("/proc/self/cgroup").read_text()
        options = Path("/proc/cmdline").read_text()
    except OSError:
        return None
    if "nokmem" in options or "nosocket" in options:  # of cgroup.memory: kernel memory is not seen
        return None
    for folder in candidate_folders(mounts, membership):
        with contextlib.suppress(OSError):
            return _try_folder(folder)
    return None


def candidate_folders(mounts: str, membership: str) -> Iterator[str]:
    """Yield folders whose new cgroups would count memory, from ours upwards.

    Args:
        mounts: text of /proc/self/mountinfo.
        membership: text of /proc/self/cgroup.
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
        own = Path(f"{mount}/{path}")
        if controller:
            yield str(own)
            continue
        # Version 2: children count memory where subtree_control has it, which a cgroup that has
        # processes of its own does not allow.
        while own.is_relative_to(mount):
            with contextlib.suppress(OSError):
                if "memory" in (own / "cgroup.subtree_control").read_text().split():
                    yield str(own)
            own = own.parent


def _try_folder(folder: str) -> CgroupParent:
    """Make a cgroup there and remove it; raises OSError where that is not allowed."""
    trial = f"{folder}/{PREFIX}{os.getpid()}-trial"
    os.mkdir(trial)
    try:
        present = set(os.listdir(trial))
        files = [(*must, *may) for must, may in _LIMITS if present.issuperset(must)]
        if not files:
            raise OSError(f"{folder} does not limit all memory")
        parent = CgroupParent(folder, tuple(name for name in files[0] if name in present))
        for name, value in parent.limits(1 << 30).items():
            Path(trial, name).write_text(str(value))
        return parent
    finally:
        os.rmdir(trial)


class Cgroup:
    """The memory cgroup of one call."""

    def __init__(self, parent: str, limits: dict[str, int]) -> None:
        """Make it, and remove those that killed supervisors have left. Raises OSError."""
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
        """Move the calling process into it. Raises OSError."""
        Path(self.folder, "cgroup.procs").write_text("0")

    def has_killed(self) -> bool:
        """Whether a process in it was ended because its memory was full."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(FileNotFoundError):
                text = Path(self.folder, name).read_text()
                return re.search("^oom_kill [1-9]", text, re.MULTILINE) is not None
        return False

    def remove(self) -> None:
        """Remove it once its processes are gone; one that stays is left to a later call."""
        deadline = time.monotonic() + _REMOVE_S
        while os.path.exists(self.folder) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
                return
            time.sleep(0.002)
