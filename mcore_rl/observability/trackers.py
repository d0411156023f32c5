"""Trackers of metrics: TensorBoard, W&B, MLflow, SwanLab, or a user's by import path.

TensorBoard comes with this package. W&B, MLflow and SwanLab have to be installed, are chosen by
trainer.trackers, and take accounts and addresses from their own environment variables.
"""

from __future__ import annotations

import importlib.util
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path, load_user_class

# A row of metrics.jsonl: metrics by name, with the phase, the step in it and wall_time_s.
Row = Mapping[str, Any]
TRAINING = "training"  # the phase whose metrics have no prefix
_SETTING = "trainer.trackers"
_POSITION = ("phase", "step", "wall_time_s")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker shows it."""

    folder: Path  # output_dir; it exists
    project: str  # trainer.tracker_project
    settings: Mapping[str, Any]  # all settings, nested as in config.json

    @property
    def name(self) -> str:
        return self.folder.absolute().name


class Tracker(ABC):
    """Records the metrics of a run, in the process of the command.

    A run calls the constructor, `log` for each row, and `close`. An exception in the constructor
    ends the run before it trains. After an exception in `log` the tracker gets no more rows, with a
    warning.
    """

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Start recording.

        A resumed run has the folder of the interrupted one, and begins with the rows of its earlier
        steps: a tracker whose records are in the folder replaces them.
        """

    @abstractmethod
    def log(self, row: Row) -> None:
        """Record the metrics of a step. Rows are in order, and must not be changed.

        Args:
            row: Metrics by name (`get_metrics`), and the position: `phase`, such as "training" or
                "warm_start", which counts its steps from 1 (0: before training); `step`;
                `wall_time_s`, seconds since 1970. Rows have different metrics. None is a value that
                is not finite. Names of metrics begin with the phase, except in "training".
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what is unwritten, and end threads that would keep the process alive."""


def get_metrics(row: Row) -> dict[str, float]:
    """Return the metrics of a row whose values are finite."""
    return {name: v for name, v in row.items() if name not in _POSITION and v is not None}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not installed, or an import path that is wrong."""
    for name in names:
        if is_import_path(name):
            _load_tracker(name)
        elif importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{_SETTING}={list(names)}: {name} is not installed here; allowed: the "
                f"others, or to install it (pip install {name})"
            )


def open_trackers(names: Sequence[str], run: TrackedRun) -> dict[str, Tracker]:
    """Start trackers; raise ConfigError for one that is not installed or cannot start."""
    check_trackers(names)
    return {name: _open_tracker(name, run) for name in names}


def _load_tracker(name: str) -> type[Tracker]:
    """Return the class of a name or of an import path."""
    if is_import_path(name):
        loaded: type[Tracker] = load_user_class(_SETTING, name, Tracker, _TRACKERS)
        return loaded
    return _TRACKERS[name]


def _open_tracker(name: str, run: TrackedRun) -> Tracker:
    try:
        return _load_tracker(name)(run)
    except Exception as error:
        raise ConfigError(
            f"{_SETTING}: {name} cannot start: {summarize_error(error)}; allowed: the "
            "others, or to set it up"
        ) from error


def summarize_error(error: Exception) -> str:
    """Return the type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class TensorBoard(Tracker):
    """Event files in tensorboard/, in place of those of an earlier start of the run."""

    def __init__(self, run: TrackedRun) -> None:
        # TensorBoard's own writer: torch's would import torch and, if it is there, TensorFlow.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._events = EventFileWriter(str(folder))

    def log(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=math.nan if value is None else float(value))
            for name, value in row.items()
            if name not in _POSITION
        ]
        event = Event(step=row["step"], wall_time=row["wall_time_s"], summary=Summary(value=values))
        self._events.add_event(event)
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class WandB(Tracker):
    """A run of Weights & Biases; its files are in wandb/."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project, name=run.name, dir=str(run.folder), config=dict(run.settings)
        )
        self._phases: set[str] = set()

    def log(self, row: Row) -> None:
        # Each phase counts its steps from 1, and W&B's own step may only rise.
        phase = row.get("phase", TRAINING)
        prefix = "" if phase == TRAINING else f"{phase}/"
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
        self._run.log(get_metrics(row) | {f"{prefix}step": row["step"]})

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow, in mlflow.db unless MLFLOW_TRACKING_URI names another place."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        default = f"sqlite:///{run.folder.absolute() / 'mlflow.db'}"
        address = os.environ.get("MLFLOW_TRACKING_URI") or default
        self._client = MlflowClient(tracking_uri=address)
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        )
        self._id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        self._client.log_dict(self._id, dict(run.settings), "config.json")

    def log(self, row: Row) -> None:
        from mlflow.entities import Metric

        step, time_ms = int(row["step"] or 0), int(1000 * (row["wall_time_s"] or 0))
        metrics = [Metric(name, value, time_ms, step) for name, value in get_metrics(row).items()]
        self._client.log_batch(self._id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanLab(Tracker):
    """A run of SwanLab; its files are in swanlog/."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        swanlab.init(
            project=run.project,
            experiment_name=run.name,
            logdir=str(run.folder / "swanlog"),
            config=dict(run.settings),
        )

    def log(self, row: Row) -> None:
        self._swanlab.log(get_metrics(row), step=int(row["step"] or 0))

    def close(self) -> None:
        self._swanlab.finish()


_TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}
