"""Figures of a report, as plain data for Plotly: which metrics each shows, and where they are from.

A figure has variants, such as a step or a run, of which the page shows one at a time. Its data and
layout are those of `plotly.graph_objects.Figure`.
"""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from mcore_rl.observability.timeline import DRIVER, StepTimeline
from mcore_rl.observability.trackers import TRAINING
from mcore_rl.tools.report.expert_load import build_load_heatmap
from mcore_rl.tools.report.memory import build_memory_figure
from mcore_rl.tools.report.runs import NoPlanError, Point, Run, to_finite
from mcore_rl.tools.report.traffic import build_traffic_figure

MAX_POINTS = 1000  # of a line; beyond it, the lowest and the highest of neighbouring steps
MAX_BARS = 150  # of the time split; beyond it, means of neighbouring steps
MAX_TIMELINES = 8  # steps of a run whose spans are shown
MAX_LOADS = 8  # steps of a model whose load of each expert is shown
MAX_ROLES = 32  # rows of a timeline
# Okabe and Ito's colours, which colour-blind readers can tell apart, then others; legible on white
# and on black.
COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#999999",
    "#E7298A", "#8A7B00", "#00A7A7", "#A6561D",
)  # fmt: skip
# Phases of a step, whose colours are the same in every report; those of other phases and calls are
# the same in all figures of one.
PHASES = ("generate", "log_probs", "update", "weight_sync", "evaluate", "save")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_PATTERNS = ("", "/", ".")  # of bars, when the colours are used up
_OVERLAPPING = ("time/servers_idle_s",)  # beside the phases of a step, not one of them
_Style = dict[str, Any]  # a marker of Plotly
_LAYER_LOAD = re.compile(r"(?:(\w+)/)?moe/max_expert_load/layer_(\d+)")  # role, layer


@dataclass(frozen=True, slots=True)
class Lines:
    """A plot of metrics over steps."""

    id: str
    title: str
    about: str  # what it shows, and where the numbers are from
    metrics: tuple[str, ...]  # names, with * for any text
    unit: str
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    label: str  # no other of the figure has it; the page remembers it as chosen
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    id: str
    title: str
    about: str
    variants: list[Variant]
    section: str = TRAINING  # phase of the run


LINES = (
    Lines("reward", "Reward", "Mean over all responses of a step; eval/SET on held-out prompts, "
          "with standard errors.", ("reward", "eval/*/reward"), "reward"),
    Lines("accuracy", "Accuracy", "Share of right answers, or of pairs in the right order; "
          "eval/SET on held-out data, with standard errors.",
          ("accuracy", "eval/*/accuracy", "eval/*/accuracy/*"), "share"),
    Lines("loss", "Loss", "Of the update; eval/SET on held-out data.",
          ("loss", "eval/*/loss", "*/loss", "*/policy_loss", "*/value_loss"), "loss"),
    Lines("parts", "Reward parts", "Means of reward/PART: terms of the reward, and what else it "
          "reports.", ("reward/*", "eval/*/reward/*", "role/*"), "reward"),
    Lines("preferences", "Preferences", "Rewards of the chosen and of the rejected response, and "
          "their difference; eval/SET on held-out pairs.",
          ("margin", "reward_chosen", "reward_rejected", "eval/*/margin", "eval/*/reward_chosen",
           "eval/*/reward_rejected"), "reward"),
    Lines("kl", "KL", "To the policy before the update (approx_kl), to the reference model "
          "(reference_kl), and of trainer and servers (mismatch).", ("*approx_kl", "*reference_kl",
          "*distillation_kl", "mismatch/kl", "mismatch/k3_kl"), "nats"),
    Lines("entropy", "Entropy", "Of the policy, mean over sampled tokens.",
          ("*/entropy", "entropy"), "nats"),
    Lines("clipped", "Clip share", "Share of tokens whose ratio the loss clips.",
          ("*/clipped*", "*clip*"), "share"),
    Lines("lengths", "Response lengths", "Mean and longest of a step, and means of held-out "
          "prompts.", ("response_tokens", "response_tokens_max", "eval/*/response_tokens"),
          "tokens"),
    Lines("truncated", "Truncated", "Share of responses that a limit cut off.",
          ("truncated", "eval/*/truncated"), "share"),
    Lines("gap", "Log-prob gap", "Between trainer and servers, at the tokens that the policy chose "
          "(max_logprob_gap, mean_logprob_gap).", ("max_logprob_gap", "mean_logprob_gap"), "nats",
          is_log=True),
    Lines("staleness", "Staleness", "Mean age of the samples that are trained on, in versions of "
          "the weights; replayed samples apart.", ("samples/age", "samples/replayed_age"),
          "versions"),
    Lines("groups", "Groups and filters", "What became of the groups of a step (samples/...).",
          ("samples/groups", "samples/rounds", "samples/dropped*", "samples/replayed"), "groups"),
    Lines("speed", "Throughput", "Prompt and response tokens of a step over its duration.",
          ("tokens_per_s",), "tokens/s"),
    Lines("gradient", "Gradient norm", "Before clipping.", ("*grad_norm",), "norm"),
    Lines("rate", "Learning rate", "Of the optimizer's step.", ("*lr",), ""),
    Lines("experts", "Expert load", "Largest and smallest load of an expert over the mean of its "
          "layer, in the update.", ("*moe/max_expert_load", "*moe/min_expert_load"), "of the mean"),
    Lines("sync", "Weight sync", "Seconds until every server has the new weights "
          "(time/weight_sync_s).", ("time/weight_sync_s", "weight_sync/*_s"), "s"),
    Lines("idle", "Idle servers", "Seconds of a step in which a server has nothing to do, mean "
          "over servers.", ("time/servers_idle_s",), "s"),
    Lines("memory", "Memory", "Highest so far, of the command and all processes that it has "
          "started on its node (memory/peak_bytes).", ("memory/*",), "GB"),
    Lines("gpu_memory", "GPU memory", "Highest so far of the ranks of a model, by torch's "
          "allocator (gpu_memory/ROLE/...).", ("gpu_memory/*",), "GB"),
)  # fmt: skip


