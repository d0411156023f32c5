"""Memory of the fullest GPU in each phase, by hand-worked cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config.resolve import resolve_placement
from mcore_rl.config.schema import (
    DataConfig,
    EngineConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
    RecomputeConfig,
    RLConfig,
    RolloutConfig,
)
from mcore_rl.jobs.memory_plan import compute_memory_phases, estimate_activation_bytes, plan_roles

PUBLISHED = Path(__file__).parents[1] / "models" / "published"
# Elements of a layer of Llama-3.1-70B for a token: input, norms, queries and keys twice and values,
# the result of attention with its projection and the sum, gate, up and product.
LLAMA = (8192, 2 * 8192, 2 * (8192 + 1024) + 1024, 8192 + 2 * 8192, 3 * 28672)
# Of one of DeepSeek-V3: heads have 192 and 128 dims, 8 experts of 256 and a shared one are chosen.
DEEPSEEK = (
    *(7168, 2 * 7168, 2 * (24576 + 24576) + 16384, 16384 + 2 * 7168),
    *(8 * (2 * 7168 + 3 * 2048), 3 * 2048),
)


def config_of(layout: Layout, recompute: RecomputeConfig, **engine: object) -> RLConfig:
    config = RLConfig(
        model=ModelConfig(dtype="bfloat16"),
        data=DataConfig(max_prompt_tokens=1000),
        actor=EngineConfig(
            layout=layout,
            recompute=recompute,
            max_tokens_per_micro_batch=4096,
            **engine,  # type: ignore[arg-type]
        ),
        rollout=RolloutConfig(max_response_tokens=3000),
    )
    return replace(config, placement=resolve_placement(config))


def model_of(name: str) -> dict[str, object]:
    return json.loads((PUBLISHED / f"{name}.json").read_text())


FULL, NONE = RecomputeConfig("full"), RecomputeConfig()


@pytest.mark.parametrize(
    ("name", "layout", "recompute", "elements"),
    [
        # The first of two stages keeps two micro-batches.
        ("Llama-3.1-70B", Layout(tp=8, pp=2), FULL, (2 * 40 * 8192 + 2 * sum(LLAMA)) / 8),
        ("Llama-3.1-70B", Layout(tp=8, pp=2), NONE, (2 * 40 + 2) * sum(LLAMA) / 8),
        # Two chunks a rank: (2 - 1) * 2 + 2 + 1 micro-batches of a chunk of 20 layers.
        ("Llama-3.1-70B", Layout(pp=2, vpp=2), FULL, 5 * 20 * 8192 + 2 * sum(LLAMA)),
        (
            "Llama-3.1-70B",
            Layout(),
            RecomputeConfig("full", num_layers=4),
            20 * 8192 + 5 * sum(LLAMA),
        ),
        (
            "Llama-3.1-70B",
            Layout(),
            RecomputeConfig("selective", ["mlp"]),
            80 * sum(LLAMA[:4]) + 2 * sum(LLAMA),
        ),
        (
            "DeepSeek-V3",
            Layout(),
            RecomputeConfig("selective", ["moe", "layernorm", "core_attn"]),
            61 * (sum(DEEPSEEK[:1]) + sum(DEEPSEEK[2:4])) + 2 * sum(DEEPSEEK),
        ),
        # The second of 16 stages has 4 layers of 15 micro-batches; the first only 3 of 16.
        (
            "DeepSeek-V3",
            Layout(tp=2, pp=16, first_stage_layers=3, last_stage_layers=2),
            FULL,
            (15 * 4 * 7168 + 2 * sum(DEEPSEEK)) / 2,
        ),
    ],
)
def test_activations_are_those_counted_by_hand(name, layout, recompute, elements):
    assert (
        estimate_activation_bytes(config_of(layout, recompute), model_of(name))
        == 2 * 4096 * elements
    )


def test_a_sample_that_is_longer_than_a_micro_batch_counts():
    config = config_of(Layout(cp=2), FULL)
    of_budget = estimate_activation_bytes(config, model_of("Llama-3.1-70B"))
    config.rollout.max_response_tokens = 4 * 4096 - 1000
    assert estimate_activation_bytes(config, model_of("Llama-3.1-70B")) == 2 * of_budget


def test_turns_add_up_and_the_offloaded_optimizer_is_not_on_the_gpu():
    optimizer = OptimizerConfig(distributed=True)
    config = config_of(Layout(tp=2, dp=2), FULL, optimizer=optimizer)
    model = model_of("Qwen3-8B")
    phases = {
        phase.name: phase
        for phase in compute_memory_phases(config, model, plan_roles(config, model))
    }
    parameters = plan_roles(config, model)[0].stages[0].parameters
    actor, rollout, push = phases["actor"], phases["rollout"], phases["push"]
    assert (actor.weights, actor.gradients) == (2 * parameters, 4 * parameters)
    assert actor.optimizer == 12 * parameters // 2
    assert actor.total == 12 * parameters + actor.activations
    assert rollout.total == rollout.weights + (4 << 30)
    assert push.total == actor.weights + rollout.weights + 2 * (64 << 20)
    config.actor.optimizer.cpu_offload = True
    phases = {
        phase.name: phase
        for phase in compute_memory_phases(config, model, plan_roles(config, model))
    }
    assert phases["actor"].optimizer == 0


def test_with_gpus_of_their_own_actor_and_servers_never_share_one():
    config, model = config_of(Layout(tp=2), FULL), model_of("Qwen3-8B")
    config.placement.rollout = "own"
    assert [
        phase.name for phase in compute_memory_phases(config, model, plan_roles(config, model))
    ] == [
        "actor",
        "rollout",
    ]
