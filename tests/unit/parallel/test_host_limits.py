"""Cores and memory that a process may use, with cgroups in folders like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_rl.controller import node
from mcore_rl.parallel import host_limits

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/job/step, of a process with 8 cores."""
    (tmp_path / "cgroup").write_text("5:devices:/elsewhere\n0::/job/step\n")
    (tmp_path / "groups/job/step").mkdir(parents=True)
    monkeypatch.setattr(host_limits, "_PROCESS_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host_limits, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path / "groups"


@pytest.mark.parametrize(
    ("of_job", "of_step", "cores"),
    [
        ("max 100000", "max 100000", 8),
        ("max 100000", "350000 100000", 3),
        ("200000 100000", "max 100000", 2),
        ("50000 100000", "max 100000", 1),
        ("1600000 100000", "max 100000", 8),
    ],
)
def test_node_counts_a_device_for_each_core_of_this_job(
    groups, monkeypatch, of_job, of_step, cores
):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))  # no GPUs
    (groups / "job/cpu.max").write_text(of_job)
    (groups / "job/step/cpu.max").write_text(of_step)
    assert node._count_cpu_ranks() == cores


def test_limits_are_those_of_affinity_without_cgroups_of_version_2(groups, monkeypatch):
    monkeypatch.setattr(host_limits, "_PROCESS_CGROUP", Path("/nowhere"))
    assert host_limits.count_cores() == 8
    assert host_limits.get_free_memory_bytes() > 1 << 60


def test_node_counts_no_cpu_devices_with_gpus(groups, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    assert node._count_cpu_ranks() == 0


def test_free_memory_is_left_by_the_nearest_limit_and_counts_read_files(groups):
    (groups / "job/memory.max").write_text(f"{10 * GIB}\n")
    (groups / "job/memory.current").write_text(f"{7 * GIB}\n")
    (groups / "job/memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {5 * GIB}\n")
    (groups / "job/step/memory.max").write_text("max\n")
    assert host_limits.get_free_memory_bytes() == 8 * GIB
    (groups / "job/memory.current").write_text(f"{16 * GIB}\n")
    assert host_limits.get_free_memory_bytes() == 0


def test_memory_use_is_that_of_the_machine_or_of_the_fullest_cgroup(groups, monkeypatch, tmp_path):
    of_machine = tmp_path / "meminfo"
    of_machine.write_text(
        "MemTotal: 64 kB\nMemFree: 2 kB\nMemAvailable: 48 kB\nHugePages_Free: 0\n"
    )
    monkeypatch.setattr(host_limits, "_MEMORY", of_machine)
    assert host_limits.compute_memory_use() == 0.25
    for name, used in (("job", 2 * GIB), ("job/step", 5 * GIB)):
        (groups / name / "memory.max").write_text(f"{10 * GIB}\n")
        (groups / name / "memory.current").write_text(f"{used + GIB}\n")
        (groups / name / "memory.stat").write_text(f"inactive_file {GIB}\n")
    assert host_limits.compute_memory_use() == 0.5
