"""Peaks of passes at the ends of a pipeline, and what processes and shards take, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.schema import (
    EngineConfig,
    Layout,
    LoRAConfig,
    OptimizerConfig,
    RecomputeConfig,
)
from mcore_rl.models.base import get_family
from mcore_rl.parallel.mesh import split_into_chunks
from mcore_rl.planner.activations import PackSize, PassMemory, compute_pass_memory
from mcore_rl.planner.memory import (
    NCCL_EXCHANGE_BYTES,
    NCCL_GROUP_BYTES,
    NCCL_PAIR_BYTES,
    Conditions,
    count_nccl_bytes,
    plan_memory,
)
from tests.unit.planner import test_memory

PACK = PackSize(tokens=4096, num_scored=3000, num_micro_batches=1, longest=4000)
STATES = 4096 * 2  # bytes of a hidden state of Qwen3-8B
ROWS = 151936 // 2  # of the output head, on each of two ranks


def compute(
    name: str, engine: EngineConfig, stage: int, num_mtp: int = 0, **pack: int
) -> PassMemory:
    """Return the peak of an update, or of log-probs of a model without recompute."""
    model = test_memory.read_model(name)
    fields = get_family(model).config_map(model)
    chunks = split_into_chunks(engine.layout, fields["num_layers"], num_mtp)
    return compute_pass_memory(
        engine,
        fields,
        replace(PACK, **pack),
        [chunk for chunk in chunks if chunk.pp_rank == stage],
        itemsize=2,
        modules="te",
        head_rows=ROWS,
        trains=engine.recompute.granularity == "full",
    )


def test_log_probs_of_an_inner_stage_have_one_layer_and_the_states_that_pass() -> None:
    memory = compute("Qwen3-8B", EngineConfig(layout=Layout(pp=2)), 0)
    heads = (3 * (4096 + 1024) + 1024) * 2  # queries and keys three times, and values
    assert memory.activations == (STATES + heads + STATES + STATES) * 4096
    assert memory.logits == 0


def test_log_probs_of_the_last_stage_have_states_three_times_and_a_tile() -> None:
    memory = compute("Qwen3-8B", EngineConfig(layout=Layout(tp=2, pp=2)), 1)
    # Before and after the last norm and from the stage before, on half of the sequence; gathered.
    states = (3 * STATES / 2 + STATES) * 4096 + STATES * 3000
    assert (memory.activations, memory.logits) == (states, 512 << 20)
    few = compute("Qwen3-8B", EngineConfig(layout=Layout(tp=2, pp=2)), 1, num_scored=700)
    assert few.logits == 2 * 4 * 700 * ROWS  # logits and probabilities in float32


def test_an_update_has_gradients_of_scored_states_and_of_the_head() -> None:
    engine = EngineConfig(layout=Layout(tp=2, pp=2), recompute=RecomputeConfig("full"))
    scored = 3000 * 4096 * 4
    assert compute("Qwen3-8B", engine, 1).logits == (512 << 20) + scored + ROWS * 4096 * 2
    engine = replace(engine, lora=LoRAConfig(rank=8))  # the head is frozen
    assert compute("Qwen3-8B", engine, 1).logits == (512 << 20) + scored


def test_a_prediction_layer_stores_the_input_of_a_layer() -> None:
    engine = EngineConfig(layout=Layout(pp=2), recompute=RecomputeConfig("full"))
    plain, more = (compute("Qwen3-8B", engine, 1, num_mtp=n) for n in (0, 1))
    assert more.activations - plain.activations == STATES * 4096


@pytest.mark.parametrize(("longest", "queries"), [(100, 100), (4000, 256)])
def test_attention_with_sinks_has_the_weights_of_a_block_of_queries(
    longest: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss-20b: 64 heads on two ranks; scores and weights in bfloat16, one in float32."""
    engine = EngineConfig(layout=Layout(tp=2, pp=2))
    shortest = compute("gpt-oss-20b", engine, 0, longest=0)
    memory = compute("gpt-oss-20b", engine, 0, longest=longest)
    assert memory.activations - shortest.activations == 32 * queries * longest * (2 + 2 + 4)


