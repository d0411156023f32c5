"""Records of ranks in the steps that are due: profiles, peaks of memory, loads of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.schema import ProfileConfig
from mcore_rl.observability.expert_load import ExpertLoad
from mcore_rl.trainers.step_recorder import StepRecorder
from tests.fakes import LocalGroup


class Ranks(LocalGroup):
    """Two ranks of a model, as a WorkerGroup calls them."""

    def __init__(self, peaks: list[dict[str, int]], load: dict[str, list[int]]) -> None:
        self._peaks, self._load = peaks, load
        self.calls: list[tuple[Any, ...]] = []

    def start_profile(self, prefix: str, step: int, **settings: Any) -> list[None]:
        self.calls.append(("start", prefix, step, settings))
        return [None, None]

    def stop_profile(self) -> list[str]:
        self.calls.append(("stop",))
        return ["", "actor-1.json.gz cannot be written: full"]

    def get_peak_memory(self) -> list[dict[str, int]]:
        self.calls.append(("peaks",))
        return self._peaks

    def get_expert_load(self) -> dict[str, list[int]]:
        return self._load


def build_recorder(
    model: Ranks, folder: Path, results: dict[str, Any] | None = None, **settings: Any
) -> tuple[StepRecorder, list, dict]:
    loads: list[ExpertLoad] = []
    results = {} if results is None else results
    recorder = StepRecorder(
        {"actor": model}, ProfileConfig(**settings), folder, 100, loads.append, results
    )
    return recorder, loads, results


def run_steps(recorder: StepRecorder, *steps: int) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        recorder.begin(step)
        metrics.append(recorder.finish(step))
    return metrics


def test_chosen_steps_are_profiled_and_a_missing_trace_is_shown(tmp_path, capsys):
    ranks = Ranks([{}, {}], {})
    recorder, _, _ = build_recorder(ranks, tmp_path, steps=[2], ranks=[1], max_trace_bytes=9)
    run_steps(recorder, 1, 2, 3)
    settings = {"ranks": [1], "max_trace_bytes": 9, "memory": False}
    prefix = str(tmp_path / "profiles" / "step_000002" / "actor")
    calls = [call for call in ranks.calls if call != ("peaks",)]
    assert calls == [("start", prefix, 2, settings), ("stop",)]
    assert capsys.readouterr().err == (
        "mcore-rl: warning: step 2, profile of actor: actor-1.json.gz cannot be written: full; "
        "the run goes on\n"
    )


def test_highest_peak_of_ranks_is_a_metric_and_each_is_in_the_summary(tmp_path):
    peaks = [
        {"max_allocated_bytes": 5, "max_reserved_bytes": 6},
        {"max_allocated_bytes": 4, "max_reserved_bytes": 8},
    ]
    recorder, _, results = build_recorder(Ranks(peaks, {}), tmp_path)
    [metrics] = run_steps(recorder, 1)
    assert metrics == {
        "gpu_memory/actor/max_allocated_bytes": 5, "gpu_memory/actor/max_reserved_bytes": 8,
    }  # fmt: skip
    by_rank = {"max_allocated_bytes": [5, 4], "max_reserved_bytes": [6, 8]}
    assert results == {"gpu_memory": {"actor": by_rank}}


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [([9, 1], [9, 4]), ([9], [5, 4])],  # of the same ranks, and of another layout
    ids=["two ranks", "one rank"],
)
def test_peaks_of_a_resumed_run_are_the_highest_of_its_attempts(tmp_path, earlier, expected):
    peaks = [
        {"max_allocated_bytes": 5, "max_reserved_bytes": 6},
        {"max_allocated_bytes": 4, "max_reserved_bytes": 8},
    ]
    before = {"max_allocated_bytes": earlier, "max_reserved_bytes": [0] * len(earlier)}
    recorder, _, results = build_recorder(
        Ranks(peaks, {}), tmp_path, {"gpu_memory": {"actor": before}, "evaluation": {}}
    )
    [metrics] = run_steps(recorder, 3)
    assert metrics["gpu_memory/actor/max_allocated_bytes"] == max(expected)
    by_rank = {"max_allocated_bytes": expected, "max_reserved_bytes": [6, 8]}
    assert results == {"gpu_memory": {"actor": by_rank}, "evaluation": {}}


def test_peaks_of_ranks_on_a_cpu_are_read_once(tmp_path):
    ranks = Ranks([{}, {}], {})
    recorder, _, results = build_recorder(ranks, tmp_path)
    assert run_steps(recorder, 1, 2) == [{}, {}]
    assert ranks.calls == [("peaks",)] and results == {}


@pytest.mark.parametrize(
    ("load", "expected"),
    [({}, []), ({"1": [3, 1]}, [ExpertLoad(step, "actor", [1], [[3, 1]]) for step in (2, 4)])],
)
def test_load_of_experts_is_recorded_in_the_steps_that_are_due(tmp_path, load, expected):
    recorder, loads, _ = build_recorder(Ranks([{}], load), tmp_path)
    run_steps(recorder, 1, 2, 3, 4)  # of 100, of which one of two is due
    assert loads == expected
