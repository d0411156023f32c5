"""Stages, replicas of servers, pools and mini-batches of a plan, counted by hand."""

from __future__ import annotations

import json

import pytest

from mcore_rl.config.schema import Layout, OptimizerConfig, RLConfig
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.models.base import get_family
from mcore_rl.planner.activations import count_layer_bytes
from mcore_rl.planner.flops import count_work
from mcore_rl.planner.hardware import load_hardware
from mcore_rl.planner.memory import plan_memory
from mcore_rl.planner.roles import RolePlan
from mcore_rl.planner.step import StepTime, predict_step
from mcore_rl.planner.training import Load, TrainingModel
from tests.unit.planner import test_memory, test_step

MODEL = test_memory.read_model("Qwen3-8B")
# Of Qwen3-8B: queries and results of 32 heads of 128, keys and values of 8; gate, up and down.
ATTENTION, MLP = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 12288
NORMS = 2 * 4096 + 2 * 128  # before attention and MLP; of a head's queries and keys
LAYER = ATTENTION + MLP + NORMS
VOCABULARY = 151936 * 4096  # of the embedding, and of the output layer


def plan(config: RLConfig) -> dict[str, RolePlan]:
    return {role.name: role for role in plan_memory(config, MODEL, test_memory.CPU).roles}


@pytest.mark.parametrize("layout", [Layout(pp=4), Layout(pp=4, vpp=3)])
def test_stages_have_their_layers_and_the_ends_embedding_and_head(layout):
    first, second, third, last = plan(test_memory.build_config(layout))["actor"].stages
    assert second.parameters == third.parameters == 9 * LAYER
    assert first.parameters == 9 * LAYER + VOCABULARY
    assert last.parameters == 9 * LAYER + VOCABULARY + 4096
    assert [stage.ranks for stage in (first, second, third, last)] == [(0,), (1,), (2,), (3,)]


def test_a_critic_has_the_sizes_of_the_model_that_it_begins_with(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 20}))
    config = test_memory.build_config(Layout())
    config.algorithm.advantage, config.critic.layout = "gae", Layout()
    size, step = plan(config)["critic"].stages[0].parameters, predict(config)
    head = 4096 + 1  # of one label, with a bias
    assert size == 36 * LAYER + VOCABULARY + 4096 + head
    config.critic.model_path = str(tmp_path)
    assert plan(config)["critic"].stages[0].parameters == size - 16 * LAYER
    # In proportion to its matrices, all but the embedding: of 20 layers, not of 36.
    assert predict(config).values_s == pytest.approx(step.values_s * 20 / 36, rel=0.05)


def test_a_worker_has_its_share_of_matrices_whatever_the_replicas():
    config = test_memory.build_config(Layout(tp=2))
    config.rollout.tp, config.rollout.dp, config.rollout.num_servers = 2, 2, 3
    planned = plan_memory(config, MODEL, test_memory.CPU)
    [servers] = [role for role in planned.roles if role.name == "rollout"]
    [stage] = servers.stages
    assert stage.ranks == tuple(range(3 * 2 * 2))
    assert stage.parameters == 36 * ((ATTENTION + MLP) // 2 + NORMS) + VOCABULARY + 4096
    assert stage.weight_bytes == 2 * stage.parameters
    # A token has keys and values of 4 heads in 36 layers; both replicas of a server have a cache.
    assert planned.cache.num_tokens == 2 * (config.rollout.kv_cache_bytes // (36 * 2 * 4 * 128 * 2))


def test_adam_on_the_host_counts_the_ranks_of_a_node():
    config = test_memory.build_config(Layout(pp=4, dp=4), optimizer=OptimizerConfig())
    config.actor.optimizer.distributed = config.actor.optimizer.cpu_offload = True
    planned = plan_memory(config, MODEL, test_memory.CPU)
    # The eight ranks of the fullest node are the last two stages, and share each stage by four.
    shards = (9 * LAYER + 9 * LAYER + VOCABULARY + 4096) // 4 * 4
    assert planned.host["optimizer on the host"] == pytest.approx(16 * shards, rel=1e-6)
    assert "offloaded optimizer" not in planned.host


def build_step_config(**algorithm: object) -> RLConfig:
    config = test_step.build_config("Qwen3-8B", "sync", "shared")
    config.actor.layout.dp = config.rollout.num_servers = 8
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    return config


def predict(config: RLConfig) -> StepTime:
    return predict_step(config, MODEL, test_step.H100, test_step.LENGTHS)


def test_a_reference_on_its_own_pool_takes_its_devices_and_none_of_the_actors_memory():
    config = build_step_config(kl_coef=0.01)
    config.placement.reference = "shared"
    shared = {m.name: m for m in plan_memory(config, MODEL, test_memory.CPU).moments}
    shared_step = predict(config)
    assert plan_run(config).num_devices == 8
    config.placement.reference = "own"
    assert plan_run(config).num_devices == 8 + 8
    planned = plan_memory(config, MODEL, test_memory.CPU)
    moments = {moment.name: moment for moment in planned.moments}
    scores = "reference: log-probs"
    assert moments[scores].kinds["weights"] == 2 * (36 * LAYER + 2 * VOCABULARY + 4096)
    assert "gradients" not in moments[scores].kinds and "optimizer" not in moments[scores].kinds
    assert moments["actor: update"].total <= shared["actor: update"].total
    step = predict(config)
    assert step.num_devices == 16 and shared_step.num_devices == 8
    # In a synchronous step the actor waits for it: it saves no time.
    assert step.reference_s == shared_step.reference_s > 0
    assert step.training_s == pytest.approx(shared_step.training_s)


def test_a_step_has_an_update_for_each_mini_batch_of_its_share():
    once, config = predict(build_step_config()), build_step_config(num_mini_batches=4)
    step = predict(config)
    tokens = 64 * 16 * (test_step.LENGTHS.mean + test_step.LENGTHS.prompt)
    engine = TrainingModel(count_work(MODEL), config.actor, load_hardware("h100"), "bfloat16")
    update = engine.predict_update(Load(tokens / 4, test_step.LENGTHS.sequence))
    assert step.tokens == once.tokens == tokens and step.num_mini_batches == 4
    assert step.update.total_s == update.total_s
    assert step.update_s == pytest.approx(4 * update.total_s)
    assert step.update_s > once.update_s  # Adam, and the sum of gradients, four times
    rest_s = step.generation.total_s + step.offload_s + step.weight_sync_s
    assert step.step_s == pytest.approx(rest_s + step.training_s)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_torch_attention_stores_gathered_keys_and_values(cp):
    fields = get_family(MODEL).config_map(MODEL)
    parts = count_layer_bytes(fields, 0, Layout(cp=cp), 2, "torch")
    query, key = 32 * 128, 8 * 128
    # The projection with rotated keys; or keys and values of all ranks, of each of its own tokens.
    projected = query + 3 * key if cp == 1 else 2 * cp * key
    # Rotated queries, and the result; normalised queries and keys, and contiguous queries.
    elements = projected + 2 * query + 2 * query + key
    float32 = 32 + 32 + 8  # maxima of the softmax; factors of the norms of queries and keys
    angles = 4 * 128  # cosines and sines of queries and of keys
    assert parts["heads"] == 2 * elements + 4 * float32 + 2 * angles
    assert parts["result"] == 2 * (query + 4096)
    assert parts["mlp"] == 2 * 5 * 12288
