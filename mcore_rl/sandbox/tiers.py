"""Tiers of the sandbox, and the requests that the supervisor runs.

The number of processes is limited by RLIMIT_NPROC under bubblewrap. The kernel counts it per user
id and user namespace: as root the program gets a separate user id, else bubblewrap makes a
namespace. If neither is possible (uid 0 that cannot change it), and for threads under Landlock, the
supervisor counts 20 times a second. Memory is limited by RLIMIT_AS per process, by the supervisor
in sum, and by a memory cgroup if one can be made. If not, the filter refuses calls whose memory the
supervisor does not count (seccomp_filter.py, usage.py).
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
from mcore_rl.sandbox.seccomp_filter import build_filter

_SCRATCH = "/tmp"  # in bubblewrap
_SYSTEM = "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"
_FILES = "/etc/ld.so.cache", "/etc/localtime"
# /dev/full reads as zeros, too, but cannot be mapped: pages of /dev/zero stay in memory after they
# are unmapped.
_DEVICES = {n: n for n in ("null", "full", "random", "urandom")} | {"zero": "full"}
_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_OPEN_FILES = 128
_PENDING_SIGNALS = 128  # and timers
_KERNEL_BYTES = 32 << 20  # in a cgroup, for stacks, page tables and descriptors
# chown, dac_override, kill, setgid, setuid: to change to another user id and to clean up after it
_CAN_CHANGE_USER = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of sandbox."""

    name: str  # bwrap, landlock or unsafe
    has_proc: bool = True  # for bubblewrap: the program has a /proc
    in_user_namespace: bool = False  # for bubblewrap without capabilities
    own_uid: bool = False  # the program gets a separate user id
    in_cgroup: bool = False  # a memory cgroup limits the program

    def __str__(self) -> str:
        options = {
            "in a user namespace": self.in_user_namespace,
            "with a user id of its own": self.own_uid,
            "without /proc": not self.has_proc,
            "in a cgroup": self.in_cgroup,
        }
        return " ".join([self.name, *(words for words, is_set in options.items() if is_set)])


def list_candidates(tier: str) -> list[Tier]:
    """Return the tiers that the setting `tier` allows, best first, whether or not they work."""
    can_change = _can_change_user()
    tiers: list[Tier] = []
    if tier in ("auto", "bwrap"):
        for has_proc in (True, False):
            tiers += [Tier("bwrap", has_proc, own_uid=True)] if can_change else []
            tiers.append(Tier("bwrap", has_proc, in_user_namespace=True))
    if tier in ("auto", "landlock"):
        tiers += [Tier("landlock", own_uid=True)] if can_change else []
        tiers.append(Tier("landlock"))
    if tier == "unsafe":
        return [Tier("unsafe")]
    if find_parent() is None:
        return tiers
    pairs = ((replace(candidate, in_cgroup=True), candidate) for candidate in tiers)
    return list(itertools.chain(*pairs))


def build_request(
    tier: Tier,
    settings: SandboxSettings,
    program: Sequence[str],
    stdin: str,
    files: Mapping[str, str],
) -> dict[str, Any]:
    """Build the request of supervisor.py: program, containment, limits (bytes, seconds).

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
    # Elsewhere processes outside would count; a user namespace counts its first process.
    if is_bwrap:
        limits["RLIMIT_NPROC"] = [settings.processes + tier.in_user_namespace] * 2
    return {
        "command": [*_build_bwrap_command(tier, settings), *python] if is_bwrap else python,
        "cgroup": _build_cgroup(memory + (1 + is_bwrap) * size) if tier.in_cgroup else None,
        "own_uid": tier.own_uid,
        "own_processes": 2 if is_bwrap else 0,
        # Another user id may have no access to TMPDIR.
        "scratch_parent": "/tmp" if tier.own_uid else None,
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
            "readable": [*_SYSTEM, *_FILES, *_list_python_folders()],
            "limits": limits,
            "filter": build_filter(os.uname().machine, is_bwrap, tier.in_cgroup),
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


def _build_cgroup(num_bytes: int) -> dict[str, Any]:
    """Build the arguments of a Cgroup for a program with so much memory and files in memory."""
    parent = find_parent()
    if parent is None:
        raise OSError("no memory cgroup can be made here")
    return {"parent": parent.folder, "limits": parent.build_limits(num_bytes + _KERNEL_BYTES)}


def _build_bwrap_command(tier: Tier, settings: SandboxSettings) -> Iterator[str]:
    """Yield the command line of bubblewrap, with separate mounts, pids, network and IPC."""
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
        # Read-only: without CAP_SYS_RESOURCE, as in containers, the kernel lets a process lower its
        # oom_score_adj again.
        yield from ("--proc", "/proc", "--remount-ro", "/proc")
    yield from ("--perms", "0755", "--tmpfs", "/dev")
    for name, source in _DEVICES.items():
        yield from ("--dev-bind", f"/dev/{source}", f"/dev/{name}")
    for target, name in (("", "fd"), ("/0", "stdin"), ("/1", "stdout"), ("/2", "stderr")):
        yield from ("--symlink", f"/proc/self/fd{target}", f"/dev/{name}")
    yield from ("--size", size, "--perms", "1777", "--tmpfs", "/dev/shm")
    yield from ("--remount-ro", "/dev", "--size", size, "--perms", "1777", "--tmpfs", _SCRATCH)
    for path in [*_list_python_folders(), _LAUNCHER]:
        for parent in list(Path(path).parents)[
            -2::-1
        ]:  # bwrap itself would make them private to its user
            yield from ("--dir", str(parent))
        yield from ("--ro-bind", path, path)
    yield from ("--remount-ro", "/", "--chdir", _SCRATCH, "--")


def _list_python_folders() -> list[str]:
    """Return the folders of the interpreter and its packages that are not in /usr."""
    folders = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
    return sorted(path for path in folders if not f"{path}/".startswith("/usr/"))


def _can_change_user() -> bool:
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    return os.geteuid() == 0 and capabilities & _CAN_CHANGE_USER == _CAN_CHANGE_USER
