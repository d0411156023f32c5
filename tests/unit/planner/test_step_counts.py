"""Mini-batches, float8 recipes, caches, Adam on the host and pools of a run, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config.allowed import FLOAT8_RECIPES
from mcore_rl.config.schema import (
    CriticConfig,
    Float8Config,
    Layout,
    OptimizerConfig,
    RecomputeConfig,
    RLConfig,
)
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.planner.flops import count_work
from mcore_rl.planner.generation import Lengths
from mcore_rl.planner.hardware import load_hardware
from mcore_rl.planner.memory import CONTEXT_BYTES, Conditions, MemoryPlan, Moment, plan_memory
from mcore_rl.planner.step import predict_step
from mcore_rl.planner.training import Load, TrainingModel
from tests.unit.planner import test_memory
from tests.unit.planner.test_roles import LAYER, VOCABULARY

H100 = load_hardware("h100")
LENGTHS = Lengths(1000, 3000)
MODEL = test_memory.read_model("Qwen3-8B")
HIDDEN, LAYERS = 4096, 36
RECIPES = [recipe for recipe in FLOAT8_RECIPES if recipe != "off"]


def build_config(layout: Layout, num_samples: int = 64) -> RLConfig:
    config = test_memory.build_config(layout)
    config.trainer.prompts_per_step, config.algorithm.group_size = num_samples, 1
    return config


def get_moment(plan: MemoryPlan, name: str, rank: int = 0) -> Moment:
    [moment] = [m for m in plan.moments if m.name == name and rank in m.ranks]
    return moment


# Mini-batches


def test_critic_and_flops_count_an_update_for_each_mini_batch() -> None:
    config = build_config(Layout(dp=8))
    config.critic = CriticConfig(layout=Layout(dp=8))
    config.algorithm.num_mini_batches, config.algorithm.advantage = 4, "gae"
    step = predict_step(config, MODEL, H100, LENGTHS)
    load = Load(64 * (1000 + 256), LENGTHS.sequence)
    quarter = replace(load, tokens=load.tokens / 4)
    critic = TrainingModel(count_work(MODEL).with_value_head(), config.critic, H100)
    values_s = critic.predict_forward(load) + 4 * critic.predict_update(quarter).total_s
    assert step.values_s == pytest.approx(values_s)
    # Flops of a quarter of the step over the seconds of one update.
    actor = TrainingModel(count_work(MODEL), config.actor, H100)
    flops, update_s = actor.count_training_flops(quarter), actor.predict_update(quarter).total_s
    assert step.mfu == pytest.approx(flops / (update_s * 8 * H100.get_peak_flops("bfloat16")))


# float8


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_float8_recipe_has_whole_main_weights_and_bfloat16_weights(recipe: str) -> None:
    config = build_config(Layout(dp=4))
    config.actor.optimizer = OptimizerConfig(distributed=True)
    config.actor.fp8 = Float8Config(recipe)
    config.actor.megatron = {"use_precision_aware_optimizer": True}
    [stage] = plan_memory(config, MODEL, Conditions("cpu")).roles[0].stages
    # Two moments and a main weight of four bytes each: no lower halves beside float8 products.
    assert stage.optimizer_bytes == (4 + 4 + 4) * stage.parameters // 4
    assert stage.weight_bytes == 2 * stage.parameters


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_float8_recipe_has_the_rate_of_float8_products(recipe: str) -> None:
    config = build_config(Layout(dp=8))
    wide_s = predict_step(config, MODEL, H100, LENGTHS).update.compute_s
    config.actor.fp8 = Float8Config(recipe)
    load = Load(64 * (1000 + 256), LENGTHS.sequence)
    engine = TrainingModel(count_work(MODEL), config.actor, H100, "float8")
    update_s = predict_step(config, MODEL, H100, LENGTHS).update.compute_s
    assert update_s == engine.predict_update(load).compute_s < 0.75 * wide_s


# Pipelines and replicas in memory


def count_stored(
    num_samples: int, *, rank: int = 0, unit: int = 1, mini_batches: int = 1, **axes: int
) -> int:
    """Return the activations of an update whose layers store their inputs alone."""
    config = build_config(Layout(pp=2, **axes), num_samples)
    config.actor.recompute = RecomputeConfig("full", num_layers=unit)
    config.algorithm.num_mini_batches = mini_batches
    plan = plan_memory(config, MODEL, Conditions("cpu", imbalance=1.0))
    return get_moment(plan, "actor: update", rank).kinds["activations"]


def test_a_stage_stores_the_inputs_of_the_micro_batches_in_flight() -> None:
    """Samples of 4,000 tokens: two fill a pack of 4,096, four three, of which two are in flight."""
    pack = HIDDEN * 2 * 4096  # an input of a layer
    assert count_stored(4) - count_stored(2) == LAYERS // 2 * pack
    assert count_stored(4, mini_batches=2) == count_stored(4, dp=2) == count_stored(2)
    # Sixteen thousand tokens on two context-parallel ranks are one pack of each.
    assert count_stored(8, cp=2) - count_stored(4, cp=2) == LAYERS // 2 * pack
    # A unit of three layers stores one input.
    assert count_stored(4, unit=3) - count_stored(2, unit=3) == LAYERS // 2 // 3 * pack
    # The last stage has one micro-batch in flight, however many there are.
    assert count_stored(8, rank=1) == count_stored(2, rank=1)
    # Chunks of nine layers: three micro-batches of the first and two of the second, not 2 of 18.
    assert count_stored(8, vpp=2) - count_stored(8) == (9 * (3 + 2) - 18 * 2) * pack


def test_each_replica_of_a_server_has_a_cache_and_its_sequences() -> None:
    config = build_config(Layout(dp=8), num_samples=66)
    config.rollout = replace(config.rollout, dp=2, num_servers=4, kv_cache_bytes=4 << 30)
    plan = plan_memory(config, MODEL, Conditions("cpu"))
    assert plan.cache.num_tokens == 2 * ((4 << 30) // (LAYERS * 2 * 8 * 128 * 2))
    assert plan.cache.num_needed == 17 * 4000  # the fullest of four servers
    config.rollout.max_num_seqs = 3  # of each replica
    assert plan_memory(config, MODEL, Conditions("cpu")).cache.num_needed == 2 * 3 * 4000


def test_a_trainer_on_its_own_pool_syncs_from_its_fullest_stage() -> None:
    config = build_config(Layout(pp=4))
    config.placement.rollout = "own"
    plan = plan_memory(config, MODEL, Conditions("cpu"))
    moment = get_moment(plan, "weight sync, trainer", rank=3)
    # Embedding and head have as many elements; the last stage has the last norm beside.
    assert moment.ranks == (3,)
    last = plan.roles[0].stages[3]
    assert moment.total == (2 + 4 + 12) * last.parameters + 2 * (64 << 20)


# Adam on the host


def test_adam_on_the_host_moves_gradients_and_weights_over_the_link() -> None:
    config = build_config(Layout(dp=8))
    config.actor.optimizer = OptimizerConfig(distributed=True, cpu_offload=True)
    step = predict_step(config, MODEL, H100, LENGTHS)
    dense, _ = TrainingModel(count_work(MODEL), config.actor, H100).count_local_parameters()
    host = H100.host_bandwidth * H100.host_share
    # Adam reads a gradient and 12 bytes, writes 12 and a weight; gradient and weight cross.
    assert step.update.optimizer_s == pytest.approx(dense / 8 * (4 + 24 + 2 + 4 + 2) / host)
    assert step.offload_s == pytest.approx(2 * dense * 2 / host)  # no state of Adam
    config.actor.optimizer.cpu_offload = False
    step = predict_step(config, MODEL, H100, LENGTHS)
    assert step.offload_s == pytest.approx(2 * (dense * 2 + dense / 8 * 12) / host)


def test_a_host_has_what_its_ranks_leave_and_a_checkpoint_in_flight() -> None:
    config = build_config(Layout(dp=4))
    config.actor.optimizer = OptimizerConfig(distributed=True)
    config.checkpoint.async_save = True
    plan = plan_memory(config, MODEL, Conditions("cpu"))
    [stage] = plan.roles[0].stages
    weights, adam = 4 * 2 * stage.parameters, 4 * (12 * stage.parameters // 4)
    assert plan.host["offloaded weights"] == weights
    assert plan.host["offloaded optimizer"] == adam
    assert plan.host["checkpoint in flight"] == weights + adam
    config.actor.optimizer.cpu_offload = True
    plan = plan_memory(config, MODEL, Conditions("cpu"))
    host, update = plan.host, get_moment(plan, "actor: update")
    assert "optimizer" not in update.kinds and update.kinds["gradients"] == 4 * stage.parameters
    assert host["optimizer on the host"] == 4 * 16 * (stage.parameters // 4)
    assert host["offloaded weights"] == weights and "offloaded optimizer" not in host
    config.placement.rollout = "own"  # then nobody else has the actor's devices
    assert "offloaded weights" not in plan_memory(config, MODEL, Conditions("cpu")).host


@pytest.mark.parametrize(
    ("layout", "gpus_per_node", "parameters"),
    [
        (Layout(pp=2), 1, 18 * LAYER + VOCABULARY + 4096),  # the second of two, by its last norm
        (Layout(pp=4), 2, 18 * LAYER + VOCABULARY + 4096),
        (Layout(pp=3, first_stage_layers=4, last_stage_layers=4), 1, 28 * LAYER),  # the second
        (Layout(pp=4), 3, 27 * LAYER + VOCABULARY),  # the first; the second has one rank
    ],
)
def test_host_bytes_are_those_of_the_fullest_of_several_nodes(
    layout: Layout, gpus_per_node: int, parameters: int
) -> None:
    plan = plan_memory(build_config(layout), MODEL, Conditions(gpus_per_node=gpus_per_node))
    assert plan.host["offloaded weights"] == 2 * parameters
    assert plan.host["offloaded optimizer"] == 12 * parameters


# Pools


def test_a_reference_on_its_own_pool_has_contexts_of_its_own_and_stays_on_its_devices() -> None:
    config = build_config(Layout(dp=8))
    config.algorithm.kl_coef, config.rollout.num_servers = 0.1, 8
    config.placement.reference = "shared"
    shared = plan_memory(config, MODEL, Conditions())
    name = "reference: log-probs"
    assert get_moment(shared, name).kinds["CUDA contexts"] == 3 * CONTEXT_BYTES
    config.placement.reference = "own"
    alone = plan_memory(config, MODEL, Conditions())
    assert get_moment(alone, name).kinds["CUDA contexts"] == CONTEXT_BYTES
    assert get_moment(alone, "actor: update").kinds["CUDA contexts"] == 2 * CONTEXT_BYTES
    [weights] = [s.weight_bytes for r in alone.roles if r.name == "reference" for s in r.stages]
    more = shared.host["offloaded weights"] - alone.host["offloaded weights"]
    assert more == 8 * weights
    # Two roles with pools of their own do not share one.
    config.placement.rollout = "own"
    apart = plan_memory(config, MODEL, Conditions())
    for name in ("reference: log-probs", "rollout: generate", "actor: update"):
        assert get_moment(apart, name).kinds["CUDA contexts"] == CONTEXT_BYTES
    # Beside the actor alone, with servers elsewhere, it takes turns still.
    config.placement.reference, config.placement.rollout = "shared", "own"
    assert plan_memory(config, MODEL, Conditions()).host["offloaded weights"] == 2 * 8 * weights


def test_pools_have_the_devices_of_their_largest_role(tmp_path: Path) -> None:
    config = build_config(Layout(tp=2, dp=2))
    config.rollout.num_servers = 2
    assert plan_run(config).num_devices == 4
    config.warm_start.num_steps, config.warm_start.layout = 1, Layout(dp=8)
    assert plan_run(config).num_devices == 8
    config.algorithm.advantage, config.critic.layout = "gae", Layout(dp=16)
    assert plan_run(config).num_devices == 16
    config.models = {"judge": {"path": str(tmp_path), "num_servers": 3, "tp": 2}}
    assert plan_run(config).num_devices == 16 + 3 * 2


def test_servers_on_their_own_pool_have_a_bundle_for_each_node() -> None:
    config = build_config(Layout(dp=4))
    config.placement.rollout = "own"
    config.rollout.tp, config.rollout.num_servers, config.rollout.nodes_per_server = 16, 3, 2
    pool = plan_run(config).get_pool("rollout")
    assert (pool.num_bundles, pool.devices_per_bundle) == (3 * 2, 8)


# Trainers


def test_a_weight_sync_brings_a_worker_its_share_over_the_link_of_all_devices() -> None:
    config = build_config(Layout(dp=8))
    config.rollout.tp, config.rollout.num_servers = 2, 4
    step = predict_step(config, MODEL, H100, LENGTHS)
    link = H100.nvlink_bandwidth * H100.nvlink_share
    # Into a bucket and out of it: two latencies. Half of 8.19 B parameters in bfloat16.
    expected = 8_190_735_360 * 2 / 2 / link + 2 * H100.nvlink_latency_s
    assert step.weight_sync_s == pytest.approx(expected)


def test_a_weight_sync_brings_each_replica_of_a_server_all_but_experts() -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts with three matrices of 2048 by 768."""
    config = build_config(Layout(dp=8))
    config.rollout = replace(config.rollout, tp=2, dp=2, ep=True, num_servers=2)
    model = test_memory.read_model("Qwen3-30B-A3B")
    step = predict_step(config, model, H100, LENGTHS)
    experts = 48 * 128 * 3 * 2048 * 768
    worker = (30_532_122_624 - experts) / 2 + experts / 4
    link = H100.nvlink_bandwidth * H100.nvlink_share
    expected = 2 * worker / link + 2 * H100.nvlink_latency_s
    assert step.weight_sync_s == pytest.approx(expected)


def test_servers_that_never_drain_generate_at_the_rate_of_full_slots() -> None:
    """Sixteen samples of 1,000 tokens on each of four servers, and their prompts."""
    config = build_config(Layout(dp=4))
    config.placement.rollout, config.rollout.num_servers = "own", 4
    config.trainer.mode = "fully_async"
    step = predict_step(config, MODEL, H100, LENGTHS)
    rate, prompts_s = step.generation.steady_tokens_per_s, step.generation.prefill_s
    steady_s = 16 * 1000 / rate + prompts_s
    assert steady_s < step.generation.total_s
    assert step.step_s == pytest.approx(max(steady_s, step.training_s) + step.weight_sync_s)
    assert step.trainer_idle_s == pytest.approx(max(0, steady_s - step.training_s))
    assert step.servers_idle_s == pytest.approx(max(0, step.training_s - steady_s))
    tokens = 64 * (1000 + 256)
    assert step.tokens_per_s == pytest.approx(tokens / step.step_s / 8)
