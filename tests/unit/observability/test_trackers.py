"""Trackers with their real packages, offline; a test of one that is not installed is skipped."""

import sqlite3

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.observability import trackers
from mcore_rl.observability.trackers import TrackedRun, check_trackers, open_trackers

ROWS = [
    {"phase": "training", "step": 0, "wall_time_s": 1.7e9, "eval/test/reward": 0.25},
    {"phase": "warm_start", "step": 2, "wall_time_s": 1.7e9, "warm_start/loss": 1.0},
    {"phase": "training", "step": 1, "wall_time_s": 1.7e9, "reward": 0.5, "infinite": None},
]


def log_rows(name: str, folder) -> None:
    run = TrackedRun(folder, "project", {"seed": 1, "a": {"b": [2]}})
    tracker = open_trackers([name], run)[name]
    for row in ROWS:
        tracker.log(row)
    tracker.close()


def test_a_tracker_that_is_not_installed_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trainer\.trackers=\['wandb'\]: wandb is not installed"):
        check_trackers(["wandb"])


def test_a_tracker_that_cannot_start_is_refused_by_name(tmp_path, monkeypatch):
    def broken(run):
        raise RuntimeError("no engine for sqlite\nTraceback of a library")

    monkeypatch.setitem(trackers._TRACKERS, "tensorboard", broken)
    message = (
        "trainer.trackers: tensorboard cannot start: RuntimeError: no engine for sqlite; allowed"
    )
    with pytest.raises(ConfigError, match=message):
        open_trackers(["tensorboard"], TrackedRun(tmp_path, "project", {}))


def test_mlflow_has_every_value_with_its_step(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_rows("mlflow", tmp_path)
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        rows = base.execute("select key, step, value from metrics order by key").fetchall()
        status = base.execute("select status from runs").fetchall()
    assert rows == [("eval/test/reward", 0, 0.25), ("reward", 1, 0.5), ("warm_start/loss", 2, 1.0)]
    assert status == [("FINISHED",)]


def test_wandb_writes_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_rows("wandb", tmp_path)
    [file] = tmp_path.rglob("run-*.wandb")
    assert file.stat().st_size > 500


def test_swanlab_writes_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    log_rows("swanlab", tmp_path)
    [file] = tmp_path.rglob("run-*.swanlab")
    assert b"eval/test/reward" in file.read_bytes()
