"""Reports read the files of runs, and Plotly's own validators accept their figures."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from mcore_rl.cli import plan, report
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.sample_tables import get_table_path
from mcore_rl.jobs.output import write_json
from mcore_rl.models.base import get_user_family
from mcore_rl.observability.expert_load import EXPERT_LOAD_FILE, MAX_STEPS, is_load_due
from mcore_rl.observability.timeline import (
    StepTimeline,
    TimeSpan,
    build_trace,
)
from mcore_rl.tools.report import page
from mcore_rl.tools.report.figures import MAX_POINTS, FigureBuilder, thin
from mcore_rl.tools.report.memory import compare_memory
from mcore_rl.tools.report.page import build_data, build_page
from mcore_rl.tools.report.runs import NoPlanError, Point, read_runs
from mcore_rl.tools.report.samples import collect_samples
from mcore_rl.tools.report.server import build_live_app, format_latest
from tests.pages import select_commands
from tests.unit.tools.report_runs import (
    PLANTED,
    build_rl_metrics,
    write_eval_run,
    write_rl_run,
    write_run,
    write_samples,
)
from tests.unit.tools.test_plan_reshard import DENSE, REPLICATED, SPLIT

RL_FIGURES = [
    "reward", "accuracy", "loss", "parts", "kl", "entropy", "clipped", "lengths", "truncated",
    "gap", "staleness", "groups", "speed", "gradient", "rate", "experts", "sync", "idle", "memory",
    "time", "timeline", "loads", "other", "expert_load",
]  # fmt: skip


def build_figures(*folders: Path) -> dict[str, list[go.Figure]]:
    """Return the variants of each figure, as Plotly reads them."""
    return {
        figure.id: [go.Figure(v.data, v.layout) for v in figure.variants]
        for figure in FigureBuilder(read_runs(folders)).build()
    }


def unpack_data(text: str) -> dict:
    match = re.search(r'id="data">([^<]*)<', text)
    assert match is not None
    return json.loads(gzip.decompress(base64.b64decode(match[1])))


def test_rl_run_has_every_figure(tmp_path):
    figures = build_figures(write_rl_run(tmp_path / "a"))
    assert list(figures) == [f"training-{name}" for name in RL_FIGURES]


def test_line_has_steps_values_and_standard_errors(tmp_path):
    figures = build_figures(write_rl_run(tmp_path / "a", num_steps=4))
    [reward] = figures["training-reward"][0].data
    assert list(reward.x) == [1, 2, 3, 4]
    assert reward.y == pytest.approx([0.4, 0.5, 0.6, 0.7])
    [accuracy] = figures["training-accuracy"][0].data
    assert (list(accuracy.x), list(accuracy.y)) == ([2, 4], [0.5, 0.5])
    assert list(accuracy.error_y.array) == [0.125, 0.125]


def test_traffic_of_a_push_is_that_counted_by_hand(tmp_path):
    """Two training ranks with tp=2 and two servers of one rank, which need the whole model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(DENSE))
    config = RLConfig()
    config.model.path, config.model.dtype = str(tmp_path / "model"), "bfloat16"
    config.actor.layout.tp, config.rollout.num_servers = 2, 2
    config.weight_sync.method = "disaggregated"
    folder = write_rl_run(tmp_path / "a", **asdict(config))
    [figure] = build_figures(folder)["training-traffic"]
    [heatmap] = figure.data
    actual = sum(sum(row) for row in heatmap.z)
    assert len(heatmap.z) == 2 and len(heatmap.z[0]) == 2
    assert actual == pytest.approx(2 * 2 * (SPLIT + REPLICATED) / 1e9)
    facts = build_data(read_runs([folder]), 0)["runs"][0]
    moved = f"{2 * 2 * (SPLIT + REPLICATED) / 1e9:.4g} GB between devices, 0 GB inside of them"
    assert facts["weights of a push"] == moved


