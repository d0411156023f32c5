"""The kinds of sandbox there are, and the requests that they are made by.

Processes are limited so. Under bubblewrap by RLIMIT_NPROC, which the kernel counts for a user id in
a user namespace: as root the program gets a user id of its own, else bubblewrap makes a namespace.
Where neither counts (uid 0 that cannot change it), and for threads under Landlock, the supervisor
looks 20 times a second and ends the call. Memory is limited by RLIMIT_AS for each process, by the
same look for all together, and by a memory cgroup where one can be made. Where none can, the
filter refuses what a look does not see (seccomp_filter.py, usage.py).
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_rl.config.schema import SandboxSettings
from mcore_rl.sandbox.cgroup import find_parent
from mcore_rl.sandbox.seccomp_filter import filter_code

_SCRATCH = "/tmp"  # inside of bubblewrap
_SYSTEM = "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"
_FILES = "/etc/ld.so.cache", "/etc/localtime"
# Reads of /dev/full give zeros as well, and it cannot be mapped: pages of /dev/zero are memory that
# stays when nothing maps it any more.
_DEVICES = {n: n for n in ("null", "full", "random", "urandom")} | {"zero": "full"}
_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_OPEN_FILES = 128
_PENDING_SIGNALS = 128  # and timers
_KERNEL_BYTES = 32 << 20  # of processes, in a cgroup: stacks, page tables, descriptors
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
    in_cgroup: bool = False  # whether a memory cgroup limits it

    def __str__(self) -> str:
        more = {
            "in a user namespace": self.in_user_namespace,
            "with a user id of its own": self.own_uid,
            "without /proc": not self.has_proc,
            "in a cgroup": self.in_cgroup,
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
    if tier == "unsafe":
        return [Tier("unsafe")]
    has_cgroup = find_parent() is not None
    with_cgroup = [[replace(one, in_cgroup=True), one] if has_cgroup else [one] for one in found]
    return list(itertools.chain(*with_cgroup))


def request(
    tier: Tier,
    settings: SandboxSettings,
    program: Sequence[str],
    stdin: str,
    files: Mapping[str, str],
) -> dict[str, Any]:
    """What supervisor.py reads: the program, how it is contained, its limits (bytes, seconds).

    Raises:
        OSError: there is no filter for this machine, or no cgroup can be made.
    """
    python = [getattr(sys, "_base_executable", sys.executable), "-I", "-S", _LAUNCHER]
    is_bwrap = tier.name == "bwrap"
    scratch = _SCRATCH if is_bwrap else ""
    memory, size = settings.memory_mb << 20, settings.scratch_mb << 20
    cpu_s = math.ceil(settings.cpu_s)
    limits = {
        "RLIMIT_AS": [memory, memory],
        "RLIMIT_CORE": [0, 0],
        "RLIMIT_MSGQUEUE": [0, 0],
        "RLIMIT_SIGPENDING": [_PENDING_SIGNALS, _PENDING_SIGNALS],
        "RLIMIT_CPU": [cpu_s, cpu_s + 1],
        "RLIMIT_FSIZE": [size, size],
        "RLIMIT_NOFILE": [_OPEN_FILES, _OPEN_FILES],
    }
    if is_bwrap:  # elsewhere other processes would count; in a namespace its first one does
        limits["RLIMIT_NPROC"] = [settings.processes + tier.in_user_namespace] * 2
    return {
        "command": [*_bwrap(tier, settings), *python] if is_bwrap else python,
        "cgroup": _cgroup(memory + (1 + is_bwrap) * size) if tier.in_cgroup else None,
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
            "filter": filter_code(os.uname().machine, is_bwrap, tier.in_cgroup),
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


def _cgroup(num_bytes: int) -> dict[str, Any]:
    """Of a call whose programs may have so much memory, with the files that are in memory."""
    parent = find_parent()
    if parent is None:
        raise OSError("no memory cgroup can be made here")
    return {"parent": parent.folder, "limits": parent.limits(num_bytes + _KERNEL_BYTES)}


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
    yield from ("--perms", "0755", "--tmpfs", "/dev")
    for name, source in _DEVICES.items():
        yield from ("--dev-bind", f"/dev/{source}", f"/dev/{name}")
    for target, name in (("", "fd"), ("/0", "stdin"), ("/1", "stdout"), ("/2", "stderr")):
        yield from ("--symlink", f"/proc/self/fd{target}", f"/dev/{name}")
    yield from ("--size", size, "--perms", "1777", "--tmpfs", "/dev/shm")
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
