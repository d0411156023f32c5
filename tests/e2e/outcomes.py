"""The files that a run has left in its folder."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

_CLOCK = re.compile(r"wall_time_s|(.*/)?((time|driver|(gpu_)?memory)/.*|tokens_per_s)")


def rows_of(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def timeless(output: Path) -> list[dict[str, float]]:
    """Return the metrics of its steps, without those of clocks."""
    return [{n: v for n, v in r.items() if not _CLOCK.fullmatch(n)} for r in rows_of(output)]


def count_trace_events(file: Path) -> Counter[str]:
    """Return how often each name is in a trace of profile.steps; raise if it is no trace."""
    trace = json.loads(gzip.decompress(file.read_bytes()))
    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "M"}
    return Counter(event["name"] for event in trace["traceEvents"] if event["ph"] == "X")


def list_gaps(
    rows: Sequence[dict[str, float]], expected_rows: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Return the largest difference of each number over the steps of two runs.

    Without those of routers, which only one of the engines reports.
    """
    assert len(rows) == len(expected_rows)
    gaps = defaultdict[str, float](float)
    for row, expected in zip(rows, expected_rows, strict=True):
        for metric, value in expected.items():
            if isinstance(value, float) and "moe/" not in metric:
                gaps[metric] = max(gaps[metric], abs(row[metric] - value))
    return dict(gaps)
