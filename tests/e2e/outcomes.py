"""The files that a run has left in its folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

_CLOCK = re.compile(r"wall_time_s|(.*/)?((time|driver)/.*|tokens_per_s)")


def rows_of(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def timeless(output: Path) -> list[dict[str, float]]:
    """Return the metrics of its steps, without those of clocks."""
    return [{n: v for n, v in r.items() if not _CLOCK.fullmatch(n)} for r in rows_of(output)]