def test_push_is_not_planned_without_the_model(tmp_path):
    config = asdict(RLConfig())
    config["model"]["dtype"] = "float32"
    folder = write_rl_run(tmp_path / "b", model=config["model"])
    assert "training-traffic" not in build_figures(folder)
    facts = build_data(read_runs([folder]), 0)["runs"][0]
    assert facts["weights of a push"].startswith("no plan: RUN=")


def test_runs_side_by_side_are_planned_with_their_own_families(tmp_path):
    """FSDP2 builds any architecture of transformers; the second run's engine, those that it has."""
    model = DENSE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(model))
    folders = []
    for backend in ("fsdp", "megatron"):
        config = RLConfig()
        config.model.path, config.model.dtype = str(tmp_path), "bfloat16"
        config.actor.backend = backend
        folders.append(write_rl_run(tmp_path / backend, **asdict(config)))
    first, second = build_data(read_runs(folders), 0)["runs"]
    assert " planned (actor: update" in first["memory of ranks"]
    for fact in ("memory of ranks", "weights of a push"):
        assert "architectures=['MistralForCausalLM'] is not supported" in second[fact]
    assert get_user_family() == ""


def write_planned_run(folder: Path) -> Path:
    """Write a run of a dense model on two pipeline stages, whose vocabulary is on both."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(DENSE))
    config = RLConfig()
    config.model.path, config.model.dtype = str(folder / "model"), "bfloat16"
    config.actor.layout.pp, config.rollout.num_servers = 2, 2
    return write_rl_run(folder / "a", **asdict(config))


def plan_tensors(
    folder: Path, capsys: pytest.CaptureFixture[str], device_type: str, role: str, *options: str
) -> dict[int, int]:
    """Return the bytes of tensors of each rank of a role, by `mcore-rl plan memory`."""
    command = [
        "memory",
        f"recipe={folder / 'config.json'}",
        f"--device-type={device_type}",
        "--json",
        *options,
    ]
    assert plan.main(command) == 0
    most: dict[int, int] = {}
    for moment in json.loads(capsys.readouterr().out)["moments"]:
        outside = sum(moment["kinds"].get(k, 0) for k in ("CUDA contexts", "NCCL", "CUDA graphs"))
        for rank in moment["ranks"] if moment["name"].startswith(f"{role}: ") else ():
            most[rank] = max(most.get(rank, 0), moment["total"] - outside)
    return most


@pytest.mark.job
def test_peaks_of_ranks_are_beside_their_plan(tmp_path, capsys):
    folder = write_planned_run(tmp_path)
    peaks = {
        "max_allocated_bytes": [10**9, 3 * 10**9],
        "max_reserved_bytes": [2 * 10**9, 4 * 10**9],
    }
    summary = json.loads((folder / "summary.json").read_text())
    write_json(folder / "summary.json", summary | {"gpu_memory": {"actor": peaks}})
    planned = plan_tensors(folder, capsys, "cuda", "actor")
    [run] = read_runs([folder])
    rows = {row.label: row for row in compare_memory(run)}
    assert list(rows) == ["actor: update, rank 0", "actor: update, rank 1"]
    for rank, row in enumerate(rows.values()):
        assert row.planned_bytes == planned[rank]
        assert row.allocated == peaks["max_allocated_bytes"][rank]
        assert row.reserved == peaks["max_reserved_bytes"][rank]
    worst = max(planned, key=lambda rank: planned[rank])
    share = peaks["max_allocated_bytes"][worst] / planned[worst]
    facts = build_data([run], 0)["runs"][0]
    assert facts["memory of ranks"] == (
        f"{1 + 2 * worst} GB allocated, {share:.0%} of {planned[worst] / 1e9:.3g} GB planned "
        f"(actor: update, rank {worst})"
    )
    [figure] = build_figures(folder)["training-plan"]
    marks = {trace.name: list(trace.x) for trace in figure.data if trace.type == "scatter"}
    assert marks == {"recorded, allocated": [1.0, 3.0], "recorded, reserved": [2.0, 4.0]}
    sums = [sum(bar.x[n] for bar in figure.data if bar.type == "bar") for n in (0, 1)]
    assert sums == pytest.approx([planned[0] / 1e9, planned[1] / 1e9])


def test_highest_peak_is_shown_until_a_run_has_ended(tmp_path):
    folder = write_planned_run(tmp_path)
    row = {"phase": "training", "step": 4, "gpu_memory/actor/max_allocated_bytes": 5 * 10**8}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    rows = compare_memory(read_runs([folder])[0])
    assert [(row.allocated, row.reserved) for row in rows] == [(5 * 10**8, None)] * 2


def test_run_on_cpus_has_a_plan_and_says_that_no_peak_is_recorded(tmp_path, capsys):
    folder = write_planned_run(tmp_path)
    planned = plan_tensors(folder, capsys, "cpu", "actor")
    facts = build_data(read_runs([folder]), 0)["runs"][0]
    assert facts["memory of ranks"].startswith("no recorded peak: torch counts no memory of ranks")
    assert f"{max(planned.values()) / 1e9:.3g} GB planned" in facts["memory of ranks"]
    [figure] = build_figures(folder)["training-plan"]
    assert {trace.type for trace in figure.data} == {"bar"}


def test_run_of_sft_has_the_plan_of_its_command(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(DENSE))
    folder = write_run(tmp_path / "a", "sft", [{"loss": 1.0}])
    settings = json.loads((folder / "config.json").read_text())
    settings["model"] |= {"path": str(tmp_path / "model"), "dtype": "bfloat16"}
    settings["engine"]["layout"]["pp"] = 2
    write_json(folder / "config.json", settings)
    memory = {"gpu_memory": {"model": {"max_allocated_bytes": [10**9, 2 * 10**9]}}}
    write_json(folder / "summary.json", memory)
    planned = plan_tensors(folder, capsys, "cuda", "model", "--job=sft")
    rows = {row.label: row for row in compare_memory(read_runs([folder])[0])}
    assert list(rows) == ["model: update, rank 0", "model: update, rank 1"]
    for rank, row in enumerate(rows.values()):
        assert (row.planned_bytes, row.allocated) == (planned[rank], (1 + rank) * 10**9)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model.family", "{code}:Family", "is not imported for recorded settings"),
        ("actor.backend", "{code}:BACKEND", "is not imported for recorded settings"),
        ("trainer.mode", "{code}:Loop", "is not imported for recorded settings"),
        ("model.path", "hf:org/model", "is not on this machine; allowed: a local path"),
        ("data.train_file", "https://host.invalid/a.jsonl", "is not on this machine"),
        ("model.dtype", "${oc.env:REPORT_SECRET}", "allowed: 'float32', 'bfloat16', 'auto'"),
        ("model.dtype", "\\${oc.env:REPORT_SECRET}", "allowed: 'float32', 'bfloat16', 'auto'"),
    ],
)
def test_settings_of_a_run_run_no_code_fetch_nothing_and_read_no_variable(
    tmp_path, monkeypatch, setting, value, message
):
    monkeypatch.setenv("REPORT_SECRET", "planted")
    folder, code = write_planned_run(tmp_path), tmp_path / "code.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = json.loads((folder / "config.json").read_text())
    group, name = setting.split(".")
    settings[group][name] = value.replace("{code}", str(code))
    write_json(folder / "config.json", settings)
    data = build_data(read_runs([folder]), 0)
    assert "no plan: " in data["runs"][0]["memory of ranks"]
    assert message in data["runs"][0]["memory of ranks"]
    assert "planted" not in json.dumps(data["runs"]) and not (tmp_path / "ran").exists()


def test_plan_follows_settings_that_have_changed(tmp_path):
    folder = write_planned_run(tmp_path)
    before = compare_memory(read_runs([folder])[0])
    settings = json.loads((folder / "config.json").read_text())
    settings["model"]["dtype"] = "float32"
    write_json(folder / "config.json", settings)
    after = compare_memory(read_runs([folder])[0])
    assert max(row.planned_bytes for row in after) > max(row.planned_bytes for row in before)


def test_evaluation_says_that_it_has_no_plan(tmp_path):
    [run] = read_runs([write_eval_run(tmp_path / "a")])
    with pytest.raises(NoPlanError, match="plans runs of rl, sft, dpo, rm alone"):
        compare_memory(run)


def test_no_metric_is_left_out(tmp_path):
    run = write_rl_run(tmp_path / "a")
    shown = {
        trace.name
        for figure in FigureBuilder(read_runs([run])).build()
        if figure.id not in ("training-time", "training-timeline", "training-loads")
        and figure.id != "training-expert_load"
        for variant in figure.variants
        for trace in go.Figure(variant.data).data
    }
    expected = {
        html.escape(name)
        for name in build_rl_metrics(2)
        if not name.endswith("_stderr") and not re.search(r"^time/(generate|update)|layer_", name)
    }
    assert shown == expected


def test_runs_side_by_side_have_one_colour_each(tmp_path):
    runs = [write_rl_run(tmp_path / "a"), write_rl_run(tmp_path / "b")]
    traces = build_figures(*runs)["training-gap"][0].data
    assert [trace.name for trace in traces] == [
        "a: max_logprob_gap", "a: mean_logprob_gap", "b: max_logprob_gap", "b: mean_logprob_gap",
    ]  # fmt: skip
    colors = [trace.line.color for trace in traces]
    assert colors[0] == colors[1] != colors[2] == colors[3]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"text"', "[1]", "null"])
def test_value_that_is_no_finite_number_is_a_hole(tmp_path, value):
    folder = write_run(tmp_path / "a", "sft", [{"loss": 1.0}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"phase": "training", "step": 2, "wall_time_s": 0.0, "loss": {value}}}\n')
    [loss] = unpack_data(build_page(read_runs([folder]), 0))["figures"][0]["variants"][0]["data"]
    assert loss["y"] == [1.0, None]
    assert b'metric="loss"' not in format_latest([folder])


def test_run_of_an_older_version_has_a_page(tmp_path):
    """Such runs lack timeline.jsonl, standard errors and some settings."""
    folder = write_rl_run(tmp_path / "a", num_steps=1)
    (folder / "timeline.jsonl").unlink()
    settings = json.loads((folder / "config.json").read_text())
    del settings["weight_sync"], settings["rollout"]["ep"]
    (folder / "config.json").write_text(json.dumps(settings))
    scores = {"before": {"a": {"accuracy": 0.25}, "b": {"score": 1.0}}}
    (folder / "summary.json").write_text(json.dumps({"evaluation": scores}))
    data = unpack_data(build_page(read_runs([folder]), 2))
    assert "training-timeline" not in [figure["id"] for figure in data["figures"]]
    [facts] = data["runs"]
    assert facts["accuracy of a before"] == "0.25"
    assert facts["weights of a push"] == (
        "no plan: config.json is of another version: no weight_sync.method, rollout.ep"
    )


@pytest.mark.parametrize("evaluation", ["", "test"])
def test_table_of_an_older_version_is_shown_with_its_columns(tmp_path, evaluation):
    """Tables had no trajectories, and texts instead of tokens."""
    folder = write_rl_run(tmp_path / "a", num_steps=2)
    columns = {
        "group": [7], "prompt": ["2+2?"], "response": [PLANTED], "reward": [0.5],
        "finish_reason": ["stop"], "num_tokens": [9], "reward_error": [""],
    }  # fmt: skip
    path = get_table_path(folder, 1, evaluation)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    samples, notes = collect_samples(read_runs([folder])[0], 10)
    assert notes == [
        f"{path.parent.name}/{path.name}: of another version, without the columns trajectory, "
        "segment, num_turns, status, replayed; shown is the rest"
    ]
    [sample] = [s for s in samples if s["source"] == f"{evaluation or 'training'}, step 1"][-1:]
    assert (sample["reward"], sample["tokens"]) == (0.5, 9)
    assert dict(sample["facts"])["group"] == "7"
    texts = [message["spans"][0]["text"] for message in sample["segments"][0]]
    assert texts == ["2+2?", PLANTED]
    assert len([s for s in samples if s["source"] == "training, step 2"]) == 2


def test_set_of_an_older_evaluation_is_shown_with_its_columns(tmp_path):
    folder = write_eval_run(tmp_path / "a")
    pq.write_table(pa.table({"response": ["4", "5"]}), folder / "samples" / "math.parquet")
    samples, notes = collect_samples(read_runs([folder])[0], 10)
    assert notes == [
        "samples/math.parquet: of another version, without the columns row, number, prompt, "
        "reward, response_tokens; shown is the rest"
    ]
    assert [sample["label"] for sample in samples] == ["math, row 0", "math, row 1"]
    assert [sample["segments"][0][0]["spans"][0]["text"] for sample in samples] == ["4", "5"]


def test_value_that_is_not_finite_is_a_hole(tmp_path):
    rows = [{"loss": 1.0}, {"loss": float("nan")}, {"loss": 0.5}]
    [loss] = build_figures(write_run(tmp_path / "a", "sft", rows))["training-loss"][0].data
    assert list(loss.y) == [1.0, None, 0.5]


def test_timeline_has_a_bar_for_each_span(tmp_path):
    variants = build_figures(write_rl_run(tmp_path / "a"))["training-timeline"]
    assert len(variants) == 3
    bars = {
        (role, trace.name): (base, base + length)
        for trace in variants[0].data
        for role, base, length in zip(trace.y, trace.base, trace.x, strict=True)
    }
    assert bars == {
        ("driver", "generate"): (0.0, 2.0),
        ("rollout", "collect"): (0.0, 1.75),
        ("driver", "update"): (2.0, 3.0),
        ("actor", "update"): (2.125, 3.0),
    }


def test_load_heatmap_has_a_row_for_each_layer(tmp_path):
    [figure] = build_figures(write_rl_run(tmp_path / "a"))["training-loads"]
    [heatmap] = figure.data
    assert list(heatmap.y) == ["0", "1"]
    assert [list(row) for row in heatmap.z] == [[1.2] * 3, [1.5] * 3]


def test_expert_heatmap_has_loads_over_the_mean_and_the_balance_of_a_step(tmp_path):
    """By hand: 8 tokens of layer 0 on 4 experts, whose mean is 2; layer 2 is even."""
    folder = write_rl_run(tmp_path / "a")
    [figure] = [
        f for f in FigureBuilder(read_runs([folder])).build() if f.id == "training-expert_load"
    ]
    # Layer 0 has loads 1.5, 0.5, 0 and 2, of variance (0.25 + 0.25 + 1 + 1) / 4 = 0.625.
    balance = f"largest 2 (layer 0, expert 3)<br>variation {math.sqrt(0.625) / 2:.3g}"
    assert [v.label for v in figure.variants] == [f"actor, step {step}" for step in (3, 2, 1)]
    drawn = go.Figure(figure.variants[0].data, figure.variants[0].layout)
    assert drawn.layout.xaxis.title.text == f"expert<br>{balance}"
    [heatmap] = drawn.data
    assert (list(heatmap.y), list(heatmap.x)) == (["0", "2"], ["0", "1", "2", "3"])
    assert [list(row) for row in heatmap.z] == [[1.5, 0.5, 0.0, 2.0], [1.0] * 4]


def test_expert_load_is_recorded_at_most_so_often():
    for num_steps in (1, 7, 50, 51, 1000, 1999):
        due = [step for step in range(1, num_steps + 1) if is_load_due(step, num_steps)]
        assert len(due) <= MAX_STEPS + 1 and due[-1] == num_steps
    assert [step for step in range(1, 8) if is_load_due(step, 7)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "row",
    [
        '{"step": 1, "role": "actor", "layers": [0], "tokens": [[1], [2]]}',
        '{"step": 1, "role": "actor", "layers": [0, 1], "tokens": [[1, 2], [3]]}',
        '{"step": 1, "role": "actor", "layers": [], "tokens": []}',
        '{"step": 1, "layers": [0], "tokens": [["many"]]}',
        '{"step": 1, "role": "actor", "layers": [0], "tokens": [[]]}',
        '{"step": 1, "role": "actor", "layers": [0], "tokens": [[Infinity, 1]]}',
        '{"step": 1, "role": "actor", "layers": [0], "tokens": [[1e308, 1e308]]}',
        '{"step": 1, "role": "actor", "layers": [0], "tokens": [[-1, 1]]}',
    ],
)
def test_malformed_row_of_loads_is_named(tmp_path, row):
    file = write_rl_run(tmp_path / "a") / EXPERT_LOAD_FILE
    file.write_text(file.read_text() + row + "\n" + '{"step": 5')
    with pytest.raises(ConfigError, match=r"expert_load.jsonl, row 3: no step, role, layers"):
        read_runs([file.parent])


def test_peaks_stay_when_a_line_is_thinned():
    points = [Point(step, 0.0) for step in range(1, 50_001)]
    points[31_234] = Point(31_235, 9.0)
    points[40_000] = Point(40_001, -9.0)
    thinned = thin(points)
    assert len(thinned) <= MAX_POINTS
    assert {Point(31_235, 9.0), Point(40_001, -9.0)} <= set(thinned)
    assert [p.step for p in thinned] == sorted(p.step for p in thinned)


@pytest.mark.parametrize(
    ("kind", "metrics", "expected"),
    [
        ("sft", {"loss": 1.0, "lr": 1e-4, "grad_norm": 1.0}, ["loss", "gradient", "rate"]),
        ("dpo", {"loss": 0.7, "accuracy": 0.5, "margin": 0.1}, ["accuracy", "loss", "preferences"]),
        (
            "rm",
            {"loss": 0.7, "accuracy": 0.5, "eval/test/reward_chosen": 0.1},
            ["accuracy", "loss", "preferences"],
        ),
    ],
)
def test_supervised_run_has_its_figures(tmp_path, kind, metrics, expected):
    folder = write_run(tmp_path / "a", kind, [metrics])
    assert list(build_figures(folder)) == [f"training-{name}" for name in expected]
    assert read_runs([folder])[0].kind == kind


@pytest.mark.parametrize("kind", ["sft", "dpo", "rm"])
def test_supervised_run_says_that_it_writes_no_samples(tmp_path, kind):
    folder = write_run(tmp_path / "a", kind, [{"loss": 1.0}])
    note = f"mcore-rl {kind} writes no samples: it trains on those of its data."
    assert collect_samples(read_runs([folder])[0], 10) == ([], [note])


def test_constant_line_is_drawn_from_zero_on(tmp_path):
    """Plotly would draw a learning rate of 1e-4 from -1 to 1."""
    rows = [{"lr": 1e-4, "loss": 1.0}, {"lr": 1e-4, "loss": 2.0}]
    figures = build_figures(write_run(tmp_path / "a", "sft", rows))
    modes = {name: figure.layout.yaxis.rangemode for name, [figure] in figures.items()}
    assert modes == {"training-loss": None, "training-rate": "tozero"}


def test_evaluation_has_scores_and_texts(tmp_path):
    folder = write_eval_run(tmp_path / "a")
    [bars] = build_figures(folder)["set-math"][0].data
    assert (list(bars.x), list(bars.y), list(bars.error_y.array)) == (["pass@1"], [0.5], [0.25])
    assert collect_samples(read_runs([folder])[0], 0) == ([], [])
    samples, notes = collect_samples(read_runs([folder])[0], 10)
    assert notes == []
    assert [sample["reward"] for sample in samples] == [1.0, 0.0]
    [prompt, response] = samples[1]["segments"][0]
    assert (prompt["spans"][0]["text"], response["spans"][0]["text"]) == ("2+2?", PLANTED)


def test_sample_has_conversation_reward_parts_and_log_probs(tmp_path):
    run = read_runs([write_rl_run(tmp_path / "a")])[0]
    samples, notes = collect_samples(run, 6)
    assert notes == []
    assert [sample["label"] for sample in samples][:2] == [
        "training, step 3, group 0, no. 0", "training, step 3, group 1, no. 0",
    ]  # fmt: skip
    facts = dict(samples[1]["facts"])
    assert (facts["reward"], facts["reward parts"], facts["reference answer"]) == (
        "1", "format 0.5", "4",
    )  # fmt: skip
    user, assistant = samples[0]["segments"][0]
    assert user["role"] == "user" and "2+0?" in user["spans"][0]["text"]
    chosen = [span for span in assistant["spans"] if "tokens" in span]
    assert "".join(span["text"] for span in chosen).startswith(PLANTED)
    [servers, trainer, advantage] = chosen[1]["tokens"][0]
    assert (servers, trainer, advantage, chosen[1]["gap"]) == (-1.0, -1.5, 0.5, 0.5)


def test_settings_that_differ_are_listed(tmp_path):
    runs = [write_rl_run(tmp_path / "a"), write_rl_run(tmp_path / "b", seed=7)]
    assert build_data(read_runs(runs), 0)["settings"] == [["seed", "0", "7"]]


def test_runs_of_one_name_are_distinguished(tmp_path):
    runs = [write_run(tmp_path / x / "run", "sft", [{"loss": 1.0}]) for x in "ab"]
    assert [run.name for run in read_runs(runs)] == ["a/run", "b/run"]


def test_page_has_no_text_of_a_run_as_html(tmp_path):
    text = build_page(read_runs([write_rl_run(tmp_path / "a<b>")]), 6)
    assert "planted" not in text and "<b>" not in text
    assert len(text) < page.MAX_BYTES
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1] and "http" not in policy[1]
    assert not re.search(r'(src|href)="(?!data:|#)', text)


def test_page_has_fewer_samples_when_they_do_not_fit(tmp_path, monkeypatch):
    run = read_runs([write_rl_run(tmp_path / "a", num_steps=8)])
    full = build_page(run, 16)
    monkeypatch.setattr(page, "MAX_BYTES", len(full) - 1)
    smaller = build_page(run, 16)
    num_samples = [len(unpack_data(text)["samples"][0]["samples"]) for text in (full, smaller)]
    assert num_samples == [16, 8]


def test_page_has_fewer_points_when_runs_do_not_fit_without_samples(tmp_path, monkeypatch):
    rows = [{"loss": math.sin(step * step)} for step in range(1, 1001)]
    run = read_runs([write_run(tmp_path / "a", "sft", rows)])
    full = build_page(run, 0)
    monkeypatch.setattr(page, "MAX_BYTES", len(full) - 1)
    smaller = unpack_data(build_page(run, 0))["figures"][0]["variants"][0]["data"][0]
    assert len(unpack_data(full)["figures"][0]["variants"][0]["data"][0]["x"]) == 1000
    assert 250 < len(smaller["x"]) <= 500


def test_trace_is_in_the_trace_event_format():
    spans = [
        TimeSpan("actor", "update", 10.0, 12.0),
        TimeSpan("actor", "inner", 10.5, 11.0),  # nested: on the same track
        TimeSpan("actor", "send_weights", 11.5, 13.0),  # overlaps: on another
        TimeSpan("driver", "update", 9.0, 12.5),
    ]
    trace = build_trace([StepTimeline("training", 4, spans)])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    events = {
        (names[e["pid"]], e["name"], e["tid"]): (e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    }
    assert events == {
        ("driver", "update", 0): (0, 3_500_000),
        ("actor", "update", 0): (1_000_000, 2_000_000),
        ("actor", "inner", 0): (1_500_000, 500_000),
        ("actor", "send_weights", 1): (2_500_000, 1_500_000),
    }


def unpack_page(client: TestClient) -> str:
    return re.sub(r'id="plotly">[^<]*<', "", client.get("/").text).partition("<script>")[0]


def test_live_data_needs_the_token_and_follows_the_run(tmp_path):
    folder = write_rl_run(tmp_path / "a", num_steps=1)
    client = TestClient(build_live_app([folder], 4, "the token"))
    assert client.get("/").status_code == 200 and "reward" not in unpack_page(client)
    for headers in ({}, {"Authorization": "Bearer other"}, {"Cookie": "token=the token"}):
        assert client.get("/data", headers=headers).status_code == 401
    assert client.get("/data?token=the token").status_code == 401
    key = {"Authorization": "Bearer the token"}
    assert client.request("GET", "/data", headers=key, content=b"x").status_code == 413
    first = client.get("/data", headers=key)
    assert first.json()["figures"][0]["variants"][0]["data"][0]["x"] == [1]
    unchanged = key | {"If-None-Match": first.headers["ETag"]}
    assert client.get("/data", headers=unchanged).status_code == 304
    write_samples(folder, 2)
    row = {"phase": "training", "step": 2, "wall_time_s": 0.0, "reward": 0.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    write_rl_run(folder, num_steps=2)
    second = client.get("/data", headers=unchanged)
    assert second.json()["figures"][0]["variants"][0]["data"][0]["x"] == [1, 2]


def test_live_page_reads_no_file_without_the_token(tmp_path, monkeypatch):
    folder = write_rl_run(tmp_path / "a")
    client = TestClient(build_live_app([folder], 4, "the token"))
    (folder / "config.json").write_text("not JSON")
    assert client.get("/data").status_code == 401
    refused = client.get("/data", headers={"Authorization": "Bearer the token"})
    assert refused.status_code == 400 and "config.json" in refused.json()["error"]["message"]


def test_prometheus_reads_the_last_step(tmp_path):
    folder = write_rl_run(tmp_path / "a", num_steps=3)
    client = TestClient(build_live_app([folder], 4, "the token"))
    assert client.get("/metrics").status_code == 401
    text = client.get("/metrics", headers={"Authorization": "Bearer the token"}).text
    values = {
        (sample.name, *(sample.labels.get(name, "") for name in ("run", "phase", "metric"))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["mcore_rl_step", "a", "training", ""] == 3
    assert values["mcore_rl", "a", "training", "reward"] == pytest.approx(0.6)
    assert values["mcore_rl", "a", "training", f"reward/{PLANTED}"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/none"], "RUN="),
        (["{tmp}"], "is not the output folder of a run: no config.json"),
        (["{tmp}/a", "{tmp}/a"], "is given twice"),
        (["{tmp}/a", "--samples", "-1"], "--samples=-1; allowed: at least 0"),
        (["{tmp}/a", "--live", "--output", "x"], "--live and --output exclude each other"),
        (["{tmp}/a", "--port", "80"], "--port is of --live"),
        (["{tmp}/a", "--live", "--port", "65536"], "--port=65536; allowed: 0 to 65535"),
        (["{tmp}/a", "--step", "1"], "--step is of --trace"),
        (["{tmp}/a", "--trace", "x", "--port", "80"], "--trace is of one RUN, without"),
        (["{tmp}/a", "--trace", "x", "--step", "9"], "--step=9: .* allowed: 1, 2, 3"),
        (["{tmp}/a", "--output", "{tmp}/none/x"], "--output=.* cannot be written"),
    ],
)
def test_bad_request_is_refused(tmp_path, arguments, message):
    write_rl_run(tmp_path / "a")
    with pytest.raises(ConfigError, match=message):
        report.main([argument.format(tmp=tmp_path) for argument in arguments])


@pytest.mark.parametrize("line", select_commands("report"), ids=str)
def test_command_of_a_page_runs(tmp_path, monkeypatch, capsys, line):
    write_rl_run(tmp_path / "outputs" / "mine", num_steps=12)
    write_rl_run(tmp_path / "outputs" / "other")
    monkeypatch.chdir(tmp_path)
    arguments = line.text.split()[2:]
    if "--live" in arguments:  # the page in a browser: tests/e2e/test_report.py
        arguments = [argument.replace("--live", "--samples=1") for argument in arguments]
    report.main(arguments)
    assert capsys.readouterr().out


def test_command_writes_page_and_trace(tmp_path, capsys):
    folder = write_rl_run(tmp_path / "a")
    report.main([str(folder)])
    assert unpack_data((folder / "report.html").read_text())["title"] == "a"
    report.main([str(folder), "--trace", str(tmp_path / "t.json"), "--step", "2"])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2}
    assert "report.html: 2.0 MB" in capsys.readouterr().out
