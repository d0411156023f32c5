"""Recipes of published models: they resolve, fit their GPUs, and are planned and dry-run."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import recipes
from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.main import main
from mcore_rl.cli.plan_time import count_sync_bytes
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.models.base import HFConfig, count_kv_elements_per_token
from mcore_rl.planner.generation import Lengths
from mcore_rl.planner.hardware import load_hardware
from mcore_rl.planner.memory import Conditions, MemoryLimit, MemoryPlan, Moment, plan_memory
from mcore_rl.planner.step import StepTime, predict_step
from tests.unit.planner.test_dry_run import dry_run

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "recipes.md"
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Case:
    published: str
    num_gpus: int


RECIPES = {
    "dsv3_671b": Case("DeepSeek-V3", 256),
    "qwen3_235b_a22b": Case("Qwen3-235B-A22B", 128),
    "minimax_m2_230b": Case("MiniMax-M2", 128),
    "qwen3_30b_a3b": Case("Qwen3-30B-A3B", 16),
    "qwen3_next_80b_a3b": Case("Qwen3-Next-80B-A3B", 32),
    "qwen3_5_35b_a3b": Case("Qwen3.5-35B-A3B", 16),
    "moonlight_16b": Case("Moonlight-16B-A3B", 8),
    "gpt_oss_20b": Case("gpt-oss-20b", 8),
    "qwen3_8b": Case("Qwen3-8B", 8),
    "llama3_70b": Case("Llama-3.1-70B", 32),
}
each_recipe = pytest.mark.parametrize("name", RECIPES)


def composed(name: str, *overrides: str) -> RLConfig:
    """Compose a recipe for GPUs."""
    files = ["model.path=model", "data.train_file=train.parquet", "data.test_file=test.parquet"]
    config = compose_config(RLConfig, [f"recipe={name}", *files, *overrides])
    validate_rl(config)
    return resolve_for_device_type(config, "cuda")


def model_of(name: str) -> HFConfig:
    """Read the published config.json of a recipe's model."""
    config = json.loads((find_published(RECIPES[name].published) / "config.json").read_text())
    return {**config.get("text_config", {}), **config}


@cache
def plan_of(name: str, *overrides: str, hardware: str = "h100") -> MemoryPlan:
    """Plan a recipe on GPUs whose memory bounds its KV cache."""
    conditions = Conditions(memory_bytes=MemoryLimit.parse(hardware).memory_bytes)
    return plan_memory(composed(name, *overrides), model_of(name), conditions)


@cache
def step_of(name: str) -> StepTime:
    """Predict a step as `mcore-rl plan step --hardware h100` does."""
    config, hardware = composed(name), load_hardware("h100")
    model = {k: v for k, v in model_of(name).items() if k != "quantization_config"}
    longest = config.rollout.max_response_tokens
    lengths = Lengths(longest / 2, longest, prompt=config.data.max_prompt_tokens / 2)
    sync_bytes = count_sync_bytes(config, model, hardware)
    return predict_step(config, model, hardware, lengths, sync_bytes=sync_bytes)


def get_worst(plan: MemoryPlan, moment: str) -> Moment:
    """Return a moment of the fullest ranks."""
    return max((m for m in plan.moments if m.name == moment), key=lambda m: m.total)


def test_every_recipe_is_tested_here_or_by_the_quickstart():
    of_a_task = ("quickstart", "tiny", "toy")  # models that are made
    assert {n for n in recipes.list_recipes() if not n.startswith(of_a_task)} == RECIPES.keys()


@each_recipe
def test_a_recipe_fits_its_gpus_at_every_moment(name):
    assert plan_run(composed(name)).num_devices == RECIPES[name].num_gpus
    spare = MemoryLimit.parse("h100").memory_bytes - plan_of(name).worst.total
    assert spare >= 3e9  # the constants beside tensors are uncertain