# Figures of what is planned from a run's settings: title, description, builder.
_PLANS: Mapping[str, tuple[str, str, Callable[[Run], tuple[list[dict[str, Any]], dict[str, Any]]]]]
_PLANS = {
    "traffic": (
        "Weight-sync traffic",
        "GB of a push between ranks, as mcore-rl plan reshard plans it from config.json and "
        "the model.",
        build_traffic_figure,
    ),
    "plan": (
        "Memory against the plan",
        "Bars: the fullest moment of each model's ranks, as mcore-rl plan memory plans it, without "
        "what torch's allocator does not hold (CUDA contexts, NCCL, graphs). Marks: the highest "
        "that the allocator recorded in the run, on GPUs; on a CPU it records none.",
        build_memory_figure,
    ),
}


@dataclass(slots=True)
class FigureBuilder:
    """Builds the figures of runs, side by side."""

    runs: Sequence[Run]
    max_points: int = MAX_POINTS  # of a line
    _used: set[str] = field(default_factory=set)  # metrics of the phase that have a figure
    _styles: dict[str, _Style] = field(default_factory=dict)  # of each phase and call

    def __post_init__(self) -> None:
        seconds = defaultdict[str, float](float)
        for run in self.runs:
            for row in run.rows:
                for name, value in row.items():
                    if phase := _get_phase(name.removeprefix(f"{row['phase']}/")):
                        seconds[phase] += to_finite(value) or 0.0
            for timeline in run.timeline:
                for span in timeline.spans:
                    seconds[span.name] += span.end_s - span.start_s
        calls = sorted({*seconds} - {*PHASES}, key=lambda name: (-seconds[name], name))
        for index, name in enumerate([*PHASES, *calls]):  # the longest have plain colours
            pattern = _PATTERNS[index // len(COLORS) % len(_PATTERNS)]
            color = COLORS[index % len(COLORS)]
            self._styles[name] = {"color": color, "pattern": {"shape": pattern}}

    def build(self) -> list[Figure]:
        """Return all figures that the runs have data for."""
        phases = dict.fromkeys(phase for run in self.runs for phase in run.phases)
        figures = [*self._build_scores()]
        for phase in sorted(phases, key=lambda phase: phase != TRAINING):
            figures += self._build_phase(phase)
            if phase == TRAINING:
                figures += self._build_expert_load()
                figures += self._build_plans()
        return figures

    def _build_plans(self) -> Iterator[Figure]:
        for name, (title, about, build) in _PLANS.items():
            variants = []
            for run in self.runs:
                with suppress(NoPlanError):  # the table of runs says why
                    variants.append(Variant(self._label(run), *build(run)))
            if variants:
                yield Figure(f"training-{name}", title, about, variants)

    def _build_expert_load(self) -> Iterator[Figure]:
        variants, most = [], max(1, MAX_LOADS * self.max_points // MAX_POINTS)
        for run in self.runs:
            for role in dict.fromkeys(load.role for load in run.expert_load):
                loads = [load for load in run.expert_load if load.role == role]
                for load in reversed(pick_evenly(loads, most)):
                    label = ", ".join(filter(None, [self._label(run), role, f"step {load.step}"]))
                    variants.append(Variant(label, *build_load_heatmap(load)))
        if variants:
            about = (
                "Tokens of each expert in the last update of a step, over the mean of its layer, "
                "of all ranks (expert_load.jsonl). 1 is even. Variation: standard deviation over "
                "mean, averaged over the layers; 0 is even."
            )
            yield Figure("training-expert_load", "Load of each expert", about, variants)

    def _build_phase(self, phase: str) -> Iterator[Figure]:
        series = {run.name: run.collect_series(phase) for run in self.runs}
        self._used = set()
        for lines in LINES:
            if figure := self._build_lines(lines, phase, series):
                yield figure
        yield from self._build_time_split(phase, series)
        yield from self._build_timelines(phase)
        yield from self._build_layer_loads(phase, series)
        yield from self._build_rest(phase, series)

    def _build_lines(
        self, lines: Lines, phase: str, series: Mapping[str, Mapping[str, list[Point]]]
    ) -> Figure | None:
        known = dict.fromkeys(name for by_name in series.values() for name in by_name)
        free = [name for name in known if name not in self._used]
        matches = (name for p in lines.metrics for name in free if fnmatchcase(name, p))
        names = [name for name in dict.fromkeys(matches) if not _LAYER_LOAD.fullmatch(name)]
        self._used.update(names)
        data = self._build_traces(names, series)
        if not data:
            return None
        layout = _build_layout("step", lines.unit)
        if len({y for trace in data for y in trace["y"] if y is not None}) == 1:
            layout["yaxis"]["rangemode"] = "tozero"  # else Plotly draws one around a small number
        if lines.is_log and any((y or 0) > 0 for trace in data for y in trace["y"]):
            layout["yaxis"]["type"] = "log"
        return Figure(
            f"{phase}-{lines.id}", lines.title, lines.about, [Variant("", data, layout)], phase
        )

    def _build_traces(
        self, names: Sequence[str], series: Mapping[str, Mapping[str, list[Point]]]
    ) -> list[dict[str, Any]]:
        """Return a line per metric and run; colours are the runs' where there are several."""
        traces = []
        for run_index, run in enumerate(self.runs):
            for index, name in enumerate(names):
                points = series[run.name].get(name)
                if not points:
                    continue
                is_single = len(self.runs) == 1
                color = COLORS[(index if is_single else run_index) % len(COLORS)]
                dash = "solid" if is_single else DASHES[index % len(DASHES)]
                label = name if is_single else f"{run.name}: {name}"
                scale = 1e-9 if _is_bytes(name) else 1.0
                line = _build_line(label, thin(points, self.max_points), color, dash, scale)
                traces.append(line | {"meta": {"run": run.name, "label": name}})
        return traces

    def _build_time_split(
        self, phase: str, series: Mapping[str, Mapping[str, list[Point]]]
    ) -> Iterator[Figure]:
        variants = []
        for run in self.runs:
            times = {
                name: points
                for metric, points in series[run.name].items()
                if (name := _get_phase(metric))
            }
            if times:
                layout = _build_layout("step", "s") | {"barmode": "stack", "bargap": 0.1}
                data = list(_build_bars(times, self._styles))
                variants.append(Variant(self._label(run), data, layout))
            self._used.update(name for name in series[run.name] if name.startswith("time/"))
        if variants:
            about = "Seconds of the phases of a step, as the driver waits for them (time/PHASE_s)."
            yield Figure(f"{phase}-time", "Time split", about, variants, phase)

    def _build_timelines(self, phase: str) -> Iterator[Figure]:
        variants = []
        for run in self.runs:
            timelines = [line for line in run.timeline if line.phase == phase]
            for timeline in reversed(pick_evenly(timelines, MAX_TIMELINES)):
                label = ", ".join(filter(None, [self._label(run), f"step {timeline.step}"]))
                variants.append(Variant(label, *_build_gantt(timeline, self._styles)))
        if variants:
            about = (
                "What each role does in a step (timeline.jsonl): phases of the driver, and calls "
                "of workers from the moment they are sent until the last rank has answered."
            )
            yield Figure(f"{phase}-timeline", "Timeline of a step", about, variants, phase)

    def _build_layer_loads(
        self, phase: str, series: Mapping[str, Mapping[str, list[Point]]]
    ) -> Iterator[Figure]:
        variants = []
        for run in self.runs:
            by_role: dict[str, dict[int, list[Point]]] = {}
            for name, points in series[run.name].items():
                if match := _LAYER_LOAD.fullmatch(name):
                    layers = by_role.setdefault(match[1] or "", {})
                    layers[int(match[2])] = thin_by_stride(points, MAX_BARS)
                    self._used.add(name)
            for role, layers in by_role.items():
                label = ", ".join(filter(None, [self._label(run), role]))
                variants.append(Variant(label, *_build_layer_heatmap(layers)))
        if variants:
            about = (
                "Largest load of an expert over the mean of its layer, by layer and step "
                "(moe/max_expert_load/layer_N), mean over the updates of a step. 1 is even."
            )
            yield Figure(f"{phase}-loads", "Expert load by layer", about, variants, phase)

    def _build_rest(
        self, phase: str, series: Mapping[str, Mapping[str, list[Point]]]
    ) -> Iterator[Figure]:
        names = sorted({name for by_name in series.values() for name in by_name} - self._used)
        variants = [
            Variant(name, traces, _build_layout("step", "GB" if _is_bytes(name) else ""))
            for name in names
            if (traces := self._build_traces([name], series))
        ]
        if variants:
            about = "Every metric of metrics.jsonl that has no figure of its own."
            yield Figure(f"{phase}-other", "Other metrics", about, variants, phase)

    def _build_scores(self) -> Iterator[Figure]:
        """Yield a figure per set of evaluations: metrics with standard errors over prompts."""
        runs = [run for run in self.runs if run.kind == "eval" and "sets" in run.summary]
        for name in dict.fromkeys(name for run in runs for name in run.summary["sets"]):
            traces = []
            for index, run in enumerate(runs):
                scores = {
                    metric: value
                    for metric, value in run.summary["sets"].get(name, {}).items()
                    if isinstance(value, dict) and metric != "response_tokens"
                }
                traces.append(
                    {
                        "type": "bar",
                        "name": html.escape(run.name),
                        "x": [*map(html.escape, scores)],
                        "y": [to_finite(value["mean"]) for value in scores.values()],
                        "error_y": {
                            "array": [
                                to_finite(value["standard_error"]) for value in scores.values()
                            ]
                        },
                        "marker": {"color": COLORS[index % len(COLORS)]},
                        "meta": {"run": run.name},
                    }
                )
            about = "summary.json: means over prompts, with standard errors over prompts."
            layout = _build_layout("", "") | {"barmode": "group"}
            yield Figure(f"set-{name}", f"Set {name}", about, [Variant("", traces, layout)])

    def _label(self, run: Run) -> str:
        return "" if len(self.runs) == 1 else run.name


def _build_layout(x: str, y: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def _is_bytes(metric: str) -> bool:
    """Return whether a metric is a number of bytes, which is shown in GB."""
    return re.split(r"[/_]", metric)[-1] == "bytes"


def _get_phase(metric: str) -> str:
    """Return the phase of a step whose seconds a metric has; else empty."""
    is_phase = metric.startswith("time/") and metric not in _OVERLAPPING
    return metric.removeprefix("time/").removesuffix("_s") if is_phase else ""


def _build_line(
    label: str, points: Sequence[Point], color: str, dash: str, scale: float
) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if len(points) <= 60 else "lines",
        "name": html.escape(label),  # Plotly reads tags in texts
        "x": [point.step for point in points],
        "y": [_round(point.value, scale) for point in points],
        "line": {"color": color, "dash": dash, "width": 1.8},
        "marker": {"size": 4},
    }
    if any(point.stderr is not None for point in points):
        trace["error_y"] = {"array": [_round(point.stderr or 0.0, scale) for point in points]}
    return trace


def _build_bars(
    times: Mapping[str, Sequence[Point]], styles: Mapping[str, _Style]
) -> Iterator[dict[str, Any]]:
    """Yield a trace per phase; of many steps, means over neighbours (0 where it did not run)."""
    steps = sorted({point.step for points in times.values() for point in points})
    size = -(-len(steps) // MAX_BARS)
    buckets = [steps[start : start + size] for start in range(0, len(steps), size)]
    for name, points in times.items():
        seconds = {point.step: point.value or 0.0 for point in points}
        yield {
            "type": "bar",
            "name": html.escape(name),
            "x": [bucket[0] for bucket in buckets],
            "y": [_round(sum(seconds.get(s, 0.0) for s in b) / len(b)) for b in buckets],
            "marker": styles[name],
            "meta": {"label": name},
        }


def _build_gantt(
    timeline: StepTimeline, styles: Mapping[str, _Style]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return bars over seconds since the first span; a row per role, a colour per call.

    The axis says how many calls and roles are not drawn.
    """
    origin_s = min(span.start_s for span in timeline.spans)
    roles = sorted({span.role for span in timeline.spans}, key=lambda role: (role != DRIVER, role))
    hidden = {"calls": timeline.num_left_out, "roles": len(roles[MAX_ROLES:])}
    roles = roles[:MAX_ROLES]
    traces, present = [], {span.name for span in timeline.spans}
    for name in (name for name in styles if name in present):
        spans = [span for span in timeline.spans if span.name == name and span.role in roles]
        if not spans:
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": html.escape(name),
                "base": [_round(span.start_s - origin_s) for span in spans],
                "x": [_round(span.end_s - span.start_s) for span in spans],
                "y": [html.escape(span.role) for span in spans],
                "marker": styles[name],
                "meta": {"label": name},
                "text": [html.escape(name)] * len(spans),
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "hovertemplate": "%{y}: %{fullData.name}<br>from %{base:.3f} s, %{x:.3f} s"
                "<extra></extra>",
            }
        )
    # Without text where a bar is too narrow for it.
    text = {"mode": "hide", "minsize": 9}
    title = "; ".join(["seconds", *(f"{n} {what} not shown" for what, n in hidden.items() if n)])
    layout = _build_layout(title, "") | {"barmode": "overlay", "uniformtext": text}
    layout["yaxis"] |= {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": [html.escape(role) for role in reversed(roles)],
    }
    return traces, layout


def _build_layer_heatmap(
    layers: Mapping[int, Sequence[Point]],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return data and layout of a heatmap of layers and steps."""
    steps = sorted({point.step for points in layers.values() for point in points})
    rows = []
    for layer in sorted(layers):
        by_step = {point.step: point.value for point in layers[layer]}
        rows.append([_round(by_step.get(step)) for step in steps])
    trace = {
        "type": "heatmap",
        "x": steps,
        "y": [str(layer) for layer in sorted(layers)],
        "z": rows,
        "zmin": 1,
        "zmax": max([2.0, *(load for row in rows for load in row if load is not None)]),
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "of the mean"}},
    }
    layout = _build_layout("step", "layer")
    layout["yaxis"]["type"] = "category"
    return [trace], layout


def _round(value: float | None, scale: float = 1.0) -> float | None:
    return None if value is None else float(f"{value * scale:.6g}")


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most so many points: first, last, and extremes of each run of neighbours.

    Neighbours of which none is finite are one hole.

    Args:
        most: At least 4.
    """
    if len(points) <= most:
        return [*points]
    first, *inner, last = points
    size = -(-2 * len(inner) // (most - 2))
    thinned = [first]
    for start in range(0, len(inner), size):
        bucket = inner[start : start + size]
        finite = [p for p in bucket if p.value is not None] or bucket[:1]
        ends = {min(finite, key=_get_value), max(finite, key=_get_value)}
        thinned += sorted(ends, key=lambda point: point.step)
    return [*thinned, last]


def _get_value(point: Point) -> float:
    return point.value or 0.0


def thin_by_stride(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most so many points: the last, and others at equal distances before it."""
    stride = -(-len(points) // most)
    return [*reversed(points[::-1][:: max(stride, 1)])]


def pick_evenly[T](items: Sequence[T], most: int) -> list[T]:
    """Return at most so many items at equal distances, with the last, and the first of several."""
    if len(items) <= most:
        return [*items]
    if most == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
