"""Plans of runs, worked out by hand from their settings."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from mcore_rl.algorithms.losses import linear_in_scores, negative_log_likelihood
from mcore_rl.config.schema import DPOConfig, Layout, LoRAConfig, RLConfig, RMConfig, SFTConfig
from mcore_rl.jobs.run_plan import Pool, RunPlan, plan_evaluation, plan_run, plan_supervised
from mcore_rl.trainers.policy_loss import PolicyLoss


def build_config() -> RLConfig:
    """Return settings with every role."""
    config = RLConfig(seed=3, output_dir="out")
    config.model.path, config.placement.rollout = "policy", "shared"
    config.actor.layout, config.critic.layout = Layout(tp=2, dp=2), Layout(dp=8)
    config.actor.moe.router_replay, config.actor.indexer_replay = "record", "record"
    config.warm_start.num_steps, config.warm_start.layout = 5, Layout(dp=6)
    config.trainer.num_steps, config.algorithm.num_mini_batches = 10, 3
    config.algorithm.advantage, config.algorithm.kl_coef = "gae", 0.1
    config.critic.warmup_steps, config.placement.critic = 4, "own"
    config.reward_model.model_path = "rewards"
    config.teacher.models = {"math": {"model_path": "large", "layout": {"tp": 4}}, "start": {}}
    config.algorithm.distillation.loss, config.algorithm.distillation.top_k = "reverse_kl", 7
    config.rollout.num_servers, config.rollout.tp = 2, 2
    config.models = {"judge": {"path": "judge", "num_servers": 3}}
    return config


def test_each_role_has_its_model_layout_steps_and_pool():
    plan = plan_run(build_config())
    rows = [
        (role.name, role.key, role.path, role.layout, role.spec.total_steps, role.pool)
        for role in plan
    ]
    # The actor skips 4 of 10 steps, of 3 optimizer steps each; the critic skips none.
    assert rows == [
        ("warm_start", "warm_start", "policy", Layout(dp=6), 5, "shared pool"),
        ("actor", "actor", "policy", Layout(tp=2, dp=2), 6 * 3, "shared pool"),
        ("reference", "actor", "policy", Layout(tp=2, dp=2), 0, "shared pool"),
        ("critic", "critic", "policy", Layout(dp=8), 10 * 3, "critic"),
        ("reward_model", "reward_model", "rewards", Layout(), 0, "shared pool"),
        ("teacher.math", "teacher.models.math", "large", Layout(tp=4), 0, "shared pool"),
        ("teacher.start", "teacher.models.start", "policy", Layout(), 0, "shared pool"),
    ]
    kinds = {role.name: role.model_type for role in plan if role.model_type != "language_model"}
    assert kinds == {"critic": "value_model", "reward_model": "reward_model"}
    assert [role.name for role in plan if role.is_scoring()] == [
        "reward_model", "teacher.math", "teacher.start"
    ]  # fmt: skip
    assert {role.name: role.spec.num_top_log_probs for role in plan if role.key != role.name} == {
        "reference": 0, "teacher.math": 7, "teacher.start": 7
    }  # fmt: skip


def test_pools_are_as_large_as_their_largest_role():
    plan = plan_run(build_config())
    roles = ("actor", "reference", "reward_model", "teacher.math", "teacher.start", "rollout")
    assert plan.pools == (
        Pool("shared pool", roles, 6),  # the warm start's
        Pool("critic", ("critic",), 8),
        Pool("models.judge", ("models.judge",), 3),
    )
    assert plan.num_devices == 6 + 8 + 3
    assert plan.servers_sleep
    assert plan.takes_turns("actor")
    assert not plan.takes_turns("critic")
    assert [servers.num_workers for servers in plan.servers] == [4, 3]


def test_the_warm_start_trains_no_adapters_and_the_reference_records_nothing():
    config = build_config()
    plan = plan_run(config)
    for name in ("warm_start", "reference"):
        engine = plan[name].spec.engine
        assert (engine.moe.router_replay, engine.indexer_replay) == ("off", "off"), name
    assert plan["actor"].spec.engine is config.actor
    config.actor.lora = LoRAConfig(rank=4)
    adapted = plan_run(config)
    assert "reference" not in adapted  # the actor without its adapters
    assert adapted["warm_start"].spec.engine.lora.rank == 0
    assert adapted["actor"].spec.engine.lora.rank == 4


def test_each_trained_role_has_its_loss():
    plan = plan_run(build_config())
    losses = {role.name: role.build_worker_arguments()[1] for role in plan}
    assert losses["warm_start"] is negative_log_likelihood
    assert isinstance(losses["actor"], PolicyLoss)
    assert losses["critic"].keywords["settings"].clip_range == RLConfig().critic.clip_range
    assert {name for name, loss in losses.items() if loss is None} == {
        "reference", "reward_model", "teacher.math", "teacher.start"
    }  # fmt: skip


def test_after_the_warm_start_every_role_of_the_policy_has_its_weights():
    config = build_config()
    config.warm_start.num_steps, config.model.path = 0, "out/warm_start"
    plan = plan_run(config)
    assert [role.name for role in plan if role.path == "out/warm_start"] == [
        "actor", "reference", "critic", "teacher.start"
    ]  # fmt: skip
    assert plan.servers[0].model.path == "out/warm_start"
    assert plan.get_pool("actor").num_devices == 4


def test_a_plan_does_not_change():
    plan = plan_run(build_config())
    for part in (plan, plan["actor"], plan.servers[0], plan.pools[0]):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, "other")
    assert plan == plan_run(build_config())
    with pytest.raises(KeyError, match="judge"):
        plan["judge"]


@pytest.mark.parametrize(
    ("loss", "rank", "placement", "pools"),
    [
        ("dpo", 0, "shared", (Pool("model", ("model", "reference"), 2),)),
        ("dpo", 0, "own", (Pool("model", ("model",), 2), Pool("reference", ("reference",), 2))),
        ("dpo", 4, "own", (Pool("model", ("model",), 2),)),  # its own reference
        ("simpo", 0, "own", (Pool("model", ("model",), 2),)),  # reads none
    ],
)
def test_dpo_has_a_reference_where_its_loss_reads_one(loss, rank, placement, pools):
    config = DPOConfig(loss=loss)
    config.engine.layout, config.engine.lora.rank = Layout(dp=2), rank
    config.reference.placement, config.trainer.num_steps = placement, 9
    plan = plan_supervised(config)
    assert plan.pools == pools
    assert plan["model"].spec.total_steps == 9
    assert plan["model"].build_worker_arguments()[1:] == (linear_in_scores, "language_model")
    if reference := plan.find("reference"):
        assert reference.spec == replace(plan["model"].spec, total_steps=0)
        assert not reference.is_trained


def test_sft_and_rm_train_one_model():
    for config, loss, kind in (
        (SFTConfig(), negative_log_likelihood, "language_model"),
        (RMConfig(), linear_in_scores, "reward_model"),
    ):
        plan = plan_supervised(config)
        assert [role.name for role in plan] == ["model"]
        assert plan["model"].build_worker_arguments()[1:] == (loss, kind)


def test_servers_have_the_sequences_that_a_run_sends_to_one_at_once():
    config = build_config()
    config.algorithm.group_size, config.trainer.prompts_per_step = 4, 7
    policy, judge = plan_run(config).servers
    # Whole groups: 4 of 7 go to one of two servers, 3 to one of three.
    assert (policy.num_sequences, policy.sequence_tokens) == (4 * 4, 2048)
    assert (judge.num_sequences, judge.sequence_tokens) == (3 * 4, 2048)
    config.evaluation.num_samples, config.evaluation.max_response_tokens = 2, 3000
    config.data.test_file, config.trainer.eval_samples = "test.jsonl", 21
    policy = plan_run(config).servers[0]
    assert (policy.num_sequences, policy.sequence_tokens) == (11 * 2, 1024 + 3000)
    config.trainer.mode, config.trainer.asynchronous.oversampling = "fully_async", 0.2
    # Steps of versions 0 to 2, and 2 groups more: 12 of 23; the evaluation runs beside them.
    assert plan_run(config).servers[0].num_sequences == 12 * 4 + 11 * 2
    config.trainer.asynchronous.max_groups = 5
    assert plan_run(config).servers[0].num_sequences == 3 * 4 + 11 * 2
    assert plan_evaluation(config).servers[0].num_sequences is None
    assert plan_evaluation(config, 9).servers[0].num_sequences == 5


def test_an_evaluation_starts_servers_alone():
    config = build_config()
    config.placement.rollout = "own"
    plan = plan_evaluation(config)
    assert isinstance(plan, RunPlan)
    assert (plan.roles, plan.num_devices) == ((), 4)
    assert not plan.servers_sleep
