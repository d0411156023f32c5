import json
import math
import sys
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.observability import trackers
from mcore_rl.observability.sinks import MetricsSinks
from mcore_rl.observability.trackers import TrackedRun


def sinks_of(folder):
    return MetricsSinks(TrackedRun(folder, "project", {}))


def lines(output_dir) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def scalars(output_dir, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(output_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_both_sinks_hold_a_step_as_soon_as_it_is_written(tmp_path):
    with sinks_of(tmp_path / "run") as sinks:
        for step, reward in ((1, 0.25), (2, 0.5)):
            sinks.write(step, {"reward": reward, "num_tokens": 7 * step})
            assert [row["step"] for row in lines(tmp_path / "run")] == list(range(1, step + 1))
            assert scalars(tmp_path / "run", "reward")[-1] == (step, reward)
    row = lines(tmp_path / "run")[1]
    assert row.pop("wall_time_s") > 1.7e9
    assert row == {"phase": "training", "step": 2, "reward": 0.5, "num_tokens": 14}


def test_numbers_of_numpy_are_numbers_and_what_is_not_finite_is_null(tmp_path):
    with sinks_of(tmp_path) as sinks:
        sinks.write(1, {"a": np.float32(0.5), "b": np.int64(3), "c": math.nan, "d": -math.inf})
    row = lines(tmp_path)[0]
    assert (row["a"], row["b"], row["c"], row["d"]) == (0.5, 3, None, None)
    assert math.isnan(scalars(tmp_path, "c")[0][1])


def test_a_second_run_in_the_same_folder_replaces_the_first(tmp_path):
    for steps in (3, 1):
        with sinks_of(tmp_path) as sinks:
            for step in range(1, steps + 1):
                sinks.write(step, {"reward": float(steps)})
    assert len(lines(tmp_path)) == 1
    assert scalars(tmp_path, "reward") == [(1, 1.0)]


def test_sinks_are_closed_when_the_run_fails(tmp_path):
    with pytest.raises(RuntimeError, match="diverged"), sinks_of(tmp_path) as sinks:
        sinks.write(1, {"reward": 0.0})
        raise RuntimeError("diverged")
    with pytest.raises(ValueError, match="closed file"):
        sinks.write(2, {"reward": 0.0})
    assert len(lines(tmp_path)) == 1


def test_a_tracker_that_fails_in_the_run_is_told_once_and_the_run_goes_on(
    tmp_path, monkeypatch, capsys
):
    class Broken:
        num_calls = 0

        def __init__(self, run): ...

        def log(self, row):
            Broken.num_calls += 1
            if row["step"] > 1:
                raise RuntimeError("the service is gone\nand more")

        def close(self):
            raise AssertionError("it is left alone from then on")

    monkeypatch.setitem(trackers._KINDS, "wandb", Broken)
    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
    run = TrackedRun(tmp_path, "project", {})
    with MetricsSinks(run, trackers=["wandb", "tensorboard"]) as sinks:
        for step in (1, 2, 3):
            sinks.write(step, {"reward": float(step)})
    assert Broken.num_calls == 2
    told = "mcore-rl: warning: wandb gets no more metrics: RuntimeError: the service is gone"
    assert capsys.readouterr().err.splitlines() == [told]
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]
    assert scalars(tmp_path, "reward") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_each_phase_has_a_step_axis_of_its_own(tmp_path):
    with sinks_of(tmp_path) as sinks:
        for step in (1, 2, 3):
            sinks.write(step, {"loss": 1.0}, "warm_start")
        sinks.write(0, {"eval/test/reward": 0.25})
        for step in (1, 2):
            sinks.write(step, {"loss": 2.0})
    axes = {}
    for row in lines(tmp_path):
        axes.setdefault(row["phase"], []).append(row["step"])
    assert axes == {"warm_start": [1, 2, 3], "training": [0, 1, 2]}
    assert scalars(tmp_path, "warm_start/loss") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert scalars(tmp_path, "loss") == [(1, 2.0), (2, 2.0)]


def test_a_tracker_draws_each_phase_over_its_own_steps(tmp_path, monkeypatch):
    """With the calls of W&B, whose package is not pinned here."""
    calls = []

    class Run:
        def define_metric(self, name, step_metric):
            calls.append((name, step_metric))

        def log(self, row):
            calls.append(row)

        def finish(self): ...

    wandb = types.SimpleNamespace(init=lambda **settings: Run())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
    with MetricsSinks(TrackedRun(tmp_path, "project", {}), trackers=["wandb"]) as sinks:
        sinks.write(9, {"loss": 1.0}, "warm_start")
        sinks.write(1, {"reward": 0.5})
        sinks.write(2, {"reward": 0.75})
    assert calls == [
        ("warm_start/*", "warm_start/step"),
        {"warm_start/loss": 1.0, "warm_start/step": 9},
        ("*", "step"),
        {"reward": 0.5, "step": 1},
        {"reward": 0.75, "step": 2},
    ]
