"""Trackers by import path, and their conformance check: ours, an example, planted faults."""

from __future__ import annotations

import csv
import math
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.csv_tracker import CSVTracker
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.schema import RLConfig
from mcore_rl.observability.metrics import MetricsLogger
from mcore_rl.observability.trackers import TensorBoard, TrackedRun, check_trackers
from mcore_rl.testing import check_tracker

EXAMPLE = f"{Path(__file__).parents[3]}/examples/csv_tracker.py:CSVTracker"


def read_csv(folder: Path) -> dict[str, list[tuple[int, float]]]:
    records = defaultdict(list)
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            records[row["metric"]].append((int(row["step"]), float(row["value"])))
    return records


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_the_example_conforms(tmp_path):
    check_tracker(CSVTracker, tmp_path / "new folder", read_records=read_csv)


def test_tensorboard_conforms(tmp_path):
    check_tracker(TensorBoard, tmp_path, read_records=read_events)


@pytest.mark.parametrize(
    ("name", "setting"),
    [("wandb", "WANDB_MODE"), ("swanlab", "SWANLAB_MODE"), ("mlflow", "")],
)
def test_a_service_that_is_installed_conforms_offline(tmp_path, monkeypatch, name, setting):
    pytest.importorskip(name)
    from mcore_rl.observability import trackers

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if setting:
        monkeypatch.setenv(setting, "offline")
    check_tracker(trackers._TRACKERS[name], tmp_path)


class Appending(CSVTracker):
    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._file.close()
        self._file = (run.folder / "appended.csv").open("a", newline="")
        self._writer = csv.writer(self._file)


def read_appended(folder: Path) -> dict[str, list[tuple[int, float]]]:
    records = defaultdict(list)
    for _, step, _, metric, value in csv.reader((folder / "appended.csv").open(newline="")):
        records[metric].append((int(step), float(value)))
    return records


class WithoutNone(CSVTracker):
    def log(self, row: Any) -> None:
        for name, value in row.items():
            if name != "phase":
                math.isfinite(value)


class FirstMetricsOnly(CSVTracker):
    names: set[str] | None = None

    def log(self, row: Any) -> None:
        self.names = self.names or row.keys()
        super().log({name: value for name, value in row.items() if name in self.names})


class CountingSteps(CSVTracker):
    step = 0

    def log(self, row: Any) -> None:
        self.step += 1
        super().log(row | {"step": self.step})


class ChangingRow(CSVTracker):
    def log(self, row: Any) -> None:
        super().log(row)
        del row["phase"]


class Unflushed(CSVTracker):
    """Loses what it has not written at `close`."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self.rows: list[Any] = []

    def log(self, row: Any) -> None:
        self.rows.append(row)
        if len(self.rows) == 3:
            for waiting in self.rows:
                super().log(waiting)


class WithThread(CSVTracker):
    ends = threading.Event()

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        threading.Thread(target=self.ends.wait, name="sender").start()


class Closing(CSVTracker):
    def close(self) -> None:
        super().close()
        self._file.flush()


class NewFolderOnly(CSVTracker):
    def __init__(self, run: TrackedRun) -> None:
        (run.folder / "records").mkdir()
        super().__init__(run)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (WithoutNone, r"log\(.*'loss': None.*raised TypeError.*: rows have any metrics, or None"),
        (FirstMetricsOnly, r"has recorded \[\] of 'eval/test/accuracy', and was given"),
        (CountingSteps, r"has recorded \[\(3, 0.25\)\] of 'eval/test/accuracy', and was given"),
        (ChangingRow, r"log changed its row to .*; a row is shared"),
        (Unflushed, r"has recorded \[\] of 'reward', and was given \[\(1, 0.5\)\]"),
        (WithThread, r"close\(\) leaves the thread 'sender'.*; close ends threads"),
        (Closing, r"close\(\) raised ValueError: I/O operation on closed file"),
        (NewFolderOnly, r"\(run\) raised FileExistsError.*: it starts, also in the folder of a"),
    ],
)
def test_a_fault_is_named(tmp_path, monkeypatch, fault, message):
    monkeypatch.setattr("mcore_rl.testing.tracker._THREAD_END_S", 0.01)
    WithThread.ends.clear()
    try:
        with pytest.raises(AssertionError, match=f"{fault.__name__}.*{message}"):
            check_tracker(fault, tmp_path, read_records=read_csv)
    finally:
        WithThread.ends.set()


def test_records_of_an_interrupted_run_that_stay_are_named(tmp_path):
    message = r"\[\(0, 0.25\), \(0, 0.25\), .*a resumed run begins with the rows of earlier steps"
    with pytest.raises(AssertionError, match=message):
        check_tracker(Appending, tmp_path, read_records=read_appended)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (lambda: None, r"returned None; the contract: it returns \{metric: \[\(step, value\)"),
        (
            lambda: {"reward": [(1, None)]},
            r"returned \{'reward': \[\(1, None\)\]\}; .* a number",
        ),
        (lambda: {"reward": [0.5]}, r"returned \{'reward': \[0.5\]\}; the contract"),
        (lambda: float("None"), r"raised ValueError: could not convert .*; the contract"),
    ],
)
def test_records_of_another_form_are_named(tmp_path, records, message):
    with pytest.raises(AssertionError, match=rf"read_records\(folder\) {message}"):
        check_tracker(CSVTracker, tmp_path, read_records=lambda folder: records())


@pytest.mark.parametrize("value", [dict, CSVTracker.log, "tensorboard"])
def test_a_value_that_is_no_tracker_class_is_named(tmp_path, value):
    with pytest.raises(AssertionError, match=r"is no subclass of mcore_rl.observability.track"):
        check_tracker(value, tmp_path)


def test_metrics_go_to_trackers_by_name_and_by_import_path(tmp_path):
    run, names = TrackedRun(tmp_path, "project", {}), ["tensorboard", EXAMPLE]
    check_trackers(names)
    with MetricsLogger(run, trackers=names) as logger:
        logger.write(1, {"loss": 3.0}, "warm_start")
        logger.write(1, {"reward": 0.5, "loss": math.nan})
    assert read_csv(tmp_path) == {"warm_start/loss": [(1, 3.0)], "reward": [(1, 0.5)]}
    assert read_events(tmp_path)["reward"] == [(1, 0.5)]


def test_settings_allow_an_import_path_and_say_so():
    config = RLConfig()
    config.task.name = "last_digit"
    config.trainer.trackers = ["tensorboard", "my_package.trackers:MyTracker"]
    validate_rl(config)
    config.trainer.trackers = ["tensorboard", "csv"]
    message = r"trackers\[1\]='csv'; allowed: 'tensorboard'.*, or the import path of a Tracker, "
    with pytest.raises(ConfigError, match=message):
        validate_rl(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_file.py:Tracker", "'no_such_file.py' cannot be imported: FileNotFoundError"),
        ("{file}:Missing", "has no function 'Missing'; it has: "),
        ("{file}:log", "is no subclass of mcore_rl.observability.trackers.Tracker; allowed: one, "),
        ("{file}:Half", "does not define close, log; allowed: a subclass of "),
        ("os:system", "is Python's own"),
    ],
)
def test_a_wrong_import_path_is_refused_before_a_run_starts(tmp_path, name, message):
    file = tmp_path / "own_trackers.py"
    file.write_text(
        "from mcore_rl.observability.trackers import Tracker\n\n"
        "def log(row): ...\n\n"
        "class Half(Tracker):\n    def __init__(self, run): ...\n"
    )
    with pytest.raises(ConfigError, match=f"trainer.trackers='.*{message}"):
        check_trackers([name.format(file=file)])
