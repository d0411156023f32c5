"""Conformance of a tracker: it records the rows of a run, and again those of the resumed run."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.observability.trackers import Row, TrackedRun, Tracker, get_metrics

Records = Mapping[str, Sequence[tuple[int, float]]]  # steps and values of each metric, in order
# Metrics come and go between rows, and each phase counts its steps. Values are exact in float32.
_ROWS: tuple[Row, ...] = (
    {"phase": "warm_start", "step": 1, "wall_time_s": 1.7e9, "warm_start/loss": 2.5},
    {"phase": "warm_start", "step": 2, "wall_time_s": 1.7e9 + 1, "warm_start/loss": 1.5},
    {"phase": "training", "step": 0, "wall_time_s": 1.7e9 + 2, "eval/test/accuracy": 0.25},
    {"phase": "training", "step": 1, "wall_time_s": 1.7e9 + 3, "reward": 0.5, "loss": None},
    {"phase": "training", "step": 2, "wall_time_s": 1.7e9 + 4, "reward": 0.75, "num_tokens": 1024},
    {
        "phase": "training", "step": 3, "wall_time_s": 1.7e9 + 5, "reward": 1.0, "loss": -0.125,
        "eval/test/accuracy": 0.5,
    },
)  # fmt: skip
_NUM_ROWS_BEFORE = 4  # rows of the run that is interrupted
_RECORDS_CONTRACT = (
    "it returns {metric: [(step, value), ...]} of what was recorded; a value is a number, and a "
    "row whose value is None has none to record"
)
_THREAD_END_S = 5.0  # time that threads have to end after close


def check_tracker(
    tracker_class: type[Tracker],
    folder: str | Path,
    *,
    read_records: Callable[[Path], Records] | None = None,
) -> None:
    """Put a tracker through a run and its resumed run.

    Args:
        tracker_class: The class that trainer.trackers names.
        folder: Folder of the run; created if it is missing.
        read_records: Returns what is recorded in the folder of a run: steps and values of each
            metric. It is called when the tracker is closed. None: records are not read.

    Raises:
        AssertionError: The tracker breaks the contract of
            `mcore_rl.observability.trackers.Tracker`.
    """
    if not (inspect.isclass(tracker_class) and issubclass(tracker_class, Tracker)):
        raise AssertionError(
            f"{tracker_class!r} is no subclass of {Tracker.__module__}.Tracker; trainer.trackers "
            "takes one"
        )
    folder, name = Path(folder), tracker_class.__name__
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"seed": 1, "trainer": {"num_steps": 3, "trackers": [name]}, "model": {"path": ""}}
    run = TrackedRun(folder, "conformance", settings)
    for rows, reason in (
        (_ROWS[:_NUM_ROWS_BEFORE], "it has each finite value once, under its step"),
        (_ROWS, "a resumed run begins with the rows of earlier steps, which replace the records"),
    ):
        _record_run(tracker_class, run, rows)
        if read_records is not None:
            records = _call("read_records(folder)", _RECORDS_CONTRACT, read_records, folder)
            _compare_records(name, records, rows, reason)


def _record_run(tracker_class: type[Tracker], run: TrackedRun, rows: Sequence[Row]) -> None:
    """Do what a run does with a tracker."""
    name, threads = tracker_class.__name__, set(threading.enumerate())
    tracker = _call(f"{name}(run)", "it starts, also in the folder of a run", tracker_class, run)
    for row in rows:
        argument = dict(row)
        _call(f"{name}.log({dict(row)})", "rows have any metrics, or None", tracker.log, argument)
        if argument != row:
            raise AssertionError(
                f"{name}.log changed its row to {argument}; a row is shared with other trackers"
            )
    _call(f"{name}.close()", "it finishes what is unwritten", tracker.close)
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            thread.join(_THREAD_END_S)
            if thread.is_alive():
                raise AssertionError(
                    f"{name}.close() leaves the thread {thread.name!r}, which keeps the command "
                    "from ending; close ends threads that are no daemons"
                )


def _call(call: str, contract: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        raise AssertionError(
            f"{call} raised {type(error).__name__}: {error}; the contract: {contract}"
        ) from error


def _compare_records(name: str, records: Records, rows: Iterable[Row], reason: str) -> None:
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for metric, value in get_metrics(row).items():
            expected.setdefault(metric, []).append((row["step"], value))
    try:
        recorded = {
            metric: [(step, value) for step, value in pairs if math.isfinite(value)]
            for metric, pairs in records.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise AssertionError(
            f"read_records(folder) returned {records!r}; the contract: {_RECORDS_CONTRACT}"
        ) from error
    for metric in sorted(expected.keys() | recorded.keys()):
        finite = recorded.get(metric, [])
        if finite != expected.get(metric, []):
            raise AssertionError(
                f"{name} has recorded {finite} of {metric!r}, and was given "
                f"{expected.get(metric, [])}; the contract: {reason}"
            )
