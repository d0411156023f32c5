"""Runs that others published (published_runs.yaml), as the planner predicts them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.rules import resolve_placement
from mcore_rl.config.schema import EngineConfig, Layout, RLConfig
from mcore_rl.inference.kv_cache import GPU_SHARE
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.models.base import HFConfig, read_config
from mcore_rl.planner.flops import count_work
from mcore_rl.planner.generation import Lengths
from mcore_rl.planner.hardware import load_hardware
from mcore_rl.planner.layout import (
    estimate_training_bytes,
    plan_trainers,
    search_layouts,
    search_trainers,
)
from mcore_rl.planner.memory import Conditions, MemoryPlan, plan_memory
from mcore_rl.planner.step import predict_step
from mcore_rl.planner.training import Load, TrainingModel

RUNS = yaml.safe_load((Path(__file__).parent / "published_runs.yaml").read_text())
PROMPT = 128  # tokens; not published


def read_model(run: dict[str, Any]) -> HFConfig:
    config = read_config(find_published(run["model"])) | run.get("fields", {})
    config.pop("quantization_config", None)
    return config


def build_layout(run: dict[str, Any], gpus: int, num_layers: int) -> Layout:
    axes = dict(run["layout"])
    dp = gpus // (axes.get("tp", 1) * axes.get("pp", 1) * axes.get("cp", 1))
    chunks = axes.get("pp", 1) * axes.get("vpp", 1)
    if num_layers % chunks and "first_stage_layers" not in axes:
        # The runs have layouts of their own with embedding and head in thinner chunks.
        inner = -(-num_layers // chunks)
        while num_layers < inner * (chunks - 2):
            inner -= 1
        rest = num_layers - inner * (chunks - 2)
        axes |= {"first_stage_layers": rest // 2, "last_stage_layers": rest - rest // 2}
    return Layout(dp=dp, **axes)


def build_training_engine(run: dict[str, Any]) -> EngineConfig:
    """Return the settings of a training run, all overlaps on."""
    layout = build_layout(run, run["gpus"], read_model(run)["num_hidden_layers"])
    engine = EngineConfig(
        layout=layout,
        max_tokens_per_micro_batch=run["sequence"] * run["mbs"] // layout.cp,
        megatron={"tp_comm_overlap": True},
    )
    engine.optimizer.distributed = engine.optimizer.overlap = True
    engine.moe.dispatcher = "flex"
    if modules := run.get("recompute"):
        engine.recompute.granularity, engine.recompute.modules = "selective", modules
    return engine


def build_load(run: dict[str, Any]) -> Load:
    return Load(run["batch"] * run["sequence"], run["sequence"])


def predict_update_s(run: dict[str, Any]) -> float:
    """Return the seconds of an optimizer step of a training run."""
    work, hardware = count_work(read_model(run)), load_hardware(run["hardware"])
    model = TrainingModel(work, build_training_engine(run), hardware, run["dtype"])
    return model.predict_update(build_load(run)).total_s


def predict_tokens_per_s(run: dict[str, Any]) -> float:
    """Return the tokens a second and GPU of a training run."""
    return build_load(run).tokens / predict_update_s(run) / run["gpus"]


def search_update_s(run: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of an optimizer step with the published layout and the fastest.

    A run that does not fit with a margin by the estimate of the search, as without its float8
    activations, has the recompute with which it does.
    """
    model, config = read_model(run), RLConfig()
    config.model.dtype, config.actor = "bfloat16", build_training_engine(run)
    if run["dtype"] == "float8":
        config.actor.fp8.recipe = "blockwise"
    half = run["sequence"] // 2
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = half, half
    hardware, work = load_hardware(run["hardware"]), count_work(model)
    load = build_load(run)
    trainers, _, _ = search_trainers(config, model, work, hardware, run["gpus"], load)
    fastest_s = min(trainer.update_s for trainer in trainers)
    actor = build_training_engine(run)
    kinds = estimate_training_bytes(TrainingModel(work, actor, hardware, run["dtype"]))
    if sum(kinds.values()) <= GPU_SHARE * hardware.memory_bytes:
        return predict_update_s(run), fastest_s
    tokens = actor.max_tokens_per_micro_batch
    published = plan_trainers(actor, work, hardware, run["dtype"], actor.layout, load, tokens)
    return published[-1].update_s, fastest_s


def predict_step_s(run: dict[str, Any]) -> float:
    """Return the seconds of a step, with full recompute and log-probs of actor and reference."""
    config, lengths = build_step_config(run)
    return predict_step(config, read_model(run), load_hardware(run["hardware"]), lengths).step_s


