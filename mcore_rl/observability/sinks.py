"""Where the metrics of each step go: a JSON line for programs, trackers for people."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.observability.trackers import (
    TRAINING,
    Row,
    TrackedRun,
    Tracker,
    open_trackers,
    reason,
)

METRICS = "metrics.jsonl"


class MetricsSinks:
    """Writes `metrics.jsonl` in the folder of the run, replacing that of an earlier one, and tells
    the trackers.

    The file, and TensorBoard's, contain every step as soon as `write` returns, so a run that is
    killed loses nothing. A tracker that fails is left out from then on, with a warning: all that it
    draws is in the file, and the run is worth more than a picture of it.
    """

    def __init__(
        self,
        run: TrackedRun,
        earlier: Sequence[Row] = (),
        trackers: Sequence[str] = ("tensorboard",),
    ) -> None:
        """`earlier` rows stand before those that will be written."""
        output_dir = run.folder
        output_dir.mkdir(parents=True, exist_ok=True)
        file = output_dir / METRICS
        aside = file.with_name(f".{file.name}.partial")
        aside.write_bytes(b"".join(map(_line, earlier)))
        aside.replace(file)
        # Unbuffered: a line reaches the file in one write, never in pieces.
        self._jsonl = file.open("ab", buffering=0)
        self._trackers = open_trackers(trackers, run)
        for row in earlier:
            self._track(row)

    def write(self, step: int, metrics: Mapping[str, float], phase: str = TRAINING) -> None:
        """Record the metrics of a step, with the time of day (`wall_time_s`: seconds since 1970).

        Each phase counts its steps from 1; step 0 is before training. Names of metrics begin with
        the phase, but for those of training.

        A value that is not finite becomes null in the JSON line, which has no way to write it.
        """
        wall_time_s = time.time()
        prefix = "" if phase == TRAINING else f"{phase}/"
        row: dict[str, Any] = {"phase": phase, "step": step, "wall_time_s": wall_time_s}
        row |= {f"{prefix}{name}": _json_number(value) for name, value in metrics.items()}
        self._jsonl.write(_line(row))
        self._track(row)

    def _track(self, row: Row) -> None:
        self._tell(lambda tracker: tracker.log(row))

    def close(self) -> None:
        self._jsonl.close()
        self._tell(lambda tracker: tracker.close())

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in [*self._trackers.items()]:
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 (of a library that is not ours)
                del self._trackers[name]
                warning = f"mcore-rl: warning: {name} gets no more metrics: {reason(error)}"
                with contextlib.suppress(OSError):  # nobody may read it any more
                    print(warning, file=sys.stderr)

    def __enter__(self) -> MetricsSinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, up to one that a fault of the disk has cut short."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _line(row: Row) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _json_number(value: float) -> float | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)  # numpy and torch scalars too
    return number if math.isfinite(number) else None
