"""Metrics of steps: merged over ranks and servers, written to metrics.jsonl and to trackers."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config.atomic_file import write_file
from mcore_rl.config.json_file import read_json_lines
from mcore_rl.observability.trackers import (
    TRAINING,
    Row,
    TrackedRun,
    Tracker,
    open_trackers,
    summarize_error,
)
from mcore_rl.observability.warnings import warn

METRICS_FILE = "metrics.jsonl"
Report = Callable[[int, dict[str, float]], None]  # takes a step, counted from 1, and its metrics


def prefix_eval_metrics(metrics_by_set: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of held-out sets under the names eval/SET/NAME."""
    return {
        f"eval/{name}/{metric}": value
        for name, metrics in metrics_by_set.items()
        for metric, value in metrics.items()
    }


def merge_metrics(
    parts: Sequence[Mapping[str, float]], weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Merge the metrics of all parts (micro-batches, ranks, servers) by their names.

    The last path component says how: `max_...` or `..._max` takes the highest, `min_...` or
    `..._min` the lowest; `num_...` (a count) and `..._sum` add up; any other is the mean over the
    parts that have it, weighted by `weights` (say, tokens of each part; equal by default). A metric
    whose weights are all 0 is left out.

    >>> ranks = [{"loss": 1.0, "num_tokens": 3}, {"loss": 3.0, "num_tokens": 1}]
    >>> merge_metrics(ranks, weights=[3, 1])
    {'loss': 1.5, 'num_tokens': 4}
    """
    weights = [1.0] * len(parts) if weights is None else weights
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pairs = [(part[name], w) for part, w in zip(parts, weights, strict=True) if name in part]
        values = [value for value, _ in pairs]
        total = sum(weight for _, weight in pairs)
        leaf = name.rpartition("/")[2]
        if leaf.startswith("max_") or leaf.endswith("_max"):
            merged[name] = max(values)
        elif leaf.startswith("min_") or leaf.endswith("_min"):
            merged[name] = min(values)
        elif leaf.startswith("num_") or leaf.endswith("_sum"):
            merged[name] = sum(values)
        elif total > 0:
            merged[name] = sum(value * weight for value, weight in pairs) / total
    return merged


class MetricsLogger:
    """Writes `metrics.jsonl` in the folder of the run, in place of an earlier one, and to trackers.

    The file, and TensorBoard's, contain every step as soon as `write` returns, so a run that is
    killed loses nothing. A tracker that fails is left out from then on, with a warning: the file
    has all metrics, so the run need not stop.
    """

    def __init__(
        self,
        run: TrackedRun,
        earlier: Sequence[Row] = (),
        trackers: Sequence[str] = ("tensorboard",),
    ) -> None:
        """Begin the file with the rows of `earlier` steps."""
        output_dir = run.folder
        output_dir.mkdir(parents=True, exist_ok=True)
        file = output_dir / METRICS_FILE
        write_file(file, b"".join(map(_encode_row, earlier)))
        self._file, self._jsonl = file, file.open("ab", buffering=0)
        self._trackers = open_trackers(trackers, run)
        for row in earlier:
            self._track(row)

    def write(self, step: int, metrics: Mapping[str, float], phase: str = TRAINING) -> None:
        """Record the metrics of a step, with the time of day (`wall_time_s`: seconds since 1970).

        Each phase counts its steps from 1; step 0 is before training. Names of metrics begin with
        the phase, but for those of training.

        A value that is not finite becomes null in the JSON line, which has no way to write it.

        Raises:
            OSError: The disk is full, and the file ends with the row before; or the file was
                deleted, moved or replaced.
        """
        wall_time_s = time.time()
        prefix = "" if phase == TRAINING else f"{phase}/"
        row: dict[str, Any] = {"phase": phase, "step": step, "wall_time_s": wall_time_s}
        row |= {f"{prefix}{name}": _convert_number(value) for name, value in metrics.items()}
        self.check_place()
        self._append(_encode_row(row))
        self._track(row)

    def check_place(self) -> None:
        """Raise FileNotFoundError when the file has been deleted, moved or replaced."""
        opened = os.fstat(self._jsonl.fileno())
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            current = self._file.stat()
            if (current.st_dev, current.st_ino) == (opened.st_dev, opened.st_ino):
                return
        reason = "it was deleted, moved or replaced while the run wrote it"
        raise FileNotFoundError(errno.ENOENT, reason, str(self._file))

    def _append(self, line: bytes) -> None:
        """Append a whole line or nothing: a full disk takes the beginning of one."""
        end = os.fstat(self._jsonl.fileno()).st_size
        try:
            written = self._jsonl.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
        except OSError:
            self._jsonl.truncate(end)
            raise

    def _track(self, row: Row) -> None:
        self._call_trackers(lambda tracker: tracker.log(row))

    def close(self) -> None:
        """Close the file and the trackers."""
        self._jsonl.close()
        self._call_trackers(lambda tracker: tracker.close())

    def _call_trackers(self, call: Callable[[Tracker], None]) -> None:
        """Call each tracker; drop those that raise, with a warning."""
        for name, tracker in [*self._trackers.items()]:
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 (of another library)
                del self._trackers[name]
                warn(f"{name} gets no more metrics: {summarize_error(error)}")

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, except a last one that was cut short.

    Raises:
        ConfigError: A row is no JSON object.
    """
    return [row for _, row in read_json_lines(file)]


def _encode_row(row: Row) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _convert_number(value: float) -> float | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)  # numpy and torch scalars too
    return number if math.isfinite(number) else None
