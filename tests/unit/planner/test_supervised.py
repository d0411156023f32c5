"""Memory and time of supervised jobs: hand-worked cases, verdicts, and the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.main import run_command
from mcore_rl.config.schema import DPOConfig, Layout, RLConfig, RMConfig, SFTConfig, TrainConfig
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.planner.flops import count_work
from mcore_rl.planner.generation import Lengths
from mcore_rl.planner.hardware import load_hardware
from mcore_rl.planner.memory import CONTEXT_BYTES, Conditions, MemoryLimit, Moment, plan_memory
from mcore_rl.planner.memory_check import check_memory, prepare_plan
from mcore_rl.planner.supervised import plan_supervised_memory, predict_supervised_step
from tests.published_runs import read_model

H100 = load_hardware("h100")
MODEL = read_model({"model": "Qwen3-8B"})
LENGTHS = Lengths(1000, 3000, prompt=500)


def build_config(kind: type[TrainConfig]) -> TrainConfig:
    config = kind()
    config.model.dtype = "bfloat16"
    config.engine.layout.tp, config.engine.layout.dp = 2, 4
    config.engine.optimizer.distributed = True
    return config


def plan(config: TrainConfig, device_type: str = "cpu") -> dict[str, Moment]:
    moments = plan_supervised_memory(config, MODEL, Conditions(device_type, imbalance=1.0)).moments
    assert {m.ranks for m in moments} == {tuple(range(8))}  # all are equal
    return {moment.name: moment for moment in moments}


def test_an_update_has_weights_gradients_and_its_share_of_adam():
    config = build_config(SFTConfig)
    [role] = plan_supervised_memory(config, MODEL, Conditions("cpu")).roles
    parameters = role.stages[0].parameters
    moments = plan(config)
    assert moments.keys() == {"model: update"}
    kinds = moments["model: update"].kinds
    assert kinds["weights"] == 2 * parameters
    assert kinds["gradients"] == 4 * parameters
    assert kinds["optimizer"] == 12 * parameters // 4
    assert kinds["activations"] > 0 and kinds["logits"] > 0


def test_the_trained_model_stays_beside_a_reference_on_shared_devices():
    config = build_config(DPOConfig)
    shared, alone = plan(config, "cuda"), None
    update, scores = shared["model: update"].kinds, shared["reference: log-probs"].kinds
    assert scores["weights"] == 2 * update["weights"]
    assert (scores["gradients"], scores["optimizer"]) == (update["gradients"], update["optimizer"])
    assert scores["CUDA contexts"] == 2 * CONTEXT_BYTES
    config.reference.placement = "own"
    alone = plan(config, "cuda")["reference: log-probs"].kinds
    assert alone["weights"] == update["weights"] and "optimizer" not in alone
    assert alone["CUDA contexts"] == CONTEXT_BYTES
    config.engine.lora.rank = 8  # without its adapters the model is the reference
    assert plan(config).keys() == {"model: log-probs", "model: update"}


def test_a_reward_model_has_a_value_head_and_no_logits():
    kinds = plan(build_config(RMConfig))["model: update"].kinds
    head = 151_936 * 4096 // 2  # of Qwen3-8B, on two ranks
    plain = plan(build_config(SFTConfig))["model: update"].kinds
    assert plain["weights"] - kinds["weights"] == 2 * (head - 4096)
    assert kinds["logits"] < plain["logits"] / 1000


def test_an_update_takes_what_that_of_an_actor_takes_with_the_same_rows():
    model = read_model({"model": "Qwen3-30B-A3B"})
    config = build_config(SFTConfig)
    config.engine.layout = Layout(tp=2, dp=4, ep=8)
    run = RLConfig()
    run.model, run.actor = config.model, config.engine
    run.placement.rollout = "own"
    run.trainer.prompts_per_step, run.algorithm.group_size = 16, 4
    longest = config.data.token_limit
    run.data.max_prompt_tokens, run.rollout.max_response_tokens = 1, longest - 1
    [expected] = [m for m in plan_memory(run, model, Conditions()).moments if "update" in m.name]
    [moment] = plan_supervised_memory(config, model, Conditions()).moments
    for kind in ("weights", "optimizer", "activations", "MoE dispatch", "NCCL"):
        assert moment.kinds[kind] == pytest.approx(expected.kinds[kind], rel=1e-3)


def test_jobs_of_fsdp_count_activations_and_gathered_weights():
    config = DPOConfig()
    config.model.dtype, config.engine.backend = "bfloat16", "fsdp"
    config.engine.layout.dp = 8
    memory = plan_supervised_memory(config, MODEL, Conditions())
    assert not memory.uncounted
    for moment in memory.moments:
        assert moment.kinds["activations"] > 0 and moment.kinds["gathered weights"] > 0
    config.engine.fsdp.packing = False
    memory = plan_supervised_memory(config, MODEL, Conditions())
    assert memory.uncounted == ("model", "reference")


def test_parts_of_a_step_are_the_passes_of_the_job():
    sft, dpo, rm = (
        predict_supervised_step(build_config(kind), MODEL, H100, LENGTHS)
        for kind in (SFTConfig, DPOConfig, RMConfig)
    )
    assert sft.scores_s == sft.reference_s == 0
    assert sft.step_s == sft.update.total_s
    assert (sft.tokens, dpo.tokens) == (64 * 1500, 2 * 64 * 1500)
    assert dpo.scores_s == dpo.reference_s > rm.scores_s > 0
    parts = dpo.update.total_s + 2 * dpo.scores_s + dpo.offload_s
    assert dpo.step_s == pytest.approx(parts)
    # Two bytes a parameter of the fullest rank, to the devices and back.
    parameters = plan(build_config(DPOConfig))["model: update"].kinds["weights"] / 2
    host = H100.host_bandwidth * H100.host_share
    assert dpo.offload_s == pytest.approx(2 * 2 * parameters / host, rel=1e-3)


def test_a_reference_of_its_own_takes_more_devices_and_is_not_offloaded():
    config = build_config(DPOConfig)
    config.reference.placement = "own"
    step = predict_supervised_step(config, MODEL, H100, LENGTHS)
    assert (step.num_devices, step.offload_s) == (16, 0.0)
    config.engine.lora.rank = 8
    step = predict_supervised_step(config, MODEL, H100, LENGTHS)
    assert step.num_devices == 8 and step.reference_s > 0


def test_flops_and_tokens_of_a_step_are_those_of_its_devices():
    config = build_config(DPOConfig)
    config.reference.placement = "own"
    step = predict_supervised_step(config, MODEL, H100, LENGTHS)
    flops = count_work(MODEL).count_training_flops(2 * 64 * 1500, LENGTHS.sequence)
    peak = 8 * H100.get_peak_flops("bfloat16")  # of the trained model's devices
    assert step.mfu == pytest.approx(flops / (step.update.total_s * peak))
    assert step.tokens_per_s == pytest.approx(2 * 64 * 1500 / step.step_s / 16)


def test_a_reference_leaves_for_the_host_where_it_takes_turns():
    config = build_config(DPOConfig)
    host = plan_supervised_memory(config, MODEL, Conditions()).host
    weights = 8 * plan(config)["model: update"].kinds["weights"]
    assert host == {"offloaded weights": weights}  # a reference has no Adam
    config.reference.placement = "own"
    assert not plan_supervised_memory(config, MODEL, Conditions()).host
    config.engine.optimizer.cpu_offload = True  # gradient, weight and moments of each shard
    host = plan_supervised_memory(config, MODEL, Conditions()).host
    assert host["optimizer on the host"] == 8 * 16 * (weights // 8 // 2 // 4)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text((find_published("Qwen3-8B") / "config.json").read_text())
    return f"model.path={tmp_path}"


@pytest.mark.parametrize(
    ("kind", "settings", "gigabytes"),
    [
        (SFTConfig, ["engine.layout.tp=2"], "70"),
        (DPOConfig, ["engine.layout.tp=4", "engine.layout.dp=2"], "45"),
        (RMConfig, ["engine.layout.dp=4", "engine.optimizer.distributed=true"], "70"),
        (SFTConfig, ["engine.backend=fsdp", "engine.layout.dp=4"], "60"),
        (SFTConfig, ["engine.backend=fsdp", "engine.layout.dp=4"], "30"),
    ],
)
def test_settings_that_make_a_job_fit_are_pasted(model, kind, settings, gigabytes):
    config = compose_config(kind, [model, *settings])
    device = MemoryLimit.parse(gigabytes)
    with prepare_plan(config, "cuda") as (prepared, hf_config):
        fixes = check_memory(prepared, hf_config, Conditions(), device).fixes
    assert fixes
    for fix in fixes[:2]:
        pasted = compose_config(kind, [model, *settings, *fix.overrides])
        with prepare_plan(pasted, "cuda") as (prepared, hf_config):
            check = check_memory(prepared, hf_config, Conditions(), None)
        assert check.plan.worst.total == fix.total
        assert fix.fits == (fix.total <= device.memory_bytes)


def test_plan_memory_and_plan_step_take_the_settings_of_a_job(model, capsys):
    words = ["--job=dpo", model, "engine.layout.tp=4", "engine.layout.dp=2"]
    assert run_command("plan", ["memory", *words, "--hardware=h200"]) == 0
    assert capsys.readouterr().out.startswith("memory: fits, ")
    assert run_command("plan", ["memory", *words, "--hardware=30", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["fits"] and {m["role"] for m in report["moments"]} == {"model", "reference"}
    assert run_command("plan", ["step", *words, "--hardware=h100"]) == 0
    assert "log-probs of the reference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("memory", ["--job=dop"], "--job='dop'; allowed: 'rl', 'sft', 'dpo', 'rm'"),
        ("memory", ["--job=sft", "actor.layout.tp=2"], "actor"),
        ("memory", ["--job=sft", "engine.layout.tp=3"], "engine.layout.tp=3"),
        ("step", ["--job=sft", "--hardware=h100", "--prompt-tokens=5000"], "data.max_tokens=4096"),
        ("step", ["--job=sft", "--hardware=h100", "engine.layout.tp=3"], "engine.layout.tp=3"),
    ],
)
def test_senseless_input_gets_one_error(model, command, words, message, capsys):
    assert run_command("plan", [command, model, *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_moments_of_the_published_job_of_adapters_fit_one_gpu():
    """8B with adapters on one GPU: weights, not gradients and Adam of them."""
    config = build_config(SFTConfig)
    config.engine = replace(config.engine, layout=type(config.engine.layout)())
    config.engine.lora.rank = 16
    config.engine.recompute.granularity = "full"
    assert plan_supervised_memory(config, MODEL, Conditions()).worst.total < 40e9
    config.engine.lora.rank = 0
    assert plan_supervised_memory(config, MODEL, Conditions()).worst.total > H100.memory_bytes
