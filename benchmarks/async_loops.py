"""Benchmark of all loops on a long-tailed workload with modelled delays."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from rich.console import Console
from rich.table import Table

from mcore_rl.benchmarks.async_model import (
    BackgroundExecutor,
    Clock,
    ModelledActor,
    Servers,
    Workload,
)
from mcore_rl.config.resolve import resolve, resolve_for_lane
from mcore_rl.config.schema import RLConfig, SampleLogConfig
from mcore_rl.controller.process_cleanup import StopSignals
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.observability.console import get_stdout_console
from mcore_rl.trainers.base import TrainerInputs, load_trainer
from mcore_rl.trainers.checkpointing import CheckpointManager
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.sample_log import SampleLog

LABEL, WIDTH, ROW_HEIGHT, GAP, TOP = 170, 900, 26, 22, 56  # pixels
COLORS = {"log-probs": "#7fb3d5", "update": "#1f618d", "push": "#c0392b"}
SERVERS = "#52a352"
NUM_BINS = 450


@dataclass(frozen=True, slots=True)
class Setup:
    """A loop, on pools of its own or on the devices of both by turns."""

    mode: str
    is_shared: bool = False


SETUPS = {
    "sync": Setup("sync"),
    "sync, by turns": Setup("sync", is_shared=True),
    "one step off": Setup("one_step_off"),
    "fully async": Setup("fully_async"),
    "fully async, by turns": Setup("fully_async", is_shared=True),
}


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    num_steps: int = 20
    staleness: int = 2  # of fully_async
    load: Workload = field(default_factory=Workload)


@dataclass(frozen=True, slots=True)
class ModelledRun:
    """Result of a run, in modelled seconds except `loop_s`."""

    samples_per_s: float
    step_s: float
    trainer_waits_s: float  # a step, for samples
    servers_idle_s: float  # a step; see IdleTimer
    slots_used: float  # the share of slots with a response, over the run
    mean_age: float  # of a token, in versions
    max_age: int
    abandoned: int  # groups that were begun again
    loop_s: float  # a step: real seconds of the loop itself
    spans: list[tuple[float, float, str]]
    used: list[tuple[float, int]]
    slots: int

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        for name in ("spans", "used", "slots"):
            del fields[name]
        return {n: round(v, 3) if isinstance(v, float) else v for n, v in fields.items()}


def bench_async(settings: WorkloadSettings) -> dict[str, ModelledRun]:
    return {name: run_setup(setup, settings) for name, setup in SETUPS.items()}


def build_json(settings: WorkloadSettings, runs: dict[str, ModelledRun]) -> dict[str, Any]:
    """Return the results of all runs, with the ratios of their rates."""
    rate = {name: run.samples_per_s for name, run in runs.items()}
    return {
        "settings": asdict(settings),
        "setups": {name: run.to_json() for name, run in runs.items()},
        **{
            f"over {base}": {name: round(rate[name] / rate[base], 3) for name in rate}
            for base in ("sync", "sync, by turns")
        },
    }


def run_setup(setup: Setup, settings: WorkloadSettings) -> ModelledRun:
    """Run the loop of a job with modelled servers and actor."""
    config, load, clock = _build_config(setup, settings), settings.load, Clock()
    share = 2 if setup.is_shared else 1
    servers: Any = Servers(clock, load, share * load.slots)
    actor: Any = ModelledActor(clock, load, share)
    rows: list[dict[str, float]] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder, keeps_cache = Path(name), setup.mode == "fully_async"
        devices = DeviceSharing(config.placement, {"actor": actor}, servers, servers, keeps_cache)
        data = PromptDataset([PromptRow([row], {}) for row in range(4096)])
        silent, tokenizer = SampleLogConfig(every=0, num_shown=0, tokens=False), None
        sample_log = SampleLog(folder, tokenizer, silent)  # type: ignore[arg-type]
        inputs = TrainerInputs(
            config=config,
            devices=devices,
            prompts=data,
            test_sets={},
            sample_log=sample_log,
            thread=BackgroundExecutor(clock),
            record_evaluation=lambda *_: None,
            build_checkpoints=lambda states: CheckpointManager(
                config, folder, devices, states, dict, StopSignals(), 0
            ),
        )
        load_trainer(setup.mode)(inputs).run(lambda _, metrics: rows.append(metrics))
    loop_s = (time.perf_counter() - start) / settings.num_steps
    return _summarize(clock, servers, actor.updates, rows[-1], settings.num_steps, loop_s)


def _build_config(setup: Setup, settings: WorkloadSettings) -> RLConfig:
    config = RLConfig()
    config.model.path = config.data.train_file = config.data.test_file = "modelled"
    config.algorithm.log_prob_pass = "always"  # so that loops differ in the order of work only
    config.placement.rollout = "shared" if setup.is_shared else "own"
    config.trainer.mode, config.trainer.num_steps = setup.mode, settings.num_steps
    if setup.mode == "fully_async":
        config.trainer.staleness = settings.staleness
    resolve(config)
    return resolve_for_lane(config, "cpu")


def _summarize(
    clock: Clock,
    servers: Servers,
    updates: list[Batch],
    last: dict[str, float],
    num_steps: int,
    loop_s: float,
) -> ModelledRun:
    ages = [step - b.jagged("weight_versions").values for step, b in enumerate(updates)]
    starts, nums = (np.array(column) for column in zip(*servers.used, strict=True))
    durations = np.diff(np.append(starts, clock.now_s)).clip(min=0)
    trained_s, push_s = clock.sum_spans("log-probs", "update"), clock.sum_spans("push")
    return ModelledRun(
        samples_per_s=sum(map(len, updates)) / clock.now_s,
        step_s=clock.now_s / num_steps,
        trainer_waits_s=(clock.now_s - trained_s - push_s) / num_steps,
        servers_idle_s=servers.all_idle_s / num_steps,
        slots_used=float((durations * nums).sum()) / clock.now_s / servers.slots,
        mean_age=float(np.concatenate(ages).mean()),
        max_age=int(max(age.max() for age in ages)),
        abandoned=int(last.get("queue/abandoned_total", 0)),
        loop_s=loop_s,
        spans=clock.spans,
        used=servers.used,
        slots=servers.slots,
    )


def print_results(
    settings: WorkloadSettings, runs: dict[str, ModelledRun], console: Console | None = None
) -> None:
    columns = {
        "samples/s": "samples_per_s",
        "s a step": "step_s",
        "trainer waits": "trainer_waits_s",
        "servers idle": "servers_idle_s",
        "slots used": "slots_used",
        "mean age": "mean_age",
    }
    table = Table(title=f"{settings.num_steps} steps, modelled seconds")
    for name in ("", *runs):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for name, key in columns.items():
        table.add_row(name, *[f"{getattr(run, key):.2f}" for run in runs.values()])
    for base in ("sync", "sync, by turns"):
        over = [run.samples_per_s / runs[base].samples_per_s for run in runs.values()]
        table.add_row(f"over {base}", *[f"{ratio:.2f}" for ratio in over])
    (console or get_stdout_console()).print(table)


def write_timeline(path: Path, runs: Mapping[str, ModelledRun], until_s: float) -> None:
    """Draw the first `until_s` modelled seconds as SVG: two rows a run, trainer and servers."""
    parts = [_draw_legend(), _draw_axis(until_s, len(runs))]
    for number, (name, run) in enumerate(runs.items()):
        parts.append(_draw_run(name, run, TOP + number * (2 * ROW_HEIGHT + GAP), until_s))
    height = TOP + len(runs) * (2 * ROW_HEIGHT + GAP) + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(head + "".join(parts) + "</svg>\n", encoding="utf-8")
    partial.replace(path)


def _draw_run(name: str, run: ModelledRun, top: int, until_s: float) -> str:
    svg = _draw_text(8, top + 12, name, "font-weight='bold'") + _draw_text(8, top + 26, "trainer")
    svg += _draw_text(8, top + ROW_HEIGHT + 18, "servers: slots in use")
    for start, end, kind in run.spans:
        if start < until_s:
            left, right = (LABEL + WIDTH * min(x, until_s) / until_s for x in (start, end))
            height = 2 * ROW_HEIGHT if kind == "push" else ROW_HEIGHT - 3
            svg += _draw_box(left, top, right - left, height, COLORS[kind])
    return svg + _draw_used_slots(run, top + ROW_HEIGHT, until_s)


def _draw_used_slots(run: ModelledRun, top: int, until_s: float) -> str:
    """Draw the share of slots with a response, as an area."""
    edges = np.linspace(0, until_s, NUM_BINS + 1)
    shares = _average_used(run.used, edges) / run.slots
    points = [f"{LABEL},{top + ROW_HEIGHT}"]
    for left, right, share in zip(edges, edges[1:], shares, strict=False):
        height = top + ROW_HEIGHT - share * (ROW_HEIGHT - 2)
        points += [f"{LABEL + WIDTH * x / until_s:.1f},{height:.1f}" for x in (left, right)]
    points.append(f"{LABEL + WIDTH},{top + ROW_HEIGHT}")
    return f'<polygon points="{" ".join(points)}" fill="{SERVERS}"/>\n'


def _average_used(
    used: Sequence[tuple[float, int]], edges: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the mean of a step function over each bin: [bins]."""
    times, nums = (np.array(column, np.float64) for column in zip(*used, strict=True))
    sums = np.concatenate([[0.0], np.cumsum(np.diff(times) * nums[:-1])])
    integrals = np.interp(edges, times, sums)
    return np.asarray(np.diff(integrals) / np.diff(edges))


def _draw_legend() -> str:
    svg, left = "", LABEL
    for name, color in (*COLORS.items(), ("generation", SERVERS)):
        svg += _draw_box(left, 10, 12, 12, color) + _draw_text(left + 16, 20, name)
        left += 110
    return svg


def _draw_axis(until_s: float, num_runs: int) -> str:
    svg, bottom = "", TOP + num_runs * (2 * ROW_HEIGHT + GAP)
    step = 10.0 ** np.floor(np.log10(until_s)) / 2
    for tick in np.arange(0, until_s + step / 2, step):
        x = LABEL + WIDTH * tick / until_s
        svg += f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>\n'
        svg += _draw_text(x - 10, TOP - 12, f"{tick:g} s")
    return svg


def _draw_box(left: float, top: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
        f'fill="{color}"/>\n'
    )


def _draw_text(left: float, top: float, text: str, style: str = "") -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" {style}>{escape(text)}</text>\n'