def search_step_s(run: dict[str, Any]) -> float:
    """Return the seconds of a step with the fastest layout of a search."""
    config, lengths = build_step_config(run)
    hardware = load_hardware(run["hardware"])
    best = search_layouts(config, read_model(run), hardware, run["gpus"], lengths).best
    return best[0].step.step_s


def build_step_config(run: dict[str, Any]) -> tuple[RLConfig, Lengths]:
    """Return the settings and lengths of a published step of reinforcement learning."""
    model = read_model(run)
    config = RLConfig()
    config.model.path = run["model"]
    config.data.max_prompt_tokens = PROMPT
    config.model.dtype, config.trainer.mode = "bfloat16", run["mode"]
    config.placement.rollout = "shared" if run["mode"] == "sync" else "own"
    config.weight_sync.method = "colocated" if run["mode"] == "sync" else "disaggregated"
    actor, rollout = config.actor, config.rollout
    actor.layout = build_layout(run, run["trainer_gpus"], model["num_hidden_layers"])
    actor.optimizer.distributed = actor.optimizer.overlap = True
    actor.recompute.granularity = "full"
    actor.max_tokens_per_micro_batch = run["longest"] // actor.layout.cp
    config.algorithm.kl_coef, config.algorithm.log_prob_pass = 0.01, "always"
    config.algorithm.group_size = 32
    config.trainer.prompts_per_step = run["samples"] // 32
    servers = run["gpus"] - (0 if run["mode"] == "sync" else run["trainer_gpus"])
    rollout.tp, rollout.num_servers = run["server_tp"], servers // run["server_tp"]
    rollout.kv_cache_bytes = 30 << 30
    rollout.max_response_tokens = run["longest"] - PROMPT
    lengths = Lengths(run["tokens"] - PROMPT, run["longest"] - PROMPT, prompt=PROMPT)
    return config, lengths


@cache
def plan_run_memory(index: int) -> MemoryPlan:
    """Plan the memory of RUNS["memory"][index], with the KV cache that fills the servers' share."""
    run = RUNS["memory"][index]
    # Roles that take turns leave the GPU to each other, and ranks shard Adam, in all these systems.
    shared = ["model.dtype=bfloat16", "actor.optimizer.distributed=true"]
    config = compose_config(RLConfig, [*shared, *run["settings"].split()])
    config.placement = resolve_placement(config)
    model = read_model(run)
    [servers] = [
        moment
        for moment in plan_memory(config, model, Conditions()).moments
        if moment.name == "rollout: generate"
    ]
    share = run["memory_share"] * load_hardware(run["hardware"]).memory_bytes
    config.rollout.kv_cache_bytes = int(
        share - servers.kinds["weights"] - servers.kinds["workspace"]
    )
    return plan_memory(config, model, Conditions())


def format_memory_table() -> str:
    """Return the table of docs/planning.md."""
    lines = [
        "| System | Model | GPUs | Published | Predicted GB | Fullest moment |",
        "|---|---|---|---|---|---|",
    ]
    for index, run in enumerate(RUNS["memory"]):
        worst = plan_run_memory(index).worst
        limit = load_hardware(run["hardware"]).memory_bytes
        lines.append(
            f"| {run['system']} | {run['name']} | {run['gpus']} {run['hardware']} | "
            f"{'ran' if run['fits'] else 'out of memory'} | {worst.total / 1e9:.1f} of "
            f"{limit / 1e9:.1f} | {worst.name} |"
        )
    return "\n".join(lines) + "\n"


def format_tables() -> str:
    """Return the two tables of docs/planning_step.md."""
    lines = [
        "| Model | GPUs | Products | Published | Predicted | Release |",
        "|---|---|---|---|---|---|",
    ]
    for run in RUNS["training"]:
        ratio = predict_tokens_per_s(run) / run["tokens_per_s"]
        lines.append(
            f"| {run['name']} | {run['gpus']} {run['hardware']} | {run['dtype']} | "
            f"{run['tokens_per_s']} | x {ratio:.2f} | "
            f"{run['source'].replace('bridge_', '').replace('_', '.')} |"
        )
    lines += [
        "",
        "| Model | GPUs | Trainer | Servers | Published s | Predicted s | Ratio | Source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in RUNS["steps"]:
        predicted = predict_step_s(run)
        lines.append(
            f"| {run['name']} | {run['gpus']} {run['hardware']} | {run['mode']} | "
            f"tp={run['server_tp']} | {run['step_s']} | {predicted:.1f} | "
            f"{predicted / run['step_s']:.2f} | "
            f"v{run['source'].removeprefix('nemo_rl_').replace('_', '.')} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(format_memory_table(), format_tables(), sep="\n", end="")
