"""Cores and memory within affinity and cgroups, of folders that stand for those of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller import node, node_limits, object_store

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/job/step, of a process with 8 cores."""
    (tmp_path / "own").write_text("5:devices:/elsewhere\n0::/job/step\n")
    (tmp_path / "groups/job/step").mkdir(parents=True)
    monkeypatch.setattr(node_limits, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(node_limits, "_GROUPS", tmp_path / "groups")
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
def test_a_node_stands_for_as_many_devices_as_it_has_cores_for_this_job(
    groups, monkeypatch, of_job, of_step, cores
):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))  # no GPUs
    (groups / "job/cpu.max").write_text(of_job)
    (groups / "job/step/cpu.max").write_text(of_step)
    assert node._cpu_ranks() == cores


def test_without_cgroups_of_version_2_affinity_alone_counts(groups, monkeypatch):
    monkeypatch.setattr(node_limits, "_OWN_GROUP", Path("/nowhere"))
    assert node_limits.num_cores() == 8
    assert node_limits.memory_left() > 1 << 60


def test_a_node_with_gpus_stands_for_no_devices_without(groups, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    assert node._cpu_ranks() == 0


def test_memory_is_what_the_nearest_limit_leaves_and_files_that_were_read_are_given_back(groups):
    (groups / "job/memory.max").write_text(f"{10 * GIB}\n")
    (groups / "job/memory.current").write_text(f"{7 * GIB}\n")
    (groups / "job/memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {5 * GIB}\n")
    (groups / "job/step/memory.max").write_text("max\n")
    assert node_limits.memory_left() == 8 * GIB
    (groups / "job/memory.current").write_text(f"{16 * GIB}\n")
    assert node_limits.memory_left() == 0


def test_the_object_store_stays_within_the_memory_of_the_job(groups, monkeypatch):
    space = os.statvfs_result((4096, 4096, *[64 * GIB // 4096] * 3, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    (groups / "job/memory.max").write_text(f"{10 * GIB}")
    held = object_store.object_store_bytes(0, 100 * GIB, setting="object_store_bytes")
    assert held == 8 * GIB
    with pytest.raises(ConfigError, match=rf"memory\.max .* leave here, {10 * GIB}"):
        object_store.object_store_bytes(11 * GIB, setting="object_store_bytes")
    (groups / "job/memory.max").write_text("max")
    assert object_store.object_store_bytes(11 * GIB, setting="object_store_bytes") == 11 * GIB
