"""The kinds of sandbox there are, and the requests that they are made by.

Processes are limited so. Under bubblewrap by RLIMIT_NPROC, which the kernel counts for a user id in
a user namespace: as root the program gets a user id of its own, else bubblewrap makes a namespace.
Where neither counts (uid 0 that cannot change it), and for threads under Landlock, the supervisor
looks 20 times a second and ends the call. Memory is limited by RLIMIT_AS for each process, and by
the same look for all together. No cgroup is needed.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.sandbox_schema import SandboxSettings

_SCRATCH = "/tmp"  # inside of bubblewrap
_SYSTEM = "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"
_FILES = "/etc/ld.so.cache", "/etc/localtime"
_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_OPEN_FILES = 128
# chown, dac_override, kill, setgid, setuid: to change to a user id, and to clean up after it
_CAN_CHANGE_USER = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}


@dataclass(frozen=True, slots=True)
class Tier:
    """One kind of sandbox."""

    name: str  # bwrap, landlock or unsafe
    has_proc: bool = True  # of bubblewrap: whether the program has a /proc
    in_user_namespace: bool = False  # for bubblewrap without capabilities
    own_uid: bool = False  # whether the program gets a user id of its own

    def __str__(self) -> str:
        more = {
            "in a user namespace": self.in_user_namespace,
            "with a user id of its own": self.own_uid,
            "without /proc": not self.has_proc,
        }
        return " ".join([self.name, *(words for words, is_so in more.items() if is_so)])


def candidates(tier: str) -> list[Tier]:
    """Those that the setting `tier` allows, best first; whether they work is not known yet."""
    can_change = _can_change_user()
    found: list[Tier] = []
    if tier in ("auto", "bwrap"):
        for has_proc in (True, False):
            found += [Tier("bwrap", has_proc, own_uid=True)] if can_change else []
            found.append(Tier("bwrap", has_proc, in_user_namespace=True))
    if tier in ("auto", "landlock"):
        found += [Tier("landlock", own_uid=True)] if can_change else []
        found.append(Tier("landlock"))
    return found if tier != "unsafe" else [Tier("unsafe")]


def request(
    tier: Tier,
    settings: SandboxSettings,
    program: Sequence[str],
    stdin: str,
    files: Mapping[str, str],
) -> dict[str, Any]:
    """What supervisor.py reads: the program, how it is contained, its limits (bytes, seconds)."""
    python = [getattr(sys, "_base_executable", sys.executable), "-I", "-S", _LAUNCHER]
    is_bwrap = tier.name == "bwrap"
    scratch = _SCRATCH if is_bwrap else ""
    memory, size = settings.memory_mb << 20, settings.scratch_mb << 20
    cpu_s = math.ceil(settings.cpu_s)
    limits = {
        "RLIMIT_AS": [memory, memory],
        "RLIMIT_CORE": [0, 0],
        "RLIMIT_CPU": [cpu_s, cpu_s + 1],
        "RLIMIT_FSIZE": [size, size],
        "RLIMIT_NOFILE": [_OPEN_FILES, _OPEN_FILES],
    }
    if is_bwrap:  # elsewhere other processes would count; in a namespace its first one does
        limits["RLIMIT_NPROC"] = [settings.processes + tier.in_user_namespace] * 2
    return {
        "command": [*_bwrap(tier, settings), *python] if is_bwrap else python,
        "own_uid": tier.own_uid,
        "own_processes": 2 if is_bwrap else 0,
        "scratch_parent": "/tmp" if tier.own_uid else None,  # TMPDIR may be closed to others
        "stdin": stdin,
        "limits": {
            "wall_s": settings.wall_s,
            "cpu_s": settings.cpu_s,
            "memory": memory,
            "output": settings.output_kb << 10,
            "processes": settings.processes,
            "scratch": size,
        },
        "launch": {
            "tier": tier.name,
            "program": list(program),
            "files": dict(files),
            "scratch": scratch,
            "readable": [*_SYSTEM, *_FILES, *_python_folders()],
            "limits": limits,
            "environment": {
                "HOME": scratch,
                "LANG": "C.UTF-8",
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": scratch,
                **_ONE_THREAD,
            },
        },
    }


def _bwrap(tier: Tier, settings: SandboxSettings) -> Iterator[str]:
    """bubblewrap's command line: its own mounts, pids, network and IPC; ends with this process."""
    yield shutil.which("bwrap") or "/usr/bin/bwrap"
    yield from ("--die-with-parent", "--unshare-pid", "--unshare-net", "--unshare-ipc")
    yield from ("--unshare-uts", "--unshare-cgroup-try", "--new-session")
    if tier.in_user_namespace:
        yield "--unshare-user"
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in _FILES:
        yield from ("--ro-bind-try", path, path)
    size = str(settings.scratch_mb << 20)
    if tier.has_proc:
        yield from ("--proc", "/proc")
    yield from ("--dev", "/dev", "--size", size, "--perms", "1777", "--tmpfs", "/dev/shm")
    yield from ("--remount-ro", "/dev", "--size", size, "--perms", "1777", "--tmpfs", _SCRATCH)
    for path in [*_python_folders(), _LAUNCHER]:
        for parent in list(Path(path).parents)[-2::-1]:  # else it makes them for one user only
            yield from ("--dir", str(parent))
        yield from ("--ro-bind", path, path)
    yield from ("--remount-ro", "/", "--chdir", _SCRATCH, "--")


def _python_folders() -> list[str]:
    """Of the interpreter and its packages, where they are not in /usr."""
    folders = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
    return sorted(path for path in folders if not f"{path}/".startswith("/usr/"))


def _can_change_user() -> bool:
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    return os.geteuid() == 0 and capabilities & _CAN_CHANGE_USER == _CAN_CHANGE_USER
