"""Table and picture of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from mcore_rl.config.atomic_file import write_atomically
from mcore_rl.observability.console import get_stdout_console
from mcore_rl.tools.simulate.run import SimulatedRun

_COLORS = {"log_probs": "#56B4E9", "update": "#0072B2", "weight_sync": "#D55E00"}
_DECODING, _WAITING = "#009E73", "#CC79A7"
# Rows of the table: name in the summary, label, format.
_ROWS = (
    ("step_s", "seconds a step", "{:.1f}"),
    ("samples_per_s", "samples/s", "{:.1f}"),
    ("trainer/log_probs", "training ranks: log-probs", "{:.1%}"),
    ("trainer/update", "update", "{:.1%}"),
    ("trainer/weight_sync", "weight sync", "{:.1%}"),
    ("trainer/waits", "wait for samples", "{:.1%}"),
    ("servers/generate", "servers: generate", "{:.1%}"),
    ("servers/weight_sync", "weight sync", "{:.1%}"),
    ("servers/sleep", "sleep", "{:.1%}"),
    ("servers/restart", "restart", "{:.1%}"),
    ("servers/idle", "idle", "{:.1%}"),
    ("responses_per_server", "responses a server decodes", "{:.1f}"),
    ("waiting_responses", "responses that wait for a server", "{:.1f}"),
    ("waiting_samples", "samples that wait for a step", "{:.0f}"),
    ("mean_age", "age of samples, versions", "{:.2f}"),
    ("max_age", "oldest", "{:.0f}"),
    ("server_failures", "servers that died", "{:.0f}"),
    ("tokens/died", "tokens lost with them", "{:.1%}"),
    ("tokens/abandoned", "tokens abandoned as too old", "{:.1%}"),
    ("calls", "calls of ranks a step", "{:.0f}"),
    ("driver_cpu_s", "CPU seconds of the driver a step", "{:.2f}"),
    ("driver_share", "of the step", "{:.2%}"),
)


def print_runs(runs: Mapping[str, SimulatedRun]) -> None:
    """Print a column for each run."""
    title = "simulated seconds, except those of the driver"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", *runs):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    summaries = [run.summarize() for run in runs.values()]
    for name, label, form in _ROWS:
        table.add_row(label, *[form.format(summary[name]) for summary in summaries])
    get_stdout_console().print(table)


def plot_runs(path: Path, runs: Mapping[str, SimulatedRun]) -> None:
    """Write a PNG: for each run what training ranks did, and responses on the servers."""
    figure = Figure(figsize=(11.0, 2.6 * len(runs)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    end_s = max(run.seconds for run in runs.values())
    rows = figure.subplots(
        2 * len(runs), 1, sharex=True, squeeze=False, height_ratios=[1, 2] * len(runs)
    )
    for number, (name, run) in enumerate(runs.items()):
        trainer, servers = rows[2 * number, 0], rows[2 * number + 1, 0]
        for kind, color in _COLORS.items():
            spans = [(s - run.start_s, e - s) for s, e, k in run.ledger.spans if k == kind]
            trainer.broken_barh(spans, (0, 1), facecolors=color, label=kind.replace("_", " "))
        trainer.set_yticks([0.5], ["training ranks"])
        trainer.set_title(f"{name}: {run.step_s:.1f} s a step", loc="left", fontsize=10)
        times = [when - run.start_s for when, *_ in run.ledger.running]
        for column, color, label in ((1, _DECODING, "decoding"), (2, _WAITING, "waiting")):
            values = [entry[column] for entry in run.ledger.running]
            servers.step(times, values, where="post", color=color, label=label, linewidth=1.0)
        servers.set_ylabel("responses")
        servers.set_xlim(0, end_s)
        if not number:
            trainer.legend(loc="upper right", ncols=3, fontsize=8)
            servers.legend(loc="upper right", ncols=2, fontsize=8)
    rows[-1, 0].set_xlabel("simulated seconds")
    with write_atomically(path) as partial_path:
        figure.savefig(partial_path, format="png")
