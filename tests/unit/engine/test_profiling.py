"""Profiles of a process: traces that can be read back, their largest size, one at a time."""

from __future__ import annotations

import gzip
import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.engine.profiling import StepProfiler

SIZE = 17  # of a product that nothing else computes


def profile_product(path: Path, max_trace_bytes: int, repeats: int = 1) -> str:
    profiler = StepProfiler(path, 5, max_trace_bytes, memory=False)
    profiler.start()
    with torch.profiler.record_function("product"):
        for _ in range(repeats):
            torch.ones(SIZE, SIZE) @ torch.ones(SIZE, SIZE)
    return profiler.stop()


@pytest.fixture
def largest_file() -> Iterator[int]:
    """Refuse to grow files of this process beyond this size, as a disk that is full does."""
    size, limits = 500_000, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    yield size
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_trace_has_the_step_its_annotations_and_operators_with_shapes(tmp_path):
    assert profile_product(tmp_path / "profiles" / "actor-0", 1 << 30) == ""
    [file] = (tmp_path / "profiles").iterdir()
    assert file.name == "actor-0.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    events = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert trace["step"] == 5
    assert events["aten::mm"]["args"]["Input Dims"] == [[SIZE, SIZE], [SIZE, SIZE]]
    outer, inner = events["product"], events["aten::mm"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_trace_that_is_larger_before_compression_is_dropped_with_the_reason(tmp_path):
    reason = profile_product(tmp_path / "actor-0", 1000)
    assert reason == (
        "actor-0.json.gz cannot be written: it is larger before compression than "
        "profile.max_trace_bytes=1000"
    )
    assert [*tmp_path.iterdir()] == []


def test_trace_is_compressed_as_it_is_exported(tmp_path, largest_file):
    assert profile_product(tmp_path / "actor-0", 1 << 30, repeats=500) == ""
    [file] = tmp_path.iterdir()
    assert len(gzip.decompress(file.read_bytes())) > 2 * largest_file


def test_export_ends_at_the_largest_size(tmp_path, largest_file):
    reason = profile_product(tmp_path / "actor-0", 2 * largest_file, repeats=1500)
    assert f"profile.max_trace_bytes={2 * largest_file}" in reason
    assert [*tmp_path.iterdir()] == []


def test_name_that_is_taken_by_a_folder_is_a_reason_and_leaves_nothing(tmp_path):
    taken = tmp_path / "actor-0.json.gz"
    taken.mkdir()
    reason = profile_product(tmp_path / "actor-0", 1 << 30)
    assert reason.startswith("actor-0.json.gz cannot be written: [Errno 21] Is a directory")
    assert [*tmp_path.rglob("*")] == [taken]


@pytest.mark.parametrize("method", ["stop", "export_chrome_trace"])
def test_error_of_torch_is_a_reason_and_leaves_nothing(tmp_path, monkeypatch, method):
    def fail(self: torch.profiler.profile, *_: Any, **__: Any) -> None:
        stop(self)
        raise RuntimeError("Trace is already saved.")

    stop = torch.profiler.profile.stop
    monkeypatch.setattr(torch.profiler.profile, method, fail)
    assert re.fullmatch(
        r"actor-0.json.gz cannot be (recorded|written): Trace is already saved\.",
        profile_product(tmp_path / "actor-0", 1 << 30),
    )
    assert [*tmp_path.iterdir()] == []


def test_folder_that_cannot_be_made_is_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    reason = profile_product(tmp_path / "file" / "actor-0", 1 << 30)
    assert reason.startswith("actor-0.json.gz cannot be written: ")
    assert not StepProfiler.is_running()


def test_memory_is_no_longer_recorded_when_nothing_can_be_written(tmp_path, monkeypatch):
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kw: calls.append(kw))
    (tmp_path / "file").write_text("")
    profiler = StepProfiler(tmp_path / "file" / "actor-0", 1, 1 << 30, memory=True).start()
    assert [*calls[0]] == ["max_entries"]
    assert "cannot be written" in profiler.stop()
    assert calls[1:] == [{"enabled": None}]


def test_running_profile_is_seen_by_other_models_of_the_process(tmp_path):
    profiler = StepProfiler(tmp_path / "actor-0", 1, 1 << 30, memory=False)
    states = [StepProfiler.is_running()]
    profiler.start()
    states.append(StepProfiler.is_running())
    profiler.stop()
    assert [*states, StepProfiler.is_running()] == [False, True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's allocator")
def test_snapshot_of_a_gpu_is_written_beside_the_trace(tmp_path):
    profiler = StepProfiler(tmp_path / "actor-0", 1, 1 << 30, memory=True).start()
    torch.ones(1 << 20, device="cuda")
    assert profiler.stop() == ""
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"actor-0.json.gz", "actor-0.memory.pickle"}
