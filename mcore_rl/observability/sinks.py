"""Where the metrics of each step go: a JSON line for programs, TensorBoard for people."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# TensorBoard's own writer: torch's would import torch and, where it is installed, TensorFlow.
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS = "metrics.jsonl"
Row = Mapping[str, float | None]  # of metrics.jsonl


class MetricsSinks:
    """Writes `metrics.jsonl` and `tensorboard/` in `output_dir`, replacing those of an earlier run.

    Both contain every step as soon as `write` returns, so a run that is killed loses nothing.
    """

    def __init__(self, output_dir: Path, earlier: Sequence[Row] = ()) -> None:
        """`earlier` rows stand before those that will be written."""
        output_dir.mkdir(parents=True, exist_ok=True)
        file = output_dir / METRICS
        aside = file.with_name(f".{file.name}.partial")
        aside.write_bytes(b"".join(map(_line, earlier)))
        aside.replace(file)
        # Unbuffered: a line reaches the file in one write, never in pieces.
        self._jsonl = file.open("ab", buffering=0)
        events_dir = output_dir / "tensorboard"
        for old in events_dir.glob("events.out.tfevents.*"):
            old.unlink()
        self._events = EventFileWriter(str(events_dir))
        for row in earlier:
            self._add_event(row)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`, with the time of day (`wall_time_s`: seconds since 1970).

        A value that is not finite becomes null in the JSON line, which has no way to write it.
        """
        wall_time_s = time.time()
        row: dict[str, float | None] = {"step": step, "wall_time_s": wall_time_s}
        row |= {name: _json_number(value) for name, value in metrics.items()}
        self._jsonl.write(_line(row))
        self._add_event(row | dict(metrics))
        self._events.flush()

    def _add_event(self, row: Row) -> None:
        values = {n: v for n, v in row.items() if n not in ("step", "wall_time_s")}
        summary = Summary(
            value=[
                Summary.Value(tag=name, simple_value=math.nan if v is None else float(v))
                for name, v in values.items()
            ]
        )
        step, wall_time_s = row["step"], row["wall_time_s"]
        self._events.add_event(Event(step=step, wall_time=wall_time_s, summary=summary))

    def close(self) -> None:
        self._jsonl.close()
        self._events.close()

    def __enter__(self) -> MetricsSinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(file: Path) -> list[dict[str, float | None]]:
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