@each_recipe
def test_a_recipe_states_its_cluster_and_memory(name):
    """# cluster: 32 nodes of 8 H100; memory: 75 of 85 GB of a GPU, ..."""
    text, plan = (recipes.RECIPES / f"{name}.yaml").read_text(), plan_of(name)
    nodes = RECIPES[name].num_gpus // GPUS_PER_NODE
    count = f"{nodes} node{'s' * (nodes > 1)}"
    line = (
        f"# cluster: {count} of {GPUS_PER_NODE} H100; memory: {plan.worst.total / 1e9:.0f} of "
        f"{MemoryLimit.parse('h100').memory_bytes / 1e9:.0f} GB of a GPU ({plan.worst.name}), "
        f"{sum(plan.host.values()) / 1e9:.0f} GB of a host\n"
    )
    assert f"\n{line}" in text, line


@pytest.mark.job
@each_recipe
def test_a_recipe_states_the_time_of_a_step(name):
    """# step: 310 s (generation 238 s, update 70 s) with responses of 4096 tokens, predicted"""
    step, tokens = step_of(name), composed(name).rollout.max_response_tokens // 2
    line = (
        f"# step: {step.step_s:.0f} s (generation {step.generation.total_s:.0f} s, update "
        f"{step.update_s:.0f} s) with responses of {tokens} tokens on average, predicted\n"
    )
    assert f"\n{line}" in (recipes.RECIPES / f"{name}.yaml").read_text(), line


def test_plan_step_prints_the_time_that_a_recipe_states(monkeypatch, capfd):
    words = ["step", "recipe=qwen3_8b", "model.path=Qwen3-8B", "--hardware=h100", "--json"]
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "plan", *words])
    assert main() == 0
    assert json.loads(capfd.readouterr().out)["step_s"] == step_of("qwen3_8b").step_s


@pytest.mark.job
@each_recipe
def test_the_table_of_the_page_has_the_time_of_a_step(name):
    """Seconds of a step, of generation, of the update, of a weight sync; tokens per GPU."""
    step = step_of(name)
    rest = step.step_s - step.generation.total_s - step.update_s - step.weight_sync_s
    sizes = step.step_s, step.generation.total_s, step.update_s, rest, step.weight_sync_s
    row = " | ".join([*(f"{seconds:.1f}" for seconds in sizes), f"{step.tokens_per_s:.0f}"])
    assert f"\n| `{name}` | {row} |" in PAGE.read_text(), row


def test_what_the_page_says_of_fewer_or_larger_gpus_is_true():
    h100, h200 = (MemoryLimit.parse(name).memory_bytes for name in ("h100", "h200"))
    one_node = "actor.layout.dp=8", "rollout.num_servers=4"
    assert h100 < plan_of("qwen3_30b_a3b", *one_node, hardware="h200").worst.total < h200
    assert h100 < plan_of("qwen3_30b_a3b", *one_node).worst.total
    offloaded = plan_of("qwen3_30b_a3b", *one_node, "actor.optimizer.cpu_offload=true")
    assert offloaded.worst.total < h100
    half = "actor.layout.dp=4", "actor.layout.ep=8", "rollout.num_servers=4"
    assert h100 < plan_of("dsv3_671b", *half, hardware="h200").worst.total < h200


@each_recipe
def test_a_recipe_keeps_tensor_parallel_groups_on_a_node_and_all_gpus_busy(name):
    config, world = composed(name), RECIPES[name].num_gpus
    layout, rollout = config.actor.layout, config.rollout
    assert layout.world_size == rollout.num_servers * rollout.num_workers == world
    assert GPUS_PER_NODE % layout.tp == 0
    assert GPUS_PER_NODE % rollout.tp == 0 or rollout.tp % GPUS_PER_NODE == 0
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert config.actor.max_tokens_per_micro_batch * layout.cp >= longest
    # Some are as long as may be, the mean is a third: so many micro-batches a rank, and sequences
    # that a server runs at once.
    packs = (
        samples / layout.dp * longest / 3 / (config.actor.max_tokens_per_micro_batch * layout.cp)
    )
    assert packs > 4 * layout.pp
    cache_bytes = get_worst(plan_of(name), "rollout: generate").kinds["KV cache"]
    cached = cache_bytes / 2 / count_kv_elements_per_token(model_of(name), rollout.tp)
    assert cached / (longest / 3) > 48
    assert samples / rollout.num_servers <= rollout.max_num_seqs


