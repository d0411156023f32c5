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
from mcore_rl.config.resolve import resolve, resolve_for_lane
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs.memory_plan import MemoryPhase, RolePlan, compute_memory_phases, plan_roles
from mcore_rl.jobs.placement import build_pool_plans, count_devices
from mcore_rl.models.base import HFConfig, count_kv_elements_per_token
from tests.unit.jobs.test_dry_run import dry_run

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = ROOT / "tests" / "unit" / "models" / "published"
PAGE = ROOT / "docs" / "recipes.md"
GPUS_PER_NODE = 8
# What nvidia-smi tells, in MiB, as bytes.
H100_BYTES, H200_BYTES = 81_559 << 20, 143_771 << 20
# For what is not counted: the CUDA contexts of a trainer and of a server, NCCL's buffers, vLLM's
# graphs and workspace, uneven load of experts, and what an allocator cannot use.
MARGIN_BYTES = 12_000_000_000


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
    resolve(config)
    return resolve_for_lane(config, "cuda")


def model_of(name: str) -> HFConfig:
    """Read the published config.json of a recipe's model."""
    config = json.loads((PUBLISHED / f"{RECIPES[name].published}.json").read_text())
    return {**config.get("text_config", {}), **config}


@cache
def roles_of(name: str, *overrides: str) -> list[RolePlan]:
    return plan_roles(composed(name, *overrides), model_of(name))


def phases_of(name: str, *overrides: str) -> dict[str, MemoryPhase]:
    config, model = composed(name, *overrides), model_of(name)
    return {
        phase.name: phase
        for phase in compute_memory_phases(config, model, roles_of(name, *overrides))
    }


def most_bytes(name: str, *overrides: str) -> int:
    return max(turn.total for turn in phases_of(name, *overrides).values())


def test_every_recipe_is_tested_here_or_by_the_quickstart():
    of_a_task = ("quickstart", "tiny", "toy")  # models that are made
    assert {n for n in recipes.list_recipes() if not n.startswith(of_a_task)} == RECIPES.keys()


@each_recipe
def test_a_recipe_fits_its_gpus_in_every_turn(name):
    assert count_devices(build_pool_plans(composed(name))) == RECIPES[name].num_gpus
    for turn in phases_of(name).values():
        assert turn.total < H100_BYTES - MARGIN_BYTES, turn


def test_what_the_page_says_of_fewer_or_larger_gpus_is_true():
    one_node = "actor.layout.dp=8", "rollout.num_servers=4"
    most = most_bytes("qwen3_30b_a3b", *one_node)
    assert H100_BYTES - MARGIN_BYTES < most < H200_BYTES - MARGIN_BYTES
    offloaded = most_bytes("qwen3_30b_a3b", *one_node, "actor.optimizer.cpu_offload=true")
    assert offloaded < H100_BYTES - MARGIN_BYTES
    half = "actor.layout.dp=4", "actor.layout.ep=8", "rollout.num_servers=4"
    assert most_bytes("dsv3_671b", *half) > H100_BYTES
    assert most_bytes("dsv3_671b", *half) < H200_BYTES - MARGIN_BYTES


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
    cached = rollout.kv_cache_bytes / 2 / count_kv_elements_per_token(model_of(name), rollout.tp)
    assert cached / (longest / 3) > 48
    assert samples / rollout.num_servers <= rollout.max_num_seqs


@each_recipe
def test_every_setting_of_a_recipe_has_a_reason(name):
    lines = (recipes.RECIPES / f"{name}.yaml").read_text().splitlines()
    settings = [line for line in lines if re.search(r": *[^ #]", line.partition(" #")[0])]
    assert [line for line in settings if line[0] != "#" and " # " not in line] == []


@each_recipe
def test_plan_reshard_takes_the_layouts_of_a_recipe(name, monkeypatch, capsys):
    config, published = composed(name), PUBLISHED / f"{RECIPES[name].published}.json"
    axes = ("tp", "pp", "cp", "dp", "ep", "etp", "first_stage_layers", "last_stage_layers")
    train = {axis: getattr(config.actor.layout, axis) for axis in axes}
    rollout = config.rollout
    ep = rollout.num_workers if rollout.ep else 1
    generate = {"tp": rollout.tp, "dp": rollout.num_servers * rollout.dp, "ep": ep}
    sides = [
        ",".join(f"{axis}={size}" for axis, size in side.items() if size not in (1, None)) or "tp=1"
        for side in (train, generate)
    ]
    options = ["--model", str(published), "--train", sides[0], "--generate", sides[1], "--json"]
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "plan", "reshard", *options])
    assert main() == 0
    report = json.loads(capsys.readouterr().out)
    assert report["received_bytes"] == report["lower_bound_bytes"] > 0
    assert len(report["ranks"]) == RECIPES[name].num_gpus


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data, and a folder for a model."""
    chat = [{"role": "user", "content": "What is 1 + 1?"}]
    for file in ("train.parquet", "test.parquet"):
        pq.write_table(pa.table({"messages": [chat], "answer": ["2"]}), tmp_path / file)
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@each_recipe
def test_a_recipe_is_dry_run_on_its_published_config(name, place, monkeypatch, capfd):
    (place / "model" / "config.json").write_text(json.dumps(model_of(name)))
    files = ["model.path=model", "data.train_file=train.parquet", "data.test_file=test.parquet"]
    status, out, err = dry_run(
        monkeypatch, capfd, f"recipe={name}", *files, f"--gpus-per-node={GPUS_PER_NODE}"
    )
    assert (status, err) == (0, "")
    world = RECIPES[name].num_gpus
    assert f"\n{world} GPUs: {world} for actor, rollout, by turns\n" in out
    assert len(re.findall(r"^ node \d+: actor .*; rollout server", out, re.M)) == world // 8
    assert re.search(r"\nweight sync \(colocated\), each step: [1-9][\d,.]* GB between GPUs", out)


@each_recipe
def test_the_table_of_the_page_has_the_memory_of_the_fullest_gpu(name):
    """Host of a node, parts of the actor's phase, a weight update, a server, in GB."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    phases = phases_of(name)
    actor, server, push = phases["actor"], phases["rollout"], phases["push"]
    parts = (actor.weights, actor.gradients, actor.optimizer, actor.activations, actor.total)
    stages, num_nodes = roles_of(name)[0].stages, RECIPES[name].num_gpus // GPUS_PER_NODE
    host = sum(len(s.ranks) * (s.weight_bytes + s.optimizer_bytes) for s in stages) / num_nodes
    sizes = (*parts, push.total, server.weights, server.cache, server.total)
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
