"""A tracker of one's own: metrics as a table that spreadsheets and pandas read.

    mcore-rl rl recipe=quickstart \
        trainer.trackers=[tensorboard,examples/csv_tracker.py:CSVTracker]

`metrics.csv` in the output folder has a line for each metric of a step: a table with a column for
each metric would need all names before the first step. A pivot has the columns:

    table = pandas.read_csv("outputs/quickstart/metrics.csv")
    table.pivot(index=["phase", "step"], columns="metric", values="value")
"""

from __future__ import annotations

import csv

from mcore_rl.observability.trackers import Row, TrackedRun, Tracker, get_metrics

COLUMNS = ("phase", "step", "wall_time_s", "metric", "value")


class CSVTracker(Tracker):
    """Writes metrics.csv, in place of the file of an interrupted run."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = (run.folder / "metrics.csv").open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)

    def log(self, row: Row) -> None:
        """Write the metrics of a step, and flush: a run that is killed has all of them."""
        position = [row[name] for name in ("phase", "step", "wall_time_s")]
        self._writer.writerows([*position, *metric] for metric in get_metrics(row).items())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
