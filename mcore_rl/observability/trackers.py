"""Trackers of metrics: TensorBoard, W&B, MLflow, SwanLab.

TensorBoard comes with this package. The others have to be installed, are chosen by
trainer.trackers, and take accounts and addresses from their own environment variables.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.config.errors import ConfigError

# A row of metrics.jsonl: metrics by name, with the phase, the step in it and wall_time_s.
Row = Mapping[str, Any]
TRAINING = "training"  # the phase whose metrics have no prefix
_POSITION = ("phase", "step", "wall_time_s")


class Tracker(Protocol):
    def log(self, row: Row) -> None:
        """Record the metrics of a row; None stands for a value that is not finite."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker shows it."""

    folder: Path
    project: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.folder.absolute().name


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trainer.trackers={list(names)}: {name} is not installed here; allowed: the "
                f"others, or to install it (pip install {name})"
            )


def open_trackers(names: Sequence[str], run: TrackedRun) -> dict[str, Tracker]:
    """Start trackers; raise ConfigError for one that is not installed or cannot start."""
    check_trackers(names)
    return {name: _open_tracker(name, run) for name in names}


def _open_tracker(name: str, run: TrackedRun) -> Tracker:
    try:
        return _TRACKERS[name](run)
    except Exception as error:
        raise ConfigError(
            f"trainer.trackers: {name} cannot start: {summarize_error(error)}; allowed: the "
            "others, or to set it up"
        ) from error


def summarize_error(error: Exception) -> str:
    """Return the type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class TensorBoard:
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


class WandB:
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
        self._run.log(_keep_finite(row) | {f"{prefix}step": row["step"]})

    def close(self) -> None:
        self._run.finish()


class MLflow:
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
        metrics = [Metric(name, value, time_ms, step) for name, value in _keep_finite(row).items()]
        self._client.log_batch(self._id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanLab:
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
        self._swanlab.log(_keep_finite(row), step=int(row["step"] or 0))

    def close(self) -> None:
        self._swanlab.finish()


def _keep_finite(row: Row) -> dict[str, float]:
    return {name: v for name, v in row.items() if name not in _POSITION and v is not None}


_TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}
