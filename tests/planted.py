"""Faults that Python finds on one node only, and nodes that are processes of this machine.

On the node that SLURMD_NODENAME calls `NODE`, and on no other, Python starts again in a world of
its own: with other mounts, limits, packages or another clock. The kernel and the file system answer
the probes themselves. A process outside of SLURM is given its name in the same variable.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.tools.doctor import node as entry
from tests.small_disk import can_mount

NODE = "n2"
NODES = ("n1", NODE)
ROOT = Path(__file__).parents[1]
NICENESS = os.nice(0)  # of the tests, and so of the nodes: the doctor warns of one above 0
_SITE = """\
import os, resource, sys
if os.environ.get("SLURMD_NODENAME") == {node!r} and "PLANTED" not in os.environ:
    os.environ.update({environment!r}, PLANTED="1")
    if {open_files}:
        resource.setrlimit(resource.RLIMIT_NOFILE, ({open_files}, {open_files}))
    command = [*{command!r}, sys.executable, *sys.orig_argv[1:]]
    os.execvp(command[0], command)
"""
_CLOCK = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += %d;
    return status;
}
"""


@dataclass(frozen=True, slots=True)
class World:
    """Differences of the node; {folder} stands for the folder that nodes share."""

    mounts: Mapping[str, str] = field(default_factory=dict)  # small file systems by place
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # by package
    clock_s: int = 0  # ahead
    open_files: int = 0
    command: tuple[str, ...] = ()  # that runs Python


def is_fault(check: str, status: str, value: str) -> bool:
    """Tell whether a finding is a fault of the node, not the niceness that the tests run at."""
    return status != "ok" and (check, value) != ("niceness", str(NICENESS))


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to plant a fault, and patterns of the finding on NODE."""

    world: World
    check: str
    value: str
    remedy: str


FAULTS = {
    "version": Fault(
        World(versions={"ray": "2.59.0"}), "ray", r"^2\.59\.0$", "make the nodes alike"
    ),
    "small shared memory": Fault(
        World(mounts={"/dev/shm": "size=64m"}),
        "shared memory",
        r"67\.1 MB free in /dev/shm",
        "remount,size=",
    ),
    "full disk": Fault(
        World(mounts={"{folder}/temp": "size=512k"}, environment={"TMPDIR": "{folder}/temp"}),
        "temporary files",
        r"temp: 0\.5 MB free, writing fails: No space left on device$",
        "TMPDIR",
    ),
    "few inodes": Fault(
        World(mounts={"{folder}/temp": "nr_inodes=99"}, environment={"TMPDIR": "{folder}/temp"}),
        "temporary files",
        r", 9\d inodes free$",
        "TMPDIR",
    ),
    "path not shared": Fault(
        World(mounts={"{folder}/out": "size=9g"}),
        "shared path",
        r"written on n1, is not here",
        "a folder that all nodes share",
    ),
    "wrong model": Fault(
        World(mounts={"{folder}/model": "size=1m"}),
        "model",
        r"config\.json does not exist",
        "--model-path",
    ),
    "clock": Fault(World(clock_s=100), "clock", r"^(99|100)\.\d+ s ahead of ", "chronyc"),
    "niceness": Fault(
        World(command=("nice", "-n", "15")),
        "niceness",
        f"^{min(19, NICENESS + 15)}$",
        "RAY_worker_niceness=0",
    ),
    "open files": Fault(World(open_files=1000), "open files", "^1000$", "limits.conf"),
}


def plant(folder: Path, world: World) -> dict[str, str]:
    """Plant the faults of a world in a folder that all nodes share; return their environment."""
    if world.mounts and not can_mount():
        pytest.skip("this machine lets nobody mount a file system")
    environment = {name: value.format(folder=folder) for name, value in world.environment.items()}
    path = f"{folder / 'site'}:{ROOT}"
    if world.versions:
        environment["PYTHONPATH"] = f"{_write_packages(folder / 'packages', world.versions)}:{path}"
    if world.clock_s:
        environment["LD_PRELOAD"] = str(_build_shifted_clock(folder, world.clock_s))
    mounts = []
    for place, options in world.mounts.items():
        there = Path(place.format(folder=folder))
        there.mkdir(exist_ok=True)
        mounts.append(f"mount -t tmpfs -o {options} none {there}")
    command = world.command
    if mounts:
        command = ("unshare", "-Urm", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        _SITE.format(
            node=NODE, environment=environment, open_files=world.open_files, command=command
        )
    )
    return {"PYTHONPATH": path}


def _write_packages(folder: Path, versions: Mapping[str, str]) -> Path:
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def _build_shifted_clock(folder: Path, seconds: int) -> Path:
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_CLOCK % seconds)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


class ProcessNodes:
    """A Launcher: one process of this machine for each node."""

    address = "127.0.0.1"

    def __init__(self, environment: Mapping[str, str], nodes: Sequence[str] = NODES) -> None:
        self.nodes = nodes
        self.by_node: dict[str, dict[str, str]] = {}  # more of the environment
        self._environment = os.environ | environment
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, endpoint: RendezvousEndpoint) -> None:
        for number, name in enumerate(self.nodes):
            variables = {"SLURM_NODEID": str(number), "SLURMD_NODENAME": name}
            variables |= self.by_node.get(name, {})
            environment = self._environment | endpoint.to_environment() | variables
            command = [sys.executable, "-m", entry.__name__]
            self._processes.append(subprocess.Popen(command, env=environment))

    def has_ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def get_error(self, name: str) -> str:
        return ""

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()
