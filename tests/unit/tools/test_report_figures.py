"""Figures and facts of a report, each against numbers computed by hand from a run's files.

Long because: all figures are of one small run, whose numbers stand once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mcore_rl.config.schema import EvalConfig, RLConfig
from mcore_rl.jobs.output import write_json
from mcore_rl.observability.expert_load import ExpertLoad, ExpertLoadWriter
from mcore_rl.observability.metrics import MetricsLogger
from mcore_rl.observability.timeline import StepTimeline, TimelineWriter, TimeSpan
from mcore_rl.observability.trackers import TrackedRun
from mcore_rl.tools.report.figures import (
    COLORS,
    MAX_LOADS,
    MAX_POINTS,
    FigureBuilder,
    Variant,
    pick_evenly,
    thin,
    thin_by_stride,
)
from mcore_rl.tools.report.memory import build_memory_figure, compare_memory, summarize_memory
from mcore_rl.tools.report.page import build_data
from mcore_rl.tools.report.runs import Point, read_runs
from mcore_rl.tools.report.server import format_latest
from mcore_rl.tools.report.traffic import build_traffic_figure, summarize_traffic
from tests.unit.tools.report_runs import write_run
from tests.unit.tools.test_plan_reshard import DENSE, REPLICATED, SPLIT
from tests.unit.tools.test_report import plan_tensors

MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip


def build_variants(*folders: Path, max_points: int = MAX_POINTS) -> dict[str, list[Variant]]:
    """Return the variants of each figure."""
    figures = FigureBuilder(read_runs(folders), max_points).build()
    return {figure.id: figure.variants for figure in figures}


def write_steps(folder: Path, rows: Mapping[int, Mapping[str, float]], phase: str) -> None:
    """Write a run whose steps of a phase have metrics, in the order given."""
    write_run(folder, "sft", [])
    with MetricsLogger(TrackedRun(folder, "", {}), trackers=()) as logger:
        for step, row in rows.items():
            logger.write(step, row, phase)


def get_lines(variant: Variant) -> dict[str, tuple[list[int], list[float | None]]]:
    """Return steps and values of each trace by its name."""
    return {trace["name"]: (trace["x"], trace["y"]) for trace in variant.data}


# Lines


def test_every_metric_is_in_its_figure(tmp_path):
    expected = {
        "reward": ["reward", "eval/t/reward"],
        "accuracy": ["accuracy", "eval/t/accuracy", "eval/t/accuracy/hard"],
        "loss": ["loss", "eval/t/loss", "actor/loss", "actor/policy_loss", "critic/value_loss"],
        "parts": ["reward/format", "eval/t/reward/format", "role/judge"],
        "preferences": ["margin", "reward_chosen", "reward_rejected", "eval/t/margin",
                        "eval/t/reward_chosen", "eval/t/reward_rejected"],
        "kl": ["actor/approx_kl", "actor/reference_kl", "actor/distillation_kl", "mismatch/kl",
               "mismatch/k3_kl"],
        "entropy": ["actor/entropy", "entropy"],
        "clipped": ["actor/clipped", "actor/clipped_high", "clip_share"],
        "lengths": ["response_tokens", "response_tokens_max", "eval/t/response_tokens"],
        "truncated": ["truncated", "eval/t/truncated"],
        "gap": ["max_logprob_gap", "mean_logprob_gap"],
        "staleness": ["samples/age", "samples/replayed_age"],
        "groups": ["samples/groups", "samples/rounds", "samples/dropped_stale",
                   "samples/replayed"],
        "speed": ["tokens_per_s"],
        "gradient": ["actor/grad_norm", "grad_norm"],
        "rate": ["actor/lr", "lr"],
        "experts": ["actor/moe/max_expert_load", "moe/min_expert_load"],
        "sync": ["time/weight_sync_s", "weight_sync/wait_s"],
        "idle": ["time/servers_idle_s"],
        "memory": ["memory/peak_bytes"],
        "gpu_memory": ["gpu_memory/actor/max_allocated_bytes"],
        "other": ["dropped", "samples/passed", "weight_sync/bytes"],
    }  # fmt: skip
    names = [name for group in expected.values() for name in group]
    figures = build_variants(write_run(tmp_path / "a", "sft", [dict.fromkeys(names, 1.0)]))
    shown = {
        name.removeprefix("training-"): {trace["name"] for v in variants for trace in v.data}
        for name, variants in figures.items()
    }
    assert shown.pop("time") == {"weight_sync"}
    assert shown == {name: set(group) for name, group in expected.items()}
    units = {name: variants[0].layout["yaxis"]["title"]["text"] for name, variants in
             figures.items()}  # fmt: skip
    assert units["training-idle"] == units["training-sync"] == units["training-time"] == "s"
    assert units["training-memory"] == units["training-gpu_memory"] == "GB"


def test_line_has_rounded_values_and_the_errors_that_are_known(tmp_path):
    rows = [
        {"reward": 0.123456789, "eval/t/reward": 0.5, "eval/t/reward_stderr": 0.125},
        {"reward": -2.0},
        {"reward": 0.0, "eval/t/reward": 0.25},
        {"reward": 1e-9, "eval/t/reward": 0.75, "eval/t/reward_stderr": float("nan")},
        {"reward": 3.0, "eval/t/reward": 1.0, "eval/t/reward_stderr": 0.0625},
    ]
    [variant] = build_variants(write_run(tmp_path / "a", "sft", rows))["training-reward"]
    training, held_out = variant.data
    assert (training["x"], training["y"]) == ([1, 2, 3, 4, 5], [0.123457, -2.0, 0.0, 1e-9, 3.0])
    assert "error_y" not in training
    assert (held_out["x"], held_out["y"]) == ([1, 3, 4, 5], [0.5, 0.25, 0.75, 1.0])
    assert held_out["error_y"] == {"array": [0.125, 0.0, 0.0, 0.0625]}
    assert [trace["line"]["color"] for trace in variant.data] == ["#0072B2", "#D55E00"]
    assert [trace["line"]["dash"] for trace in variant.data] == ["solid", "solid"]
    assert variant.layout["xaxis"]["title"]["text"] == "step"


def test_lines_of_runs_side_by_side_have_their_own_points_and_dashes(tmp_path):
    rows = [{"max_logprob_gap": 0.5, "mean_logprob_gap": 0.25}]
    write_run(tmp_path / "a", "sft", rows)
    write_run(tmp_path / "b", "sft", [{"mean_logprob_gap": 0.125}] * 2)
    [variant] = build_variants(tmp_path / "a", tmp_path / "b")["training-gap"]
    lines = [(t["name"], t["x"], t["y"], t["line"]["color"], t["line"]["dash"]) for t in
             variant.data]  # fmt: skip
    assert lines == [
        ("a: max_logprob_gap", [1], [0.5], "#0072B2", "solid"),
        ("a: mean_logprob_gap", [1], [0.25], "#0072B2", "dash"),
        ("b: mean_logprob_gap", [1, 2], [0.125, 0.125], "#D55E00", "dash"),
    ]


@pytest.mark.parametrize(("num_steps", "mode"), [(60, "lines+markers"), (61, "lines")])
def test_points_of_long_lines_have_no_markers(tmp_path, num_steps, mode):
    rows = [{"loss": float(step)} for step in range(num_steps)]
    [variant] = build_variants(write_run(tmp_path / "a", "sft", rows))["training-loss"]
    assert variant.data[0]["mode"] == mode


@pytest.mark.parametrize(
    ("gaps", "axis"), [([1e-4, 0.0, 1e-2], "log"), ([0.0, 0.0], None), ([None, 0.5], "log")]
)
def test_axis_of_the_gap_is_logarithmic_where_a_value_has_a_logarithm(tmp_path, gaps, axis):
    rows = [
        {"max_logprob_gap": float("nan") if gap is None else gap, "loss": 1.0 + step}
        for step, gap in enumerate(gaps)
    ]
    figures = build_variants(write_run(tmp_path / "a", "sft", rows))
    assert figures["training-gap"][0].layout["yaxis"].get("type") == axis
    assert "type" not in figures["training-loss"][0].layout["yaxis"]


@pytest.mark.parametrize(
    ("values", "mode"),
    [([1e-4] * 2, "tozero"), ([1e-4, float("nan")], "tozero"), ([1e-4, 2e-4], None)],
)
def test_axis_begins_at_zero_where_every_finite_value_is_the_same(tmp_path, values, mode):
    rows = [{"lr": value} for value in values]
    [variant] = build_variants(write_run(tmp_path / "a", "sft", rows))["training-rate"]
    assert variant.layout["yaxis"].get("rangemode") == mode


def test_metrics_of_a_phase_have_figures_without_its_prefix(tmp_path):
    write_steps(tmp_path, {1: {"loss": 4.0, "time/update_s": 2.0}, 2: {"loss": 3.0}}, "warm_start")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "training", "step": 1, "wall_time_s": 0.0, "loss": 9.0}\n')
    figures = build_variants(tmp_path)
    assert list(figures) == ["training-loss", "warm_start-loss", "warm_start-time"]
    assert get_lines(figures["training-loss"][0]) == {"loss": ([1], [9.0])}
    assert get_lines(figures["warm_start-loss"][0]) == {"loss": ([1, 2], [4.0, 3.0])}
    assert get_lines(figures["warm_start-time"][0]) == {"update": ([1], [2.0])}


# Thinning


def to_points(values: Sequence[float | None]) -> list[Point]:
    return [Point(step, value) for step, value in enumerate(values, 1)]


def test_thinned_line_has_first_last_and_extremes_of_neighbours():
    """Six points: the ends, and two of each three that lie between them."""
    points = to_points([5.0, 1.0, 9.0, 4.0, 7.0, -2.0, -2.0, 5.0])
    assert thin(points, 6) == [points[index] for index in (0, 1, 2, 4, 5, 7)]
    assert thin(points, 8) == points


def test_thinned_line_has_its_ends_where_they_are_no_extremes():
    points = to_points([0.5] + [0.0, 1.0] * 5000 + [0.5])
    thinned = thin(points)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert len(thinned) <= MAX_POINTS


def test_hole_stays_where_no_neighbour_is_finite():
    points = to_points([1.0, 2.0, None, 0.0, None, None, None, None])
    assert thin(points, 6) == [points[index] for index in (0, 1, 3, 4, 7)]


def test_line_of_many_steps_is_thinned_in_its_figure(tmp_path):
    """12 points become at most 10: the ends, and the extremes of each three between them."""
    values = [3.0, 1.0, 2.0, 0.0, 9.0, 5.0, 7.0, 4.0, 4.5, 4.0, 4.0, 3.5]
    folder = write_run(tmp_path / "a", "sft", [{"loss": value} for value in values])
    [variant] = build_variants(folder, max_points=10)["training-loss"]
    steps = [1, 3, 4, 5, 6, 8, 9, 11, 12]
    assert get_lines(variant) == {"loss": (steps, [values[step - 1] for step in steps])}


def test_stride_counts_from_the_last_point():
    points = to_points([*range(10)])
    assert [point.step for point in thin_by_stride(points, 4)] == [1, 4, 7, 10]
    assert [point.step for point in thin_by_stride(points[:9], 4)] == [3, 6, 9]
    assert thin_by_stride(points, 10) == points and thin_by_stride([], 4) == []


def test_items_are_picked_at_equal_distances():
    """The multiples of 19 / 7, rounded."""
    assert pick_evenly(range(20), 8) == [0, 3, 5, 8, 11, 14, 16, 19]
    assert pick_evenly(range(3), 3) == pick_evenly(range(3), 9) == [0, 1, 2]
    assert (pick_evenly(range(20), 2), pick_evenly(range(20), 1)) == ([0, 19], [19])
    assert pick_evenly(range(20), 0) == []


# Time


def test_idle_seconds_are_a_line_and_no_part_of_the_step(tmp_path):
    rows = [
        {"time/generate_s": 3.0, "time/servers_idle_s": 1.25, "time/weight_sync_s": 0.5},
        {"time/generate_s": 2.0, "time/servers_idle_s": 0.0, "time/weight_sync_s": 0.25},
        {"time/generate_s": 4.0, "time/servers_idle_s": 2.5, "time/weight_sync_s": 0.125},
    ]
    figures = build_variants(write_run(tmp_path / "a", "sft", rows))
    idle = {"time/servers_idle_s": ([1, 2, 3], [1.25, 0.0, 2.5])}
    assert get_lines(figures["training-idle"][0]) == idle
    sync = {"time/weight_sync_s": ([1, 2, 3], [0.5, 0.25, 0.125])}
    assert get_lines(figures["training-sync"][0]) == sync
    [split] = figures["training-time"]
    assert get_lines(split) == {
        "generate": ([1, 2, 3], [3.0, 2.0, 4.0]),
        "weight_sync": ([1, 2, 3], [0.5, 0.25, 0.125]),
    }
    assert split.layout["barmode"] == "stack"
    assert {trace["type"] for trace in split.data} == {"bar"}
    assert "base" not in split.data[0] and "training-other" not in figures


def test_time_split_has_zero_where_a_phase_did_not_run(tmp_path):
    rows = [
        {"time/update_s": 1.0},
        {"time/save_s": 8.0},
        {"loss": 1.0},
        {"time/update_s": 2.0, "time/evaluate_s": 4.0},
        {"time/update_s": float("nan")},
    ]
    [split] = build_variants(write_run(tmp_path / "a", "sft", rows))["training-time"]
    assert get_lines(split) == {
        "update": ([1, 2, 4, 5], [1.0, 0.0, 2.0, 0.0]),
        "save": ([1, 2, 4, 5], [0.0, 8.0, 0.0, 0.0]),
        "evaluate": ([1, 2, 4, 5], [0.0, 0.0, 4.0, 0.0]),
    }
    colors = {trace["name"]: trace["marker"]["color"] for trace in split.data}
    assert colors == {"update": COLORS[2], "save": COLORS[5], "evaluate": COLORS[4]}


def test_bars_of_many_steps_are_means_of_neighbours_and_the_last_of_those_that_are_left(tmp_path):
    """302 steps: a bar is of three; the last is of steps 301 and 302."""
    rows: list[dict[str, float]] = [{"time/update_s": float(step)} for step in range(1, 303)]
    rows[4]["time/save_s"] = 6.0  # step 5, of the bar from step 4 on
    rows[301]["time/evaluate_s"] = 7.0
    [split] = build_variants(write_run(tmp_path / "a", "sft", rows))["training-time"]
    steps = [*range(1, 302, 3)]
    bars = get_lines(split)
    assert all(x == steps for x, _ in bars.values())
    assert bars["update"][1] == [*(step + 1.0 for step in steps[:-1]), 301.5]
    assert bars["save"][1] == [0.0, 2.0, *[0.0] * 99]
    assert bars["evaluate"][1] == [*[0.0] * 100, 3.5]


def test_time_split_of_150_steps_has_a_bar_for_each(tmp_path):
    rows = [{"time/update_s": float(step)} for step in range(1, 151)]
    [split] = build_variants(write_run(tmp_path / "a", "sft", rows))["training-time"]
    assert get_lines(split) == {"update": ([*range(1, 151)], [*map(float, range(1, 151))])}


def test_runs_side_by_side_have_a_time_split_each(tmp_path):
    write_run(tmp_path / "a", "sft", [{"time/update_s": 1.0}])
    write_run(tmp_path / "b", "sft", [{"time/update_s": 2.0}])
    variants = build_variants(tmp_path / "a", tmp_path / "b")["training-time"]
    assert {variant.label: variant.data[0]["y"] for variant in variants} == {"a": [1.0], "b": [2.0]}


# Timeline


def write_timelines(folder: Path, *timelines: StepTimeline) -> Path:
    """Write a run of one step with timelines."""
    write_run(folder, "sft", [{"loss": 1.0}])
    writer = TimelineWriter(folder)
    for timeline in timelines:
        writer.write(timeline)
    return folder


def test_timeline_has_bars_from_the_earliest_start_on(tmp_path):
    """The span that began first is written last, since it ended last."""
    spans = [
        TimeSpan("rollout", "collect", 100.5, 101.0),
        TimeSpan("critic", "update", 101.25, 101.5),
        TimeSpan("rollout", "collect", 102.0, 102.125),
        TimeSpan("actor", "update", 101.5, 103.5),
        TimeSpan("driver", "generate", 100.0, 103.75),
    ]
    timeline = StepTimeline("training", 7, spans)
    [variant] = build_variants(write_timelines(tmp_path, timeline))["training-timeline"]
    bars = [(t["name"], t["y"], t["base"], t["x"]) for t in variant.data]
    assert bars == [
        ("generate", ["driver"], [0.0], [3.75]),
        ("update", ["critic", "actor"], [1.25, 1.5], [0.25, 2.0]),
        ("collect", ["rollout", "rollout"], [0.5, 2.0], [0.5, 0.125]),
    ]
    assert {(t["type"], t["orientation"]) for t in variant.data} == {("bar", "h")}
    assert [t["text"] for t in variant.data] == [["generate"], ["update"] * 2, ["collect"] * 2]
    # Plotly's axis goes up, so that the driver is in the highest row.
    rows = variant.layout["yaxis"]["categoryarray"]
    assert rows == ["rollout", "critic", "actor", "driver"]
    assert variant.layout["barmode"] == "overlay"
    assert variant.layout["xaxis"]["title"]["text"] == "seconds"
    assert variant.label == "step 7"


def test_timeline_of_many_roles_says_what_is_not_shown(tmp_path):
    """41 roles: the driver and 31 others have rows."""
    spans = [TimeSpan(f"server {n:02}", "collect", 10.0 + n, 11.0 + n) for n in range(40)]
    spans.append(TimeSpan("server 39", "sleep", 9.0, 9.5))
    spans.append(TimeSpan("driver", "generate", 10.0, 20.0))
    timeline = StepTimeline("training", 1, spans, num_left_out=3)
    [variant] = build_variants(write_timelines(tmp_path, timeline))["training-timeline"]
    shown = [f"server {n:02}" for n in range(31)]
    assert variant.layout["yaxis"]["categoryarray"] == [*reversed(shown), "driver"]
    bars = {t["name"]: (t["y"], t["base"]) for t in variant.data}
    assert bars == {
        "collect": (shown, [1.0 + n for n in range(31)]),
        "generate": (["driver"], [1.0]),
    }
    title = "seconds; 3 calls not shown; 9 roles not shown"
    assert variant.layout["xaxis"]["title"]["text"] == title


def test_longest_calls_have_plain_colours_and_later_ones_patterns(tmp_path):
    spans = [TimeSpan("driver", f"phase {n}", 0.0, 1.0 + n) for n in range(19)]
    timeline = StepTimeline("training", 1, spans)
    [variant] = build_variants(write_timelines(tmp_path, timeline))["training-timeline"]
    assert [t["name"] for t in variant.data] == [f"phase {n}" for n in reversed(range(19))]
    markers = [(t["marker"]["color"], t["marker"]["pattern"]["shape"]) for t in variant.data]
    plain, striped = [(c, "") for c in COLORS], [(c, "/") for c in COLORS]
    assert markers == [*plain[6:], *striped, (COLORS[0], ".")]  # after those of PHASES


def test_phase_has_one_colour_in_every_figure_of_every_run(tmp_path):
    write_run(tmp_path / "a", "sft", [{"time/pack_s": 1.0, "time/update_s": 9.0}])
    write_run(tmp_path / "b", "sft", [{"time/update_s": 1.0, "time/pack_s": 5.0}])
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        row = {"phase": "warm_start", "step": 1, "warm_start/time/pack_s": 2.0}
        file.write(json.dumps(row | {"wall_time_s": 1.0}) + "\n")
    ends = (("pack", 1.0), ("update", 2.0), ("x", 99.0))
    spans = [TimeSpan("driver", name, 0.0, end_s) for name, end_s in ends]
    TimelineWriter(tmp_path / "a").write(StepTimeline("training", 1, spans))
    figures = build_variants(tmp_path / "a", tmp_path / "b")
    shown = [*figures["training-time"], *figures["training-timeline"], *figures["warm_start-time"]]
    colors = [(t["name"], t["marker"]["color"]) for variant in shown for t in variant.data]
    assert {*colors} == {("update", COLORS[2]), ("x", COLORS[6]), ("pack", COLORS[7])}
    assert len(colors) == 2 + 2 + 3 + 1


def test_bytes_are_gigabytes(tmp_path):
    rows = [{"memory/peak_bytes": 2.5e9, "weight_sync/bytes": 4e6, "cache_bytes_share": 0.5}]
    figures = build_variants(write_run(tmp_path / "a", "sft", rows))
    assert get_lines(figures["training-memory"][0]) == {"memory/peak_bytes": ([1], [2.5])}
    share, sync = figures["training-other"]
    assert get_lines(sync) == {"weight_sync/bytes": ([1], [0.004])}
    assert get_lines(share) == {"cache_bytes_share": ([1], [0.5])}
    titles = [variant.layout["yaxis"]["title"]["text"] for variant in (share, sync)]
    assert titles == ["", "GB"]


def test_timelines_are_of_their_phase_and_the_last_step_is_first(tmp_path):
    spans = [TimeSpan("driver", "update", 0.0, 1.0)]
    lines = [StepTimeline("training", step, spans) for step in range(1, 21)]
    folder = write_timelines(tmp_path, StepTimeline("warm_start", 50, spans), *lines)
    labels = [variant.label for variant in build_variants(folder)["training-timeline"]]
    assert labels == [f"step {step}" for step in (20, 17, 15, 12, 9, 6, 4, 1)]


# Experts


def test_layers_are_in_the_order_of_their_numbers_with_holes_where_a_step_has_none(tmp_path):
    name = "moe/max_expert_load/layer_"
    rows = [
        {f"actor/{name}10": 1.5, f"actor/{name}2": 1.25, f"critic/{name}0": 3.5, f"{name}1": 1.0},
        {f"actor/{name}2": 1.75, f"critic/{name}0": float("nan")},
    ]
    variants = build_variants(write_run(tmp_path / "a", "sft", rows))["training-loads"]
    heatmaps = {
        v.label: (t["x"], t["y"], t["z"], t["zmin"], t["zmax"]) for v in variants for t in v.data
    }
    assert heatmaps == {
        "actor": ([1, 2], ["2", "10"], [[1.25, 1.75], [1.5, None]], 1, 2.0),
        "critic": ([1, 2], ["0"], [[3.5, None]], 1, 3.5),
        "": ([1], ["1"], [[1.0]], 1, 2.0),
    }


def test_layer_heatmap_of_many_steps_has_every_third_and_the_last(tmp_path):
    rows = [{"moe/max_expert_load/layer_0": 1.0 + step} for step in range(1, 302)]
    [variant] = build_variants(write_run(tmp_path / "a", "sft", rows))["training-loads"]
    [heatmap] = variant.data
    assert heatmap["x"] == [*range(1, 302, 3)]
    assert heatmap["z"] == [[1.0 + step for step in range(1, 302, 3)]]


def write_loads(folder: Path, *loads: ExpertLoad) -> Path:
    """Write a run of one step with loads of experts."""
    write_run(folder, "sft", [{"loss": 1.0}])
    writer = ExpertLoadWriter(folder)
    for load in loads:
        writer.write(load)
    return folder


def test_expert_heatmap_has_zeros_where_a_layer_has_no_tokens(tmp_path):
    """Layer 3 has loads 4, 0, 0, 0, of standard deviation sqrt((9 + 1 + 1 + 1) / 4) = 1.732."""
    load = ExpertLoad(6, "critic", [1, 3], [[0, 0, 0, 0], [8, 0, 0, 0]])
    [variant] = build_variants(write_loads(tmp_path, load))["training-expert_load"]
    [heatmap] = variant.data
    assert heatmap["z"] == [[0.0] * 4, [4.0, 0.0, 0.0, 0.0]]
    assert (heatmap["x"], heatmap["y"]) == (["0", "1", "2", "3"], ["1", "3"])
    assert (heatmap["zmin"], heatmap["zmax"]) == (0, 4.0)
    title = "expert<br>largest 4 (layer 3, expert 0)<br>variation 0.866"
    assert variant.layout["xaxis"]["title"]["text"] == title
    assert variant.label == "critic, step 6"


def test_expert_heatmaps_are_of_each_role_at_equal_distances_and_at_least_of_the_last_step(
    tmp_path,
):
    loads = [ExpertLoad(s, role, [0], [[1, 3]]) for s in range(1, 21) for role in ("a", "b")]
    folder = write_loads(tmp_path, *loads)
    labels = [v.label for v in build_variants(folder)["training-expert_load"]]
    steps = [20, 17, 15, 12, 9, 6, 4, 1]
    assert labels == [f"{role}, step {step}" for role in "ab" for step in steps]
    small = build_variants(folder, max_points=MAX_POINTS // MAX_LOADS)["training-expert_load"]
    assert [v.label for v in small] == ["a, step 20", "b, step 20"]
    assert [v.data[0]["zmax"] for v in small] == [2.0, 2.0]  # 1.5 is the largest load


# Scores of sets


def write_scores(folder: Path, sets: dict[str, Any]) -> Path:
    """Write the summary of an evaluation."""
    write_run(folder, "eval", [])
    write_json(folder / "config.json", asdict(EvalConfig()) | {"evaluated": {"model": "m"}})
    write_json(folder / "summary.json", {"sets": sets})
    return folder


def test_sets_have_a_bar_for_each_score_and_run(tmp_path):
    tokens = {"mean": 100.0, "standard_error": 5.0}
    math = {
        "prompts": 4,
        "response_tokens": tokens,
        "pass@1": {"mean": 0.5, "standard_error": 0.25},
        "accuracy": {"mean": 0.0, "standard_error": None},
    }
    first = write_scores(tmp_path / "a", {"math": math})
    code = {"pass@1": {"mean": 0.75, "standard_error": 0.125}}
    second = write_scores(tmp_path / "b", {"code": code, "math": code})
    figures = build_variants(first, second)
    bars = {
        name: [
            (t["name"], t["x"], t["y"], t["error_y"]["array"], t["marker"]["color"])
            for t in variant.data
        ]
        for name, [variant] in figures.items()
    }
    assert bars == {
        "set-math": [
            ("a", ["pass@1", "accuracy"], [0.5, 0.0], [0.25, None], "#0072B2"),
            ("b", ["pass@1"], [0.75], [0.125], "#D55E00"),
        ],
        "set-code": [
            ("a", [], [], [], "#0072B2"),
            ("b", ["pass@1"], [0.75], [0.125], "#D55E00"),
        ],
    }
    assert figures["set-math"][0].layout["barmode"] == "group"


# Memory


def write_rl_settings(folder: Path, model: dict[str, Any], num_servers: int = 1, **actor: int):
    """Write a run of one step whose model is beside it; return its folder and its settings."""
    (folder / "model").mkdir(parents=True)
    write_json(folder / "model" / "config.json", model)
    config = RLConfig()
    config.model.path, config.model.dtype = str(folder / "model"), "bfloat16"
    config.rollout.num_servers, config.weight_sync.method = num_servers, "disaggregated"
    for axis, size in actor.items():
        setattr(config.actor.layout, axis, size)
    write_run(folder, "rl", [{"reward": 0.5}])
    write_json(folder / "config.json", asdict(config))
    return folder, config


def test_each_rank_has_one_row_at_its_fullest_moment_with_its_peaks(tmp_path, capsys):
    """Ranks 1 and 2 are equal while log-probs are computed, and differ in the update."""
    model = DENSE | {"num_hidden_layers": 4}
    folder, _ = write_rl_settings(tmp_path / "a", model, num_servers=2, pp=4)
    peaks = {"max_allocated_bytes": [10**9, 4 * 10**9, 2 * 10**9, 3 * 10**9]}
    peaks["max_reserved_bytes"] = [5 * 10**9, 6 * 10**9, 8 * 10**9, 7 * 10**9]
    other = {"max_allocated_bytes": [9 * 10**9] * 4}
    write_json(folder / "summary.json", {"gpu_memory": {"actor": peaks, "critic": other}})
    planned = plan_tensors(folder, capsys, "cuda", "actor")
    [run] = read_runs([folder])
    rows = {row.label: (row.planned_bytes, row.allocated, row.reserved) for row in
            compare_memory(run)}  # fmt: skip
    assert rows == {
        f"actor: update, rank {rank}": (
            planned[rank],
            peaks["max_allocated_bytes"][rank],
            peaks["max_reserved_bytes"][rank],
        )
        for rank in range(4)
    }
    data, layout = build_memory_figure(run)
    bars = [trace for trace in data if trace["type"] == "bar"]
    sums = [sum(bar["x"][rank] for bar in bars) for rank in range(4)]
    assert sums == pytest.approx([planned[rank] / 1e9 for rank in range(4)])
    assert {bar["offsetgroup"] for bar in bars} == {"plan"} and layout["barmode"] == "stack"
    marks = {trace["name"]: trace["x"] for trace in data if trace["type"] == "scatter"}
    assert marks == {
        "recorded, allocated": [1.0, 4.0, 2.0, 3.0],
        "recorded, reserved": [5.0, 6.0, 8.0, 7.0],
    }


def test_equal_ranks_have_one_row_with_the_highest_of_their_peaks(tmp_path, capsys):
    folder, _ = write_rl_settings(tmp_path / "a", DENSE, dp=2)
    peaks = {"max_allocated_bytes": [10**9, 3 * 10**9], "max_reserved_bytes": [5 * 10**9, 10**9]}
    write_json(folder / "summary.json", {"gpu_memory": {"actor": peaks}})
    planned = plan_tensors(folder, capsys, "cuda", "actor")
    [row] = compare_memory(read_runs([folder])[0])
    assert row.label == "actor: update, 2 ranks from 0 on"
    assert (row.allocated, row.reserved) == (3 * 10**9, 5 * 10**9)
    share = 3e9 / planned[0]
    facts = build_data(read_runs([folder]), 0)["runs"][0]
    assert facts["memory of ranks"] == (
        f"3 GB allocated, {share:.0%} of {planned[0] / 1e9:.3g} GB planned ({row.label})"
    )


@pytest.mark.parametrize(
    ("rows", "summary", "fact"),
    [
        ([{"gpu_memory/model/max_allocated_bytes": v} for v in (1e9, 2e9)], {}, "2 GB allocated"),
        (
            [{"gpu_memory/model/max_allocated_bytes": v} for v in (2e9, float("nan"))],
            {},
            "2 GB allocated",
        ),
        (
            [
                {
                    "gpu_memory/actor/max_allocated_bytes": 1e9,
                    "gpu_memory/critic/max_allocated_bytes": 4e9,
                    "gpu_memory/actor/max_reserved_bytes": 8e9,
                }
            ],
            {},
            "4 GB allocated",
        ),
        (
            [{"gpu_memory/model/max_allocated_bytes": 1e9}],
            {"actor": [1e9, 3e9, 2e9], "critic": [2.5e9]},
            "3 GB allocated",
        ),
        ([{"loss": 1.0}], {}, "no recorded peak: torch counts no memory of ranks on a CPU"),
    ],
)
def test_peak_of_a_run_without_a_plan_is_the_highest_of_all_ranks(tmp_path, rows, summary, fact):
    folder = write_run(tmp_path / "a", "sft", rows)
    if summary:
        peaks = {role: {"max_allocated_bytes": sizes} for role, sizes in summary.items()}
        write_json(folder / "summary.json", {"gpu_memory": peaks})
    text = summarize_memory(read_runs([folder])[0])
    assert text.partition("; no plan: ")[0] == fact and "; no plan: " in text


# Traffic


def get_traffic(folder: Path) -> tuple[list[str], list[str], list[list[float]]]:
    """Return training ranks, generation ranks and bytes of the heatmap."""
    [heatmap], _ = build_traffic_figure(read_runs([folder])[0])
    z = [[round(gigabytes * 1e9, 3) for gigabytes in row] for row in heatmap["z"]]
    assert heatmap["zmin"] == 0
    assert heatmap["zmax"] * 1e9 == pytest.approx(max(max(row) for row in z))
    return heatmap["x"], heatmap["y"], z


@pytest.mark.parametrize(("num_servers", "dp"), [(3, 1), (1, 2), (3, 2)])
def test_every_rank_of_every_server_receives_its_shard(tmp_path, num_servers, dp):
    """With tp=2 on both sides: half of what is split, from the rank with the same half."""
    folder, config = write_rl_settings(tmp_path / "a", DENSE, num_servers, tp=2)
    config.rollout.tp, config.rollout.dp = 2, dp
    write_json(folder / "config.json", asdict(config))
    columns, rows, z = get_traffic(folder)
    num_ranks = num_servers * dp * 2
    assert (columns, rows) == (["0", "1"], [*map(str, range(num_ranks))])
    assert [sum(row) for row in z] == [2 * (SPLIT // 2 + REPLICATED)] * num_ranks
    for rank, row in enumerate(z):
        assert row[rank % 2] >= SPLIT and row[1 - rank % 2] <= 2 * REPLICATED
    moved = num_ranks * 2 * (SPLIT // 2 + REPLICATED) / 1e9
    text = summarize_traffic(read_runs([folder])[0])
    assert text == f"{moved:.4g} GB between devices, 0 GB inside of them"


@pytest.mark.parametrize(("ep", "experts"), [(False, 4), (True, 2)])
def test_ranks_of_a_server_share_its_experts_where_it_is_expert_parallel(tmp_path, ep, experts):
    """By hand: as the dense model, with a router 4 * 8 and experts of 3 * 4 * 8 for the MLP."""
    folder, config = write_rl_settings(tmp_path / "a", MOE, num_servers=2)
    config.rollout.dp, config.rollout.ep = 2, ep
    write_json(folder / "config.json", asdict(config))
    layer = 2 * 64 + 2 * 32 + 16 + 4 + 4 * 8 + experts * 3 * 4 * 8
    _, rows, z = get_traffic(folder)
    assert rows == ["0", "1", "2", "3"]
    assert z == [[2 * (2 * 128 * 8 + 8 + 2 * layer)]] * 4


def test_traffic_of_many_ranks_is_summed_over_neighbours(tmp_path):
    """257 servers of one rank, 86 rows: three ranks each, and the last of two."""
    folder, _ = write_rl_settings(tmp_path / "a", DENSE, num_servers=257)
    columns, rows, z = get_traffic(folder)
    size = 2 * (SPLIT + REPLICATED)
    assert (columns, rows) == (["0"], [*map(str, range(0, 257, 3))])
    assert z == [[3 * size]] * 85 + [[2 * size]]


# Facts


def test_facts_of_a_run_are_those_of_its_files(tmp_path):
    folder = write_run(tmp_path / "a", "sft", [{"loss": 2.0}, {"loss": 1.0}])
    settings = json.loads((folder / "config.json").read_text())
    settings["trainer"]["num_steps"], settings["model"]["path"] = 40, "/models/m"
    write_json(folder / "config.json", settings)
    [facts] = build_data(read_runs([folder]), 0)["runs"]
    assert facts.pop("memory of ranks").startswith("no recorded peak: ")
    assert facts == {
        "run": "a",
        "command": "sft",
        "folder": str(folder),
        "model": "/models/m",
        "state": "going on, or stopped",
        "step": "2 of 40",
    }
    (folder / "profiles" / "step_000001").mkdir(parents=True)
    (folder / "profiles" / "step_000001" / "model-0.json.gz").touch()
    after = {
        "x": {"loss": 0.5, "loss_stderr": 0.015625, "accuracy": 0.75, "accuracy_stderr": 0.0625},
        "y": {"reward": 0.123456, "tokens": 3.0},
        "z": {"tokens": 3.0},
    }
    summary = {
        "evaluation": {"before": {"x": {"loss": 2.5, "loss_stderr": 0.125}}, "after": after},
        "wall_s": 3599.6,
        "peak_memory_bytes": 2_341_000_000,
        "max_logprob_gap": 0.00123456,
        "versions": {"torch": "2.9", "vllm": "0.20", "python": "3.12"},
    }
    write_json(folder / "summary.json", summary)
    [facts] = build_data(read_runs([folder]), 0)["runs"]
    shown = {name: facts[name] for name in [*facts][4:]}
    assert shown.pop("memory of ranks").startswith("no recorded peak: ")
    assert shown == {
        "state": "finished",
        "step": "2 of 40",
        "loss of x before": "2.5 ± 0.12",
        "accuracy of x after": "0.75 ± 0.062",
        "reward of y after": "0.1235",
        "duration": "3,600 s",
        "peak memory": "2.34 GB",
        "largest log-prob gap": "0.00123 nats",
        "profiles": "profiles/step_000001/model-0.json.gz",
        "torch": "2.9",
        "vllm": "0.20",
    }


def test_step_of_a_run_is_that_of_training(tmp_path):
    write_steps(tmp_path, {9: {"loss": 1.0}}, "warm_start")
    [facts] = build_data(read_runs([tmp_path]), 0)["runs"]
    assert facts["step"].startswith("0 of ") and facts["model"] == "made by the task"


# Prometheus


def read_gauges(folder: Path) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels.get(k, "") for k in ("run", "phase", "metric"))): sample.value
        for family in text_string_to_metric_families(format_latest([folder]).decode())
        for sample in family.samples
    }


def test_prometheus_has_the_last_value_of_each_metric_and_the_last_step_of_each_phase(tmp_path):
    rows = {
        3: {"loss": 4.0, "eval/t/loss": 2.0, "eval/t/loss_stderr": 0.5, "lr": 0.25},
        4: {"loss": 0.0, "lr": float("nan")},
        5: {},
    }
    folder = tmp_path / "a"
    write_steps(folder, rows, "training")
    with (folder / "metrics.jsonl").open("a") as file:
        row = {"phase": "warm_start", "step": 7, "wall_time_s": 0.0, "warm_start/loss": 8.0}
        file.write(json.dumps(row) + "\n")
    assert read_gauges(folder) == {
        ("mcore_rl", "a", "training", "loss"): 0.0,
        ("mcore_rl", "a", "training", "eval/t/loss"): 2.0,
        ("mcore_rl_step", "a", "training", ""): 5.0,
        ("mcore_rl", "a", "warm_start", "loss"): 8.0,
        ("mcore_rl_step", "a", "warm_start", ""): 7.0,
    }
