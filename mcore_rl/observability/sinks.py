"""Where the metrics of each step go: a JSON line for programs, trackers for people."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config.json_file import parse_json_object
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
            OSError: the disk takes no whole row, and the file ends with the row before; or it is
                no longer where it was made: somebody has deleted or replaced the folder.
        """
        wall_time_s = time.time()
        prefix = "" if phase == TRAINING else f"{phase}/"
        row: dict[str, Any] = {"phase": phase, "step": step, "wall_time_s": wall_time_s}
        row |= {f"{prefix}{name}": _json_number(value) for name, value in metrics.items()}
        self.check_place()
        self._append(_line(row))
        self._track(row)

    def check_place(self) -> None:
        """Raise FileNotFoundError when the file has been deleted, moved or replaced."""
        opened = os.fstat(self._jsonl.fileno())
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = self._file.stat()
            if (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino):
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
    """Read the rows of a metrics.jsonl, up to one that a fault of the disk has cut short.

    Raises ConfigError for one that is no JSON object.
    """
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    return [parse_json_object(line, f"{file}, row {row}") for row, line in enumerate(whole)]


def _line(row: Row) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _json_number(value: float) -> float | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)  # numpy and torch scalars too
    return number if math.isfinite(number) else None
