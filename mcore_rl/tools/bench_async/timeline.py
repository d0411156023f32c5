"""What trainers and servers did when, as a picture in SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from mcore_rl.tools.bench_async.run import ModelledRun

LABEL, WIDTH, LANE, GAP, TOP = 170, 900, 26, 22, 56  # pixels
COLORS = {"log-probs": "#7fb3d5", "update": "#1f618d", "push": "#c0392b"}
SERVERS = "#52a352"
NUM_BINS = 450


def write_timeline(path: Path, found: Mapping[str, ModelledRun], until_s: float) -> None:
    """Two lanes a run, over the first `until_s` modelled seconds."""
    parts = [_legend(), _axis(until_s, len(found))]
    for number, (name, one) in enumerate(found.items()):
        parts.append(_run(name, one, TOP + number * (2 * LANE + GAP), until_s))
    height = TOP + len(found) * (2 * LANE + GAP) + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(head + "".join(parts) + "</svg>\n", encoding="utf-8")
    partial.replace(path)


def _run(name: str, one: ModelledRun, top: int, until_s: float) -> str:
    found = _text(8, top + 12, name, "font-weight='bold'") + _text(8, top + 26, "trainer")
    found += _text(8, top + LANE + 18, "servers: slots in use")
    for start, end, kind in one.spans:
        if start < until_s:
            left, right = (LABEL + WIDTH * min(x, until_s) / until_s for x in (start, end))
            height = 2 * LANE if kind == "push" else LANE - 3
            found += _box(left, top, right - left, height, COLORS[kind])
    return found + _used(one, top + LANE, until_s)


def _used(one: ModelledRun, top: int, until_s: float) -> str:
    """The share of slots with a response, as an area."""
    edges = np.linspace(0, until_s, NUM_BINS + 1)
    shares = _mean_used(one.used, edges) / one.slots
    points = [f"{LABEL},{top + LANE}"]
    for left, right, share in zip(edges, edges[1:], shares, strict=False):
        height = top + LANE - share * (LANE - 2)
        points += [f"{LABEL + WIDTH * x / until_s:.1f},{height:.1f}" for x in (left, right)]
    points.append(f"{LABEL + WIDTH},{top + LANE}")
    return f'<polygon points="{" ".join(points)}" fill="{SERVERS}"/>\n'


def _mean_used(
    used: Sequence[tuple[float, int]], edges: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[bins]: the mean of a step function over each bin."""
    times, nums = (np.array(column, np.float64) for column in zip(*used, strict=True))
    sums = np.concatenate([[0.0], np.cumsum(np.diff(times) * nums[:-1])])
    at = np.interp(edges, times, sums)
    return np.asarray(np.diff(at) / np.diff(edges))


def _legend() -> str:
    found, left = "", LABEL
    for name, color in (*COLORS.items(), ("generation", SERVERS)):
        found += _box(left, 10, 12, 12, color) + _text(left + 16, 20, name)
        left += 110
    return found


def _axis(until_s: float, num_runs: int) -> str:
    found, bottom = "", TOP + num_runs * (2 * LANE + GAP)
    step = 10.0 ** np.floor(np.log10(until_s)) / 2
    for tick in np.arange(0, until_s + step / 2, step):
        x = LABEL + WIDTH * tick / until_s
        found += f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>\n'
        found += _text(x - 10, TOP - 12, f"{tick:g} s")
    return found


def _box(left: float, top: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
        f'fill="{color}"/>\n'
    )


def _text(left: float, top: float, text: str, style: str = "") -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" {style}>{escape(text)}</text>\n'