@each_recipe
def test_every_setting_of_a_recipe_has_a_reason(name):
    lines = (recipes.RECIPES / f"{name}.yaml").read_text().splitlines()
    settings = [line for line in lines if re.search(r": *[^ #]", line.partition(" #")[0])]
    assert [line for line in settings if line[0] != "#" and " # " not in line] == []


@pytest.mark.job
@each_recipe
def test_plan_reshard_takes_the_layouts_of_a_recipe(name, monkeypatch, capsys):
    config = composed(name)
    axes = ("tp", "pp", "cp", "dp", "ep", "etp", "first_stage_layers", "last_stage_layers")
    train = {axis: getattr(config.actor.layout, axis) for axis in axes}
    rollout = config.rollout
    ep = rollout.num_workers if rollout.ep else 1
    generate = {"tp": rollout.tp, "dp": rollout.num_servers * rollout.dp, "ep": ep}
    sides = [
        ",".join(f"{axis}={size}" for axis, size in side.items() if size not in (1, None)) or "tp=1"
        for side in (train, generate)
    ]
    options = [
        "--model",
        RECIPES[name].published,
        "--train",
        sides[0],
        "--generate",
        sides[1],
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "plan", "reshard", *options])
    assert main() == 0
    report = json.loads(capsys.readouterr().out)
    assert report["received_bytes"] == report["lower_bound_bytes"] > 0
    assert len(report["ranks"]) == RECIPES[name].num_gpus


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make data in the current folder."""
    chat = [{"role": "user", "content": "What is 1 + 1?"}]
    for file in ("train.parquet", "test.parquet"):
        pq.write_table(pa.table({"messages": [chat], "answer": ["2"]}), tmp_path / file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.job
@each_recipe
def test_a_recipe_is_dry_run_on_its_published_config(name, place, monkeypatch, capfd):
    model = f"model.path={RECIPES[name].published}"
    files = [model, "data.train_file=train.parquet", "data.test_file=test.parquet"]
    status, out, err = dry_run(
        monkeypatch, capfd, f"recipe={name}", *files, f"--gpus-per-node={GPUS_PER_NODE}"
    )
    assert (status, err.startswith(f"{model}: config.json of "), err.count("\n")) == (0, True, 1)
    world = RECIPES[name].num_gpus
    assert f"\n{world} GPUs: {world} for actor, rollout, by turns\n" in out
    assert out.startswith("memory: fits, ")
    nodes = re.findall(r"^ nodes? (\d+)(?:-(\d+))?: actor .*; rollout server", out, re.M)
    assert sum(int(last or first) - int(first) + 1 for first, last in nodes) == world // 8
    assert re.search(r"\nweight sync \(colocated\), each step: [1-9][\d,.]* GB between GPUs", out)


@each_recipe
def test_the_table_of_the_page_has_the_memory_of_the_fullest_gpu(name):
    """Host of a node, parts of the actor's update, a weight sync, a server, in GB."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    plan = plan_of(name)
    names = "actor: update", "weight sync", "rollout: generate"
    update, push, server = (get_worst(plan, moment) for moment in names)
    kinds = update.kinds
    passes = sum(kinds[kind] for kind in ("activations", "MoE dispatch", "logits"))
    sizes = (
        *(kinds[kind] for kind in ("weights", "gradients", "optimizer")),
        passes,
        update.total,
        push.total,
        server.kinds["weights"],
        server.kinds["KV cache"],
        server.total,
    )
    host = sum(plan.host.values())
    row = " | ".join([f"{host / 1e9:.0f}", *(f"{size / 1e9:.1f}" for size in sizes)])
    assert f"| `{name}` | {row} |" in rows, row


@each_recipe
def test_the_table_of_the_page_has_the_layout(name):
    config = composed(name)
    layout, rollout = config.actor.layout, config.rollout
    axes = ("tp", "pp", "cp", "dp", "ep")
    train = " ".join(f"{a}={getattr(layout, a)}" for a in axes if getattr(layout, a) > 1)
    dp = f" dp={rollout.dp}" * (rollout.dp > 1)
    served = f"{rollout.num_servers} x tp={rollout.tp}{dp}" + " ep" * rollout.ep
    gpus = RECIPES[name].num_gpus
    row = f"| `{name}` | {RECIPES[name].published} | {gpus} | {train} | {served} |"
    assert f"\n{row}" in PAGE.read_text(), row
