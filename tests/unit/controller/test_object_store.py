"""The size of the object store of a node, and limits of cgroups, in folders like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ReplayConfig, RLConfig
from mcore_rl.controller import node, object_store
from mcore_rl.controller.object_store import (
    MIN_BYTES,
    choose_object_store_bytes,
    estimate_sample_bytes,
)

GIB = 1 << 30


def test_object_store_has_the_samples_within_the_free_memory_by_default():
    def choose(samples: int, free: int) -> int:
        return choose_object_store_bytes(0, samples, setting="object_store_bytes", free_bytes=free)

    assert choose(0, 64 * GIB) == choose(MIN_BYTES // 4, 64 * GIB) == MIN_BYTES == GIB // 2
    assert choose(3 * GIB, 64 * GIB) == 3 * GIB
    assert choose(100 * GIB, 10 * GIB) == 8 * GIB
    assert choose(100 * GIB, 64 << 20) == MIN_BYTES


def test_a_size_that_does_not_fit_is_refused():
    def choose(requested: int) -> int:
        return choose_object_store_bytes(
            requested, setting="--object-store-bytes", free_bytes=4 * GIB
        )

    assert choose(4 * GIB) == 4 * GIB
    for requested in (4 * GIB + 1, MIN_BYTES - 1, -1):
        with pytest.raises(ConfigError, match=f"--object-store-bytes={requested}; allowed: 0, or"):
            choose(requested)


@pytest.mark.parametrize(
    ("mode", "steps"), [("sync", 2), ("one_step_off", 2), ("fully_async", 2 + 3)]
)
def test_sample_bytes_count_every_sample_at_its_longest(mode: str, steps: int):
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 100, 900
    config.trainer.mode, config.trainer.staleness = mode, 3 if mode == "fully_async" else None
    assert estimate_sample_bytes(config) == steps * 32 * 1000 * 96
    config.algorithm.filter.replay = ReplayConfig(share=0.1, max_age=6)
    assert estimate_sample_bytes(config) == (steps + 6) * 32 * 1000 * 96


def test_sample_bytes_count_groups_beyond_a_step():
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.trainer.mode = "fully_async"
    before = estimate_sample_bytes(config)
    config.trainer.asynchronous.oversampling = 0.3  # two groups of four
    assert estimate_sample_bytes(config) * (4 * 4) == before * (4 * 4 + 2)


@pytest.mark.parametrize(
    ("mode", "staleness", "groups"),
    [
        ("sync", None, 2 * 24),
        ("one_step_off", None, 2 * 24),
        ("fully_async", 0, 2 * 12),  # in rounds of prompts_per_step
        ("fully_async", 1, 3 * 4),  # rejected groups are freed at once
    ],
)
def test_sample_bytes_count_all_rounds_with_a_filter(mode: str, staleness: int | None, groups: int):
    config = RLConfig()
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 8
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 100, 900
    config.trainer.mode, config.trainer.staleness = mode, staleness
    policy = config.algorithm.filter
    policy.group_filter, policy.max_rounds = "drop_uniform", 3
    policy.prompts_per_round = 0 if mode == "fully_async" else 8
    assert estimate_sample_bytes(config) == groups * 8 * 1000 * 96


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/job/step, of a process with 8 cores."""
    (tmp_path / "cgroup").write_text("5:devices:/elsewhere\n0::/job/step\n")
    (tmp_path / "groups/job/step").mkdir(parents=True)
    monkeypatch.setattr(object_store, "_PROCESS_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(object_store, "_CGROUPS", tmp_path / "groups")
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
    monkeypatch.setattr(object_store, "_PROCESS_CGROUP", Path("/nowhere"))
    assert object_store.count_cores() == 8
    assert object_store.get_free_memory_bytes() > 1 << 60


def test_node_counts_no_cpu_devices_with_gpus(groups, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    assert node._count_cpu_ranks() == 0


def test_free_memory_is_left_by_the_nearest_limit_and_counts_read_files(groups):
    (groups / "job/memory.max").write_text(f"{10 * GIB}\n")
    (groups / "job/memory.current").write_text(f"{7 * GIB}\n")
    (groups / "job/memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {5 * GIB}\n")
    (groups / "job/step/memory.max").write_text("max\n")
    assert object_store.get_free_memory_bytes() == 8 * GIB
    (groups / "job/memory.current").write_text(f"{16 * GIB}\n")
    assert object_store.get_free_memory_bytes() == 0


def test_object_store_stays_within_the_memory_of_the_job(groups, monkeypatch):
    space = os.statvfs_result((4096, 4096, *[64 * GIB // 4096] * 3, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    (groups / "job/memory.max").write_text(f"{10 * GIB}")
    chosen = object_store.choose_object_store_bytes(0, 100 * GIB, setting="object_store_bytes")
    assert chosen == 8 * GIB
    with pytest.raises(ConfigError, match=rf"memory\.max .* leave here, {10 * GIB}"):
        object_store.choose_object_store_bytes(11 * GIB, setting="object_store_bytes")
    (groups / "job/memory.max").write_text("max")
    assert (
        object_store.choose_object_store_bytes(11 * GIB, setting="object_store_bytes") == 11 * GIB
    )
