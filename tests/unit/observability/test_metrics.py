"""Metrics merged over ranks, and written to metrics.jsonl and trackers."""

import json
import math
import sys
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.observability import trackers
from mcore_rl.observability.metrics import MetricsLogger, merge_metrics
from mcore_rl.observability.trackers import TrackedRun


def test_the_name_of_a_metric_says_how_it_is_merged():
    parts = [
        {"loss": 1.0, "a/max_gap": 0.5, "gap_min": 0.1, "time_s_sum": 2.0, "train/num_tokens": 30},
        {"loss": 2.0, "a/max_gap": 0.2, "gap_min": 0.3, "time_s_sum": 1.0, "train/num_tokens": 10},
    ]
    assert merge_metrics(parts, weights=[30, 10]) == {
        "loss": 1.25,
        "a/max_gap": 0.5,
        "gap_min": 0.1,
        "time_s_sum": 3.0,
        "train/num_tokens": 40,
    }


def test_the_word_may_come_first_or_last():
    parts = [{"ratio_max": 1.0, "min_ratio": 3.0}, {"ratio_max": 2.0, "min_ratio": 5.0}]
    assert merge_metrics(parts) == {"ratio_max": 2.0, "min_ratio": 3.0}


def test_without_weights_all_parts_weigh_the_same():
    assert merge_metrics([{"loss": 1.0}, {"loss": 2.0}]) == {"loss": 1.5}


def test_a_metric_is_averaged_over_the_parts_that_have_it():
    merged = merge_metrics([{"loss": 1.0, "kl": 4.0}, {"loss": 3.0}, {}], weights=[1, 3, 9])
    assert merged == {"loss": 2.5, "kl": 4.0}


def test_a_mean_over_no_weight_is_left_out():
    assert merge_metrics([{"loss": 0.0, "num_tokens": 0}], weights=[0]) == {"num_tokens": 0}


def test_weights_must_be_one_a_part():
    with pytest.raises(ValueError, match="zip"):
        merge_metrics([{"loss": 1.0}], weights=[1, 2])


def test_nothing_merges_to_nothing():
    assert merge_metrics([]) == {}


def open_logger(folder):
    return MetricsLogger(TrackedRun(folder, "project", {}))


def lines(output_dir) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def scalars(output_dir, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(output_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_file_and_tensorboard_hold_a_step_as_soon_as_it_is_written(tmp_path):
    with open_logger(tmp_path / "run") as logger:
        for step, reward in ((1, 0.25), (2, 0.5)):
            logger.write(step, {"reward": reward, "num_tokens": 7 * step})
            assert [row["step"] for row in lines(tmp_path / "run")] == list(range(1, step + 1))
            assert scalars(tmp_path / "run", "reward")[-1] == (step, reward)
    row = lines(tmp_path / "run")[1]
    assert row.pop("wall_time_s") > 1.7e9
    assert row == {"phase": "training", "step": 2, "reward": 0.5, "num_tokens": 14}


def test_numbers_of_numpy_are_numbers_and_what_is_not_finite_is_null(tmp_path):
    with open_logger(tmp_path) as logger:
        logger.write(1, {"a": np.float32(0.5), "b": np.int64(3), "c": math.nan, "d": -math.inf})
    row = lines(tmp_path)[0]
    assert (row["a"], row["b"], row["c"], row["d"]) == (0.5, 3, None, None)
    assert math.isnan(scalars(tmp_path, "c")[0][1])


def test_a_second_run_in_the_same_folder_replaces_the_first(tmp_path):
    for steps in (3, 1):
        with open_logger(tmp_path) as logger:
            for step in range(1, steps + 1):
                logger.write(step, {"reward": float(steps)})
    assert len(lines(tmp_path)) == 1
    assert scalars(tmp_path, "reward") == [(1, 1.0)]


def test_the_logger_is_closed_when_the_run_fails(tmp_path):
    with pytest.raises(RuntimeError, match="diverged"), open_logger(tmp_path) as logger:
        logger.write(1, {"reward": 0.0})
        raise RuntimeError("diverged")
    with pytest.raises(ValueError, match="closed file"):
        logger.write(2, {"reward": 0.0})
    assert len(lines(tmp_path)) == 1


def test_a_tracker_that_fails_is_reported_once_and_the_run_continues(tmp_path, monkeypatch, capsys):
    class Broken:
        num_calls = 0

        def __init__(self, run): ...

        def log(self, row):
            Broken.num_calls += 1
            if row["step"] > 1:
                raise RuntimeError("the service is gone\nand more")

        def close(self):
            raise AssertionError("it is left alone from then on")

    monkeypatch.setitem(trackers._TRACKERS, "wandb", Broken)
    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
    run = TrackedRun(tmp_path, "project", {})
    with MetricsLogger(run, trackers=["wandb", "tensorboard"]) as logger:
        for step in (1, 2, 3):
            logger.write(step, {"reward": float(step)})
    assert Broken.num_calls == 2
    warning = "mcore-rl: warning: wandb gets no more metrics: RuntimeError: the service is gone"
    assert capsys.readouterr().err.splitlines() == [warning]
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]
    assert scalars(tmp_path, "reward") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_each_phase_has_a_step_axis_of_its_own(tmp_path):
    with open_logger(tmp_path) as logger:
        for step in (1, 2, 3):
            logger.write(step, {"loss": 1.0}, "warm_start")
        logger.write(0, {"eval/test/reward": 0.25})
        for step in (1, 2):
            logger.write(step, {"loss": 2.0})
    axes = {}
    for row in lines(tmp_path):
        axes.setdefault(row["phase"], []).append(row["step"])
    assert axes == {"warm_start": [1, 2, 3], "training": [0, 1, 2]}
    assert scalars(tmp_path, "warm_start/loss") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert scalars(tmp_path, "loss") == [(1, 2.0), (2, 2.0)]


def test_a_tracker_draws_each_phase_over_its_own_steps(tmp_path, monkeypatch):
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
    with MetricsLogger(TrackedRun(tmp_path, "project", {}), trackers=["wandb"]) as logger:
        logger.write(9, {"loss": 1.0}, "warm_start")
        logger.write(1, {"reward": 0.5})
        logger.write(2, {"reward": 0.75})
    assert calls == [
        ("warm_start/*", "warm_start/step"),
        {"warm_start/loss": 1.0, "warm_start/step": 9},
        ("*", "step"),
        {"reward": 0.5, "step": 1},
        {"reward": 0.75, "step": 2},
    ]
