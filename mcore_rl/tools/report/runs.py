"""Reader of what a run has written: settings, metrics, summary and timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from mcore_rl.config.checks import check_exists
from mcore_rl.config.describe import flatten_settings
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.observability.expert_load import EXPERT_LOAD_FILE, ExpertLoad, read_expert_load
from mcore_rl.observability.metrics import METRICS_FILE, read_metrics
from mcore_rl.observability.timeline import TIMELINE_FILE, StepTimeline, read_timeline
from mcore_rl.observability.trackers import TRAINING

SETTINGS_FILE, SUMMARY_FILE = "config.json", "summary.json"
# Settings that only a job of this kind has, the first that fits.
_KINDS = {
    "eval": "evaluated",
    "rl": "algorithm",
    "dpo": "reference",
    "sft": "loss_aggregation",
    "rm": "engine",
}


def _map_schema(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with any names."""
    return {"type": "object", "additionalProperties": values}


_NUMBER = {"type": "number"}
_SCORE = {"properties": {"mean": {}, "standard_error": {}}, "required": ["mean", "standard_error"]}
# The parts of a summary that reports read.
_SUMMARY = Draft202012Validator(
    {
        "properties": {
            "evaluation": _map_schema(_map_schema(_map_schema(_NUMBER))),
            "sets": _map_schema(_map_schema({"if": {"type": "object"}, "then": _SCORE})),
            "gpu_memory": _map_schema(_map_schema({"type": "array", "items": _NUMBER})),
            "versions": _map_schema({"type": "string"}),
            **dict.fromkeys(("wall_s", "peak_memory_bytes", "max_logprob_gap"), _NUMBER),
        }
    }
)
STDERR = "_stderr"  # suffix of the standard error of a metric


class NoPlanError(ValueError):
    """Something of a run is not planned; the message says why."""


@dataclass(frozen=True, slots=True)
class Point:
    """A metric at a step, with its standard error if it has one."""

    step: int
    value: float | None  # None: not finite
    stderr: float | None = None


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    name: str  # shown; no other run of the report has it
    folder: Path
    settings: Mapping[str, Any]  # nested as in config.json
    rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl
    summary: Mapping[str, Any]  # empty until the run has ended
    timeline: Sequence[StepTimeline]
    expert_load: Sequence[ExpertLoad] = ()

    @property
    def kind(self) -> str:
        """The command of the run: rl, sft, dpo, rm or eval."""
        return next(kind for kind, key in _KINDS.items() if key in self.settings)

    @cached_property
    def flat_settings(self) -> dict[str, Any]:
        """The settings by their full names."""
        return dict(flatten_settings(self.settings))

    @property
    def phases(self) -> list[str]:
        """The phases that have metrics, training first."""
        phases = dict.fromkeys(row["phase"] for row in self.rows)
        return sorted(phases, key=lambda phase: phase != TRAINING)

    def collect_series(self, phase: str) -> dict[str, list[Point]]:
        """Return the points of each metric of a phase, without the prefix of the phase.

        A standard error belongs to the points of its metric.
        """
        prefix = "" if phase == TRAINING else f"{phase}/"
        series: dict[str, list[Point]] = {}
        for row in self.rows:
            if row["phase"] != phase:
                continue
            for key, value in row.items():
                name = key.removeprefix(prefix)
                if key in ("phase", "step", "wall_time_s") or name.endswith(STDERR):
                    continue
                points = series.setdefault(name, [])
                stderr = to_finite(row.get(f"{key}{STDERR}"))
                points.append(Point(row["step"], to_finite(value), stderr))
        return series


def to_finite(value: object) -> float | None:
    """Return a finite number as it is; None for anything else, which JSON or a plot has not."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs; they are named by the last parts of their paths that tell them apart.

    Raises:
        ConfigError: One is not the folder of a run, or is given twice.
    """
    paths = [folder.absolute() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"RUN={str(path)!r} is given twice; allowed: different runs")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [_read_run(path, "/".join(path.parts[-depth:])) for path in paths]


def _read_run(folder: Path, name: str) -> Run:
    check_exists("RUN", str(folder))
    if not (folder / SETTINGS_FILE).is_file():
        raise ConfigError(
            f"RUN={str(folder)!r} is not the output folder of a run: no {SETTINGS_FILE}"
        )
    settings = read_json_object(folder / SETTINGS_FILE)
    if not any(key in settings for key in _KINDS.values()):
        raise ConfigError(
            f"RUN={str(folder)!r}: its {SETTINGS_FILE} has none of the settings "
            f"{', '.join(_KINDS.values())}; allowed: the output_dir of rl, sft, dpo, rm or eval"
        )
    rows = read_metrics(folder / METRICS_FILE)
    for number, row in enumerate(rows):
        if not isinstance(row.get("step"), int) or not isinstance(row.get("phase"), str):
            raise ConfigError(f"{folder / METRICS_FILE}, row {number}: no phase and step")
    return Run(
        name,
        folder,
        settings,
        rows,
        _read_summary(folder / SUMMARY_FILE),
        read_timeline(folder / TIMELINE_FILE),
        read_expert_load(folder / EXPERT_LOAD_FILE),
    )


def _read_summary(path: Path) -> dict[str, Any]:
    """Return the summary of a run; empty until it has ended.

    Raises:
        ConfigError: It is damaged.
    """
    summary = read_json_object(path) if path.is_file() else {}
    for error in _SUMMARY.iter_errors(summary):
        raise ConfigError(f"{path}: {error.json_path} is damaged: {error.message[:200]}")
    return summary


def compare_settings(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Return the settings whose values differ, by name, with the value of each run.

    None stands for a setting that a run does not have.
    """
    names = dict.fromkeys(name for run in runs for name in run.flat_settings)
    values = {name: [run.flat_settings.get(name) for run in runs] for name in names}
    return [(name, row) for name, row in values.items() if any(v != row[0] for v in row)]
