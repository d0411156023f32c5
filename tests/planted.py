"""Faults that Python finds on one node only, and nodes that are processes of this machine.

On the node that SLURMD_NODENAME calls `NODE`, and on no other, Python starts again in a world of its
own: with other mounts, limits, packages or another clock. The kernel and the file system answer the
probes themselves. A process outside of SLURM is given its name in the same variable.
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
_SITE = """\
import os, resource, sys
world = {world!r}
if os.environ.get("SLURMD_NODENAME") == {node!r} and "PLANTED" not in os.environ:
    os.environ.update(world.environment, PLANTED="1")
    if world.open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (world.open_files,) * 2)
    mounts = [f"mount -t tmpfs -o {{options}} none {{place}}" for place, options in world.mounts.items()]
    command = [*mounts, world.command or 'exec "$@"']
    shell = ["sh", "-c", " && ".join(command), "sh", sys.executable, *sys.orig_argv[1:]]
    shell = ["unshare", "-Urm", *shell] if mounts else shell
    os.execvp(shell[0], shell)
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
    """What differs on the node; {folder} in a place is a folder that the test shares."""

    mounts: Mapping[str, str] = field(default_factory=dict)  # small file systems by place
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # by package
    clock_s: int = 0  # ahead
    open_files: int = 0
    command: str = ""  # in the place of Python


@dataclass(frozen=True, slots=True)
class Fault:
    """What is found: the words of a finding on NODE, {folder} and {port} among them."""

    world: World
    check: str
    value: str  # a regular expression
    remedy: str
    port_is_busy: bool = False
    status: str = "fail"


FAULTS = {
    "version": Fault(
        World(versions={"ray": "2.59.0"}), "ray", r"^2\.59\.0$", "make the nodes alike"
    ),
    "missing package": Fault(
        World(versions={"nvidia-nccl-cu13": "2.20.5"}), "nvidia-nccl-cu13", "^2", "nodes alike"
    ),
    "small shared memory": Fault(
        World(mounts={"/dev/shm": "size=64m"}),
        "shared memory",
        r"67\.1 MB free in /dev/shm",
        "remount,size=",
    ),
    "full disk": Fault(
        World(mounts={"{folder}/temp": "size=1m"}, environment={"TMPDIR": "{folder}/temp"}),
        "temporary files",
        r"temp: 1\.0 MB free, writing fails: No space left on device$",
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
        r"config\.json: No such file",
        "--model-path",
    ),
    "clock": Fault(World(clock_s=100), "clock", r"^(99|100)\.\d+ s ahead of n1", "chronyc"),
    "open files": Fault(World(open_files=1000), "open files", "^1000$", "limits.conf"),
}


def plant(folder: Path, world: World) -> dict[str, str]:
    """Environment of all nodes; `folder` is one that they share."""
    if world.mounts and not can_mount():
        pytest.skip("this machine lets nobody mount a file system")
    site, packages = folder / "site", folder / "packages"
    for name, version in world.versions.items():
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    site.mkdir()
    its = {name: value.format(folder=folder) for name, value in world.environment.items()}
    path = f"{site}:{ROOT}"
    if world.versions:
        its["PYTHONPATH"] = f"{packages}:{path}"
    if world.clock_s:
        its["LD_PRELOAD"] = str(_shifted_clock(folder, world.clock_s))
    mounts = {place.format(folder=folder): options for place, options in world.mounts.items()}
    for place in mounts:
        Path(place).mkdir(exist_ok=True)
    text = _SITE.format(node=NODE)
    (site / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": path}
