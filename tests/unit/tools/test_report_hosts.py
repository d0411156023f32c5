"""Report of a run whose four ranks are on two hosts, and of the doctor's two nodes, by hand.

Host a has ranks 0 and 1, host b ranks 2 and 3; each has a server.
"""

from __future__ import annotations

import io
import json
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mcore_rl.config.schema import ProfileConfig
from mcore_rl.jobs.output import write_json
from mcore_rl.observability import timeline
from mcore_rl.observability.metrics import MetricsLogger
from mcore_rl.observability.timeline import Timeline, TimelineWriter, build_trace
from mcore_rl.observability.trackers import TrackedRun
from mcore_rl.tools.doctor.report import (
    Bandwidth,
    Finding,
    NodeReport,
    Report,
    compare_clocks,
    print_report,
)
from mcore_rl.tools.report.figures import FigureBuilder
from mcore_rl.tools.report.memory import compare_memory
from mcore_rl.tools.report.page import build_data
from mcore_rl.tools.report.runs import Run, read_runs
from mcore_rl.trainers.step_recorder import StepRecorder
from tests.fakes import LocalGroup
from tests.unit.tools.test_plan_reshard import DENSE
from tests.unit.tools.test_report_figures import write_rl_settings

GB = 10**9
# By rank, after the first step and after the second.
ALLOCATED = [2, 1, 4, 3], [2, 5, 4, 6]
RESERVED = [7, 5, 6, 4], [7, 5, 8, 9]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a run of two steps whose ranks are the four stages of a pipeline."""
    model = DENSE | {"num_hidden_layers": 4, "vocab_size": 4096}
    folder, _ = write_rl_settings(tmp_path / "a", model, 2, pp=4)
    peaks: list[dict[str, int]] = []
    ranks: Any = LocalGroup()
    ranks.get_peak_memory, ranks.get_expert_load = lambda: peaks, dict
    summary: dict[str, Any] = {}
    recorder = StepRecorder(
        {"actor": ranks},
        ProfileConfig(),
        folder,
        2,
        lambda load: None,
        summary,
    )
    with MetricsLogger(TrackedRun(folder, "", {}), trackers=()) as logger:
        for step, (allocated, reserved) in enumerate(zip(ALLOCATED, RESERVED, strict=True), 2):
            peaks = [
                {"max_allocated_bytes": a * GB, "max_reserved_bytes": r * GB}
                for a, r in zip(allocated, reserved, strict=True)
            ]
            logger.write(step, recorder.finish(step))
    write_json(folder / "summary.json", summary)
    return folder


def read_run(folder: Path) -> Run:
    [run] = read_runs([folder])
    return run


def test_metrics_are_of_the_fullest_rank_of_both_hosts(folder):
    """The fullest rank is on host b or on host a: 4 and 7 GB, then 6 and 9 GB."""
    [variant] = {f.id: f for f in FigureBuilder([read_run(folder)]).build()}[
        "training-gpu_memory"
    ].variants
    assert {trace["name"]: trace["y"] for trace in variant.data} == {
        "gpu_memory/actor/max_allocated_bytes": [4, 6],  # in GB
        "gpu_memory/actor/max_reserved_bytes": [7, 9],
    }


def test_ranks_of_the_second_host_have_rows_with_their_own_peaks(folder):
    rows = compare_memory(read_run(folder))
    assert [(row.label, row.allocated, row.reserved) for row in rows] == [
        (f"actor: update, rank {rank}", ALLOCATED[1][rank] * GB, RESERVED[1][rank] * GB)
        for rank in range(4)
    ]
    # The last stage, on host b, has the most by plan: logits of a vocabulary of 4096.
    fact = build_data([read_run(folder)], 0)["runs"][0]["memory of ranks"]
    assert fact.startswith("6 GB allocated, ") and fact.endswith("(actor: update, rank 3)")
    (folder / "summary.json").unlink()  # the run goes on
    rows = compare_memory(read_run(folder))
    assert [(row.allocated, row.reserved) for row in rows] == [(6 * GB, 9 * GB)] * 4


def test_timeline_has_the_call_until_the_last_host_and_a_row_for_each_server(folder, monkeypatch):
    """Host a answers at 11 s and host b at 13 s: the update takes 3 s, for both hosts alike."""
    clock = SimpleNamespace(time_s=10.0)
    monkeypatch.setattr(timeline, "time", SimpleNamespace(time=lambda: clock.time_s))
    recorded, replies = Timeline(), [Future[None]() for _ in range(4)]
    recorded.follow("actor", "update", replies)
    recorded.add("server a", "collect", 9.0, 10.5)
    recorded.add("server b", "collect", 9.5, 12.5)
    for clock.time_s, rank in ((11.0, 1), (11.0, 0), (11.5, 3), (13.0, 2)):
        replies[rank].set_result(None)
    taken = recorded.take("training", 1)
    TimelineWriter(folder).write(taken)
    figures = {f.id: f for f in FigureBuilder([read_run(folder)]).build()}
    [variant] = figures["training-timeline"].variants
    bars = {
        (role, trace["name"]): (base, length)
        for trace in variant.data
        for role, base, length in zip(trace["y"], trace["base"], trace["x"], strict=True)
    }
    assert bars == {
        ("actor", "update"): (1.0, 3.0),
        ("server a", "collect"): (0.0, 1.5),
        ("server b", "collect"): (0.5, 3.0),
    }
    order = variant.layout["yaxis"]["categoryarray"]
    assert order == ["server b", "server a", "actor"]
    trace = build_trace(read_run(folder).timeline)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert {
        names[event["pid"]]: (event["tid"], event["ts"], event["dur"])
        for event in trace
        if event["ph"] == "X"
    } == {
        "actor": (0, 1_000_000, 3_000_000),
        "server a": (0, 0, 1_500_000),
        "server b": (0, 500_000, 3_000_000),
    }


# The doctor


def print_lines(report: Report, *, quiet: bool = False) -> list[str]:
    """Return the printed lines without borders, their cells joined by a bar."""
    text = io.StringIO()
    print_report(report, quiet=quiet, console=Console(file=text, width=200))
    lines = (line.strip("│┃ \n") for line in text.getvalue().splitlines())
    cells = ([" ".join(c.split()) for c in line.replace("┃", "│").split("│")] for line in lines)
    return ["|".join(row) for row in cells if not row[0].startswith(("┏", "┡", "└"))]


def build_report() -> Report:
    findings = [
        Finding("memory", "a", "ok", "512 GB"),
        Finding("memory", "b", "ok", "256 GB"),
        Finding("CPUs", "a", "ok", "64"),
        Finding("CPUs", "b", "fail", "2", "8", "ask for more"),
        Finding("ports", "a", "ok", "free"),
        Finding("ports", "b", "ok", "free"),
        Finding("disk", "a", "warn", "1 GB", "2 GB"),
        Finding("disk", "b", "ok", "9 GB"),
    ]
    inside = [("a:0", "a:1", 400e9), ("b:0", "b:1", 100e9)]
    between = [("a:0", "b:0", 50e9), ("a:1", "b:1", 30e9)]
    return Report(["a", "b"], findings, Bandwidth(4, "nccl", 90e9, inside, between), 1.5)


def test_table_has_the_values_of_both_nodes():
    """Medians: (400 + 100) / 2 = 250 inside a node, (50 + 30) / 2 = 40 between them."""
    faults = [
        "FAIL b: CPUs: 2; wanted: 8. To do: ask for more",
        "WARN a: disk: 1 GB; wanted: 2 GB",
        "2 nodes: 1 failed, 1 warnings, 1.5 s",
    ]
    report = build_report()
    assert print_lines(report) == [
        "check|nodes|found",
        "ok|memory|all|512 GB; 256 GB",
        "ok|CPUs|a|64",
        "fail|CPUs|b|2",
        "ok|ports|all|free",
        "ok|disk|b|9 GB",
        "warn|disk|a|1 GB",
        "all-reduce of 4 ranks over nccl: 90 GB/s (of the bus)",
        "2 pairs inside a node: median 250 GB/s, slowest 100 GB/s in each direction",
        "2 pairs between nodes: median 40 GB/s, slowest 30 GB/s in each direction",
        *faults,
    ]
    assert print_lines(report, quiet=True) == faults
    assert report.list_unfit_nodes() == {"b": "b: CPUs: 2"}
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["status"] == "fail" and plain["nodes"] == ["a", "b"]
    assert [f["node"] for f in plain["findings"]] == ["a", "b"] * 4


def test_clocks_of_two_nodes_are_compared_with_the_middle_one():
    """Behind the coordinator by 0.25 s (a) and by 3 s (b): a is the middle one of the three."""
    nodes = [NodeReport("a", clock_s=0.25), NodeReport("b", clock_s=3.0, clock_bound_s=0.5)]
    parsed = [NodeReport.parse(json.loads(json.dumps(asdict(node)))) for node in nodes]
    first, second = compare_clocks(parsed, 1.0)
    assert (first.node, first.status, first.value) == ("a", "ok", "within 0.000 s of a")
    assert (second.node, second.status) == ("b", "fail")
    assert second.value == "2.750 s behind a (give or take 0.500 s)"
