"""Where the metrics of each step go: a JSON line for programs, TensorBoard for people."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

# TensorBoard's own writer: torch's would import torch and, where it is installed, TensorFlow.
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class MetricsSinks:
    """Writes `metrics.jsonl` and `tensorboard/` in `output_dir`, replacing those of an earlier run.

    Both contain every step as soon as `write` returns, so a run that is killed loses nothing.
    """

    def __init__(self, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a line reaches the file in one write, never in pieces.
        self._jsonl = (output_dir / "metrics.jsonl").open("wb", buffering=0)
        events_dir = output_dir / "tensorboard"
        for old in events_dir.glob("events.out.tfevents.*"):
            old.unlink()
        self._events = EventFileWriter(str(events_dir))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`, with the time of day (`wall_time_s`: seconds since 1970).

        A value that is not finite becomes null in the JSON line, which has no way to write it.
        """
        wall_time_s = time.time()
        row: dict[str, float | None] = {"step": step, "wall_time_s": wall_time_s}
        row |= {name: _json_number(value) for name, value in metrics.items()}
        self._jsonl.write((json.dumps(row, allow_nan=False) + "\n").encode())
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=float(v)) for name, v in metrics.items()]
        )
        self._events.add_event(Event(step=step, wall_time=wall_time_s, summary=summary))
        self._events.flush()

    def close(self) -> None:
        self._jsonl.close()
        self._events.close()

    def __enter__(self) -> MetricsSinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _json_number(value: float) -> float | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)  # numpy and torch scalars too
    return number if math.isfinite(number) else None
