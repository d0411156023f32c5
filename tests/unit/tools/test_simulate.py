"""Simulated runs: hand-worked times, where time goes, failures, and the command of the page."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from queue import Empty

import pyarrow as pa
import pytest

from mcore_rl.cli import main as cli
from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.plan import main
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller import pending_call
from mcore_rl.data.sample_tables import get_table_path, write_table
from mcore_rl.jobs.remote_paths import PUBLISHED_CONFIGS
from mcore_rl.observability.timeline import StepTimeline, TimelineWriter, TimeSpan
from mcore_rl.planner import generation
from mcore_rl.planner.hardware import load_hardware
from mcore_rl.planner.step import predict_step
from mcore_rl.tools.simulate.measure import (
    MeasuredStep,
    build_measured_config,
    fit_times,
    list_events,
    measure_phases,
    read_steps,
)
from mcore_rl.tools.simulate.report import print_runs
from mcore_rl.tools.simulate.run import open_simulation, prepare_config, simulate
from mcore_rl.tools.simulate.times import ResponseLengths, StepTimes, Workload, predict_times
from mcore_rl.tools.simulate.virtual_time import VirtualClock, VirtualExecutor, run_by_clock
from tests.pages import select_commands
from tests.published_runs import read_model

TIMES = StepTimes(
    decode_s=0.01, decode_response_s=0.0, prefill_token_s=0.0, reward_s=0.0,
    log_prob_token_s=0.0, train_token_s=0.001, optimizer_s=2.0, weight_sync_s=7.0,
    server_start_s=30.0, call_s=0.0,
)  # fmt: skip
# 16 responses of 320 tokens, and prompts of 32: every server takes 3.2 s, each of two data-parallel
# ranks trains on 8 * 352 tokens.
LOAD = Workload(TIMES, ResponseLengths(320.0, 0.0), prompt_tokens=32)
SETTINGS = (
    "actor.layout.dp=2", "actor.layout.tp=2", "rollout.num_servers=2", "placement.rollout=own",
    "trainer.num_steps=3", "trainer.prompts_per_step=4", "algorithm.group_size=4",
)  # fmt: skip
SMALL = {
    name: f"{name}={value}"
    for name, value in {
        "actor.layout.dp": 2, "actor.layout.tp": 2, "actor.layout.pp": 2, "rollout.num_servers": 2,
        "trainer.prompts_per_step": 16, "trainer.num_steps": 2,
    }.items()
}  # fmt: skip
ROUNDING_S = 1e-6
GENERATE_S, UPDATE_S, SYNC_S = 3.2, 8 * 352 * 0.001 + 2, 7.0


@pytest.fixture(scope="module", autouse=True)
def session():
    with open_simulation():
        yield


def run_loop(mode, load=LOAD, *settings):
    config = compose_config(RLConfig, [*SETTINGS, f"trainer.mode={mode}", *settings])
    return simulate(prepare_config(config), load)


def test_a_step_of_sync_takes_the_sum_of_its_parts():
    run = run_loop("sync")
    expected = GENERATE_S + UPDATE_S + SYNC_S
    assert [step.end_s - step.start_s for step in run.steps] == pytest.approx(
        [expected] * 3, abs=ROUNDING_S
    )
    summary = run.summarize()
    assert summary["trainer/waits"] == pytest.approx(GENERATE_S / expected, abs=0.001)
    assert summary["servers/idle"] == pytest.approx(UPDATE_S / expected, abs=0.001)
    assert summary["responses_per_server"] == pytest.approx(8 * GENERATE_S / expected, abs=0.01)
    assert summary["max_age"] == 0


def test_one_step_off_hides_the_shorter_of_generation_and_update():
    run = run_loop("one_step_off")
    hidden = max(GENERATE_S, UPDATE_S)
    expected = [GENERATE_S + hidden + SYNC_S, hidden + SYNC_S, UPDATE_S + SYNC_S]
    assert [step.end_s - step.start_s for step in run.steps] == pytest.approx(
        expected, abs=ROUNDING_S
    )
    assert [step.max_age for step in run.steps] == [0, 1, 1]


def test_fully_async_stays_within_its_staleness():
    assert 0 < run_loop("fully_async").summarize()["max_age"] <= 2


@pytest.mark.job
def test_loops_that_overlap_are_faster_by_what_the_page_says():
    """Compare loops on lengths with long tails and an update shorter than the longest response."""
    settings = (
        "rollout.num_servers=4", "actor.layout.dp=4", "actor.layout.tp=1", "trainer.num_steps=6",
        "trainer.prompts_per_step=64", "algorithm.group_size=8", "rollout.max_response_tokens=8192",
    )  # fmt: skip
    load = Workload(StepTimes(), ResponseLengths(1000.0, 0.8))
    sync, ahead, fully = (
        run_loop(mode, load, *settings).summarize()["samples_per_s"]
        for mode in ("sync", "one_step_off", "fully_async")
    )
    by_turns = run_loop("fully_async", load, *settings, "placement.rollout=shared").summarize()
    assert ahead > 1.1 * sync
    assert fully > 1.8 * sync
    assert by_turns["samples_per_s"] > 1.4 * sync


def test_the_metric_of_idle_servers_is_what_they_waited():
    """One step ahead, servers wait for the rest of an update, and in the end for all of it."""
    idle_s = [step.metrics["time/servers_idle_s"] for step in run_loop("one_step_off").steps]
    expected = [UPDATE_S - GENERATE_S, UPDATE_S - GENERATE_S, UPDATE_S]
    assert idle_s == pytest.approx(expected, abs=ROUNDING_S)


def test_the_table_fits_on_a_screen(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    print_runs({mode: run_loop(mode) for mode in ("sync", "one_step_off", "fully_async")})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20 and max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_servers_that_share_devices_sleep_while_the_trainer_updates():
    run = run_loop("sync", LOAD, "placement.rollout=shared")
    assert run.summarize()["servers/sleep"] > 0
    assert run.step_s == pytest.approx(GENERATE_S + UPDATE_S + SYNC_S, abs=ROUNDING_S)


def test_phases_are_in_the_order_of_a_step():
    spans = [kind for *_, kind in run_loop("sync").ledger.spans]
    assert spans == ["update", "weight_sync"] * 3


def test_a_run_repeats_exactly_and_another_seed_differs():
    load = Workload(TIMES, ResponseLengths(320.0, 0.8), prompt_tokens=32)
    first, again = run_loop("fully_async", load), run_loop("fully_async", load)
    other = run_loop("fully_async", Workload(TIMES, ResponseLengths(320.0, 0.8), 32, seed=2))
    assert first.ledger.spans == again.ledger.spans
    assert first.ledger.spans != other.ledger.spans


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_servers_that_die_cost_time_and_tokens_and_the_run_goes_on(mode):
    load = Workload(TIMES, ResponseLengths(320.0, 0.0), 32, server_failures_per_hour=120.0)
    run = run_loop(mode, load, "rollout.max_restarts=50", "trainer.num_steps=12")
    summary = run.summarize()
    assert summary["server_failures"] > 0 and summary["servers/restart"] > 0
    assert run.seconds > run_loop(mode, LOAD, "trainer.num_steps=12").seconds
    assert len(run.steps) == 12


def test_times_fitted_to_steps_of_two_sizes_are_those_that_the_steps_took():
    times = replace(TIMES, decode_response_s=0.0005, log_prob_s=0.25, log_prob_token_s=0.0002)
    steps, config = [], None
    for num_prompts in (4, 8):
        settings = (*SETTINGS, f"trainer.prompts_per_step={num_prompts}", "trainer.mode=sync")
        mini_batches = ("algorithm.num_mini_batches=2", "rollout.max_num_seqs=256")
        config = prepare_config(compose_config(RLConfig, [*settings, *mini_batches]))
        run = simulate(config, replace(LOAD, times=times))
        lengths = [32] * num_prompts * 4, [320] * num_prompts * 4
        steps += [
            MeasuredStep(s.step, measure_phases(s.timeline), *lengths, list_events(s.timeline))
            for s in run.steps
        ]
    fitted = asdict(fit_times(steps, config))
    expected = asdict(replace(times, server_start_s=StepTimes().server_start_s))
    assert fitted == pytest.approx(expected, rel=0.01, abs=1e-6)
    assert {json.dumps(step.events) for step in steps} == {json.dumps(steps[0].events)}


def test_events_are_those_of_the_parts_of_a_step_in_the_order_of_their_starts():
    spans = [
        TimeSpan("actor", "update", 2.0, 3.0), TimeSpan("driver", "update", 1.0, 3.0),
        TimeSpan("actor", "apply", 1.5, 1.6), TimeSpan("driver", "evaluate", 4.0, 6.0),
        TimeSpan("actor", "apply", 5.0, 5.5), TimeSpan("driver", "save", 6.0, 7.0),
    ]  # fmt: skip
    expected = {"actor": ["apply", "update"], "driver": ["update"]}
    assert list_events(StepTimeline("training", 1, spans)) == expected
    # A second call is a span of its own if it does not follow closely.
    repeated = [*spans, TimeSpan("actor", "apply", 2.5, 2.6)]
    assert list_events(StepTimeline("training", 1, repeated)) == expected


def test_steps_of_a_long_run_are_those_whose_spans_are_written(tmp_path):
    """timeline.jsonl has the first hundred steps, then one of ten; all have tables."""
    writer = TimelineWriter(tmp_path)
    for step in range(1, 121):
        span = TimeSpan("driver", "update", step, step + 0.5)
        writer.write(StepTimeline("training", step, [span]))
        columns = {name: pa.array([[7] * step]) for name in ("prompt_ids", "response_ids")}
        write_table(get_table_path(tmp_path, step), columns, 1)
    steps = read_steps(tmp_path)
    assert [step.step for step in steps] == [*range(1, 101), 110, 120]
    assert [step.num_tokens for step in steps[-3:]] == [200, 220, 240]


def test_steps_of_one_size_do_not_give_the_time_of_a_token():
    step = MeasuredStep(1, dict.fromkeys(("generate", "log_probs", "update"), 1.0), [1], [2], {})
    with pytest.raises(ConfigError, match="all steps have 2 tokens; allowed: steps of two sizes"):
        fit_times([step, step], RLConfig())


def test_threads_wait_by_the_clock():
    clock, order = VirtualClock(), []
    with run_by_clock(clock):
        queue = pending_call.SimpleQueue()

        def work():
            with pytest.raises(Empty):
                queue.get(timeout=5.0)
            order.append(clock.now_s)

        future = VirtualExecutor(clock).submit(work)
        clock.schedule(3.0, lambda: order.append(clock.now_s))
        future.result()
    assert order == [3.0, 5.0]
    with pytest.raises(RuntimeError, match="no event is left"):
        clock.wait(lambda: False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.prompts_per_step=1"], "trainer.prompts_per_step=1; allowed: from 2"),
        (
            ["trainer.prompts_per_step=8", "algorithm.num_mini_batches=4"],
            "num_mini_batches=4 does not divide trainer.prompts_per_step=2",
        ),
    ],
)
def test_steps_that_cannot_be_smaller_are_refused_before_they_are_measured(
    tmp_path, settings, message
):
    with pytest.raises(ConfigError, match=message):
        build_measured_config(settings, "sync", tmp_path)


def test_times_are_those_of_a_plan():
    config, model = RLConfig(), read_model({"model": "Qwen3-8B"})
    config.model.dtype, config.placement.rollout = "bfloat16", "own"
    config.actor.layout.dp = config.rollout.num_servers = 8
    config.trainer.prompts_per_step, config.algorithm.group_size = 64, 8
    config.rollout.max_response_tokens = 4000
    config.rollout.kv_cache_bytes = 1 << 40
    hardware = load_hardware("h100")
    times = predict_times(config, model, hardware, ResponseLengths(1000.0, 0.0), prompt_tokens=500)
    plan = predict_step(config, model, hardware, generation.Lengths(1000, 4000, 0.0, 500))
    rank_tokens = 64 * 1500
    update_s = rank_tokens * times.train_token_s + plan.num_mini_batches * times.optimizer_s
    assert update_s == pytest.approx(plan.update_s)
    decode_s = 1000 * (times.decode_s + 64 * times.decode_response_s)
    assert decode_s == pytest.approx(plan.generation.decode_s, rel=0.01)
    assert times.weight_sync_s == plan.weight_sync_s and times.responses_per_server == 1024
    assert times.log_prob_token_s == pytest.approx(times.train_token_s / 3, rel=0.1)


def test_a_run_takes_about_the_time_that_is_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mcore_rl.tools.simulate.run.open_simulation", nullcontext)
    (tmp_path / "config.json").write_text(
        (PUBLISHED_CONFIGS / "Qwen/Qwen3-8B/config.json").read_text()
    )
    settings = [
        *SETTINGS, f"model.path={tmp_path}", "rollout.max_response_tokens=500",
        "weight_sync.method=disaggregated", "--hardware=h100", "--prompt-tokens=32",
    ]  # fmt: skip
    main(["step", *settings, "--response-tokens=320", "--length-sigma=0", "--json"])
    plan = json.loads(capsys.readouterr().out)
    loop = ["--trainers=sync", "--lengths=lognormal:320:0", "--json"]
    main(["simulate", *settings, *loop])
    run = json.loads(capsys.readouterr().out)["sync"]
    waits_s = 0.5 + 0.1  # for rewards and calls
    assert plan["step_s"] < run["step_s"] < plan["step_s"] + waits_s
    with pytest.raises(ConfigError, match="--times with --hardware"):
        main(["simulate", *settings, "--times", "x"])


def test_lengths_are_drawn_from_a_file(tmp_path):
    (tmp_path / "lengths").write_text("7\n9\n")
    assert {*ResponseLengths.parse(str(tmp_path / "lengths")).draw([1], 50).tolist()} == {7, 9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainers", "synk"], "--trainers"),
        (["--lengths", "lognormal:0:1"], "--lengths=lognormal:0:1"),
        (["--lengths", "nothing"], "--lengths=nothing"),
        (["--failures", "-1"], "--failures=-1"),
        (["--picture", "no/such/folder.png"], "--picture='no/such/folder.png'"),
        (["algorithm.kl_coef=0.1"], "algorithm.kl_coef=0.1.*allowed: 0.0"),
        (["algorithm.advantage=gae"], "algorithm.advantage='gae' trains a critic"),
        (["teacher.models={big: {model_path: x}}"], "teacher.models={'big'"),
        (["algorithm.distillation.loss=reverse_kl"], "algorithm.distillation.loss='reverse_kl'"),
        (["reward_model.model_path=x"], "reward_model.model_path='x'"),
        (["actor.lora.rank=8"], "actor.lora.rank=8"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        main(["simulate", *arguments])


@pytest.mark.parametrize("text", ["decode: 1", "decode_s: fast", "decode_s: 0", "7"])
def test_a_file_of_times_with_a_senseless_field_is_refused(tmp_path, text):
    (tmp_path / "times.yaml").write_text(text)
    with pytest.raises(ConfigError):
        StepTimes.load(tmp_path / "times.yaml")


@pytest.mark.job
@pytest.mark.parametrize("command", select_commands("simulate"), ids=str)
def test_the_command_of_the_page_at_a_small_size(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mcore_rl.tools.simulate.run.open_simulation", nullcontext)
    words = [SMALL.get(w.partition("=")[0], w) for w in shlex.split(command.text)]
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    assert cli.main() == 0
    report = json.loads(capsys.readouterr().out)
    assert [*report] == ["sync", "one_step_off", "fully_async"]
    assert report["fully_async"]["step_s"] < report["sync"]["step_s"]
    assert (tmp_path / "simulation.png").stat().st_size > 10_000