@pytest.mark.parametrize(
    ("layout", "pairs", "groups", "exchanges"),
    [
        (Layout(pp=4), 0, 2, 0),  # stages, all ranks
        (Layout(cp=2), 3, 0, 0),  # cp, ranks with the same weights, all
        (Layout(tp=2, pp=2), 2, 1, 0),
        (Layout(tp=4, dp=2, ep=2, etp=4), 1, 2, 1),  # dp; tp, all; experts have eight peers
        (Layout(dp=16, ep=16), 0, 2, 1),  # seven peers are in the node
    ],
)
def test_communicators_of_a_layout(layout: Layout, pairs: int, groups: int, exchanges: int) -> None:
    expected = pairs * NCCL_PAIR_BYTES + groups * NCCL_GROUP_BYTES + exchanges * NCCL_EXCHANGE_BYTES
    assert count_nccl_bytes(layout) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Qwen3-30B-A3B", NCCL_PAIR_BYTES + NCCL_GROUP_BYTES), ("Qwen3-8B", NCCL_PAIR_BYTES)],
)
def test_servers_with_experts_have_a_communicator_of_all_workers(name: str, expected: int) -> None:
    config = test_memory.build_config(Layout(dp=4))
    config.placement.rollout = "own"
    config.rollout.tp = config.rollout.dp = 2
    config.rollout.ep = True
    plan = plan_memory(config, test_memory.read_model(name), Conditions())
    assert test_memory.get_moments(plan)["rollout: generate"].kinds["NCCL"] == expected


def test_states_of_experts_are_shared_by_the_ranks_that_have_them() -> None:
    """Eight ranks at ep=4: two have the same experts, and four the same other weights."""
    config = test_memory.build_config(Layout(tp=2, dp=4, ep=4))
    config.actor.optimizer = OptimizerConfig(distributed=True)
    model = test_memory.read_model("Qwen3-30B-A3B")
    [stage] = plan_memory(config, model, Conditions("cpu")).roles[0].stages
    experts = 48 * 128 * 3 * 2048 * 768 // 4
    expected = 12 * ((stage.parameters - experts) / 4 + experts / 2)
    assert stage.optimizer_bytes == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("mini_batches", "tokens"), [(1, 16000 + 8192), (2, 8000 + 8000)])
def test_recorded_keys_of_a_pipeline_are_those_of_its_packs(mini_batches: int, tokens: int) -> None:
    """Four samples of 4,000 tokens a rank; two packs of 4,096 in flight, or all of two samples."""
    layout = Layout(pp=2, dp=16, ep=16, first_stage_layers=30, last_stage_layers=31)
    config = test_memory.build_config(layout, indexer_replay="record")
    config.trainer.prompts_per_step, config.algorithm.group_size = 64, 1
    config.algorithm.num_mini_batches = mini_batches
    plan = plan_memory(config, test_memory.read_model("DeepSeek-V3.2"), Conditions("cpu"))
    keys = 61 * 2048 * 4
    moments = test_memory.get_moments(plan)
    assert moments["actor: update"].kinds["indexer keys"] == tokens * keys
    assert moments["actor: log-probs"].kinds["indexer keys"] == 2 * 16000 * keys


def test_float8_weights_of_servers_have_a_byte_and_a_scale_for_each_block() -> None:
    """Qwen3-8B: linear layers of 36 layers in blocks of 128 x 128; the rest is bfloat16."""
    config = test_memory.build_config(Layout())
    config.rollout.quantization = "fp8"
    plan = plan_memory(config, test_memory.read_model("Qwen3-8B"), Conditions("cpu"))
    [servers] = [role for role in plan.roles if role.name == "rollout"]
    linear = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
    expected = linear + linear // 128**2 * 4 + (8_190_735_360 - linear) * 2
    assert servers.stages[0].weight_bytes == expected
