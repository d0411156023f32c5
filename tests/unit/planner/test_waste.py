"""Devices without work, counted by hand."""

from __future__ import annotations

from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.planner.waste import list_waste


def build_config() -> RLConfig:
    """Return a run on 4 devices that wastes none: 16 sequences of 100 tokens a step."""
    config = RLConfig()
    config.placement.rollout, config.rollout.num_servers = "shared", 4
    config.actor.layout, config.actor.max_tokens_per_micro_batch = Layout(pp=2, dp=2), 400
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 60, 40
    config.trainer.prompts_per_step, config.algorithm.group_size = 4, 4
    return config


def list_lines(config: RLConfig, gpus_per_node: int | None = None) -> list[str]:
    return [*list_waste(config, plan_run(config), gpus_per_node)]


def test_a_run_whose_devices_all_work_wastes_none():
    assert list_lines(build_config()) == []
    assert list_lines(build_config(), 4) == []


def test_devices_of_a_pool_without_a_part_of_a_role_are_named():
    config = build_config()
    config.rollout.num_servers = 3
    assert list_lines(config) == [
        "wasteful: rollout has 3 of the 4 devices of its pool; the others wait while it works"
    ]
    assert list_lines(config, 8)[1:] == ["wasteful: 4 of the 8 GPUs of these nodes have no role"]


def test_servers_beyond_the_prompts_of_a_step_are_named():
    config = build_config()
    config.trainer.prompts_per_step, config.algorithm.group_size = 3, 8
    assert list_lines(config) == [
        "wasteful: rollout.num_servers=4: a step has 3 prompts at once, and all samples of a "
        "prompt go to one server; 1 of them without work"
    ]
    config.algorithm.filter.prompts_per_round = 4
    assert list_lines(config) == []


def test_mini_batches_too_small_for_the_ranks_are_named():
    config = build_config()
    config.algorithm.num_mini_batches = 4  # of 4 sequences: 2 a rank, which one micro-batch holds
    assert list_lines(config) == [
        "wasteful: actor.layout.dp=2: a mini-batch has 4 sequences, and one micro-batch has room "
        "for 4 (actor.max_tokens_per_micro_batch=400); dp=1 takes as many passes",
        "wasteful: actor.layout.pp=2: micro-batches of a rank in a mini-batch: 1 at most; stages "
        "that wait at any time: 1",
    ]
    config.actor.max_tokens_per_micro_batch = 100
    assert list_lines(config) == []
    config.actor.max_tokens_per_micro_batch = 50  # of one sequence, which it exceeds
    assert list_lines(config) == []


def test_a_critic_is_named_by_its_own_settings():
    config = build_config()
    config.algorithm.advantage, config.critic.layout = "gae", Layout(dp=4)
    assert list_lines(config) == [
        "wasteful: critic.layout.dp=4: a mini-batch has 16 sequences, and one micro-batch has room "
        "for 81 (critic.max_tokens_per_micro_batch=8192); dp=1 takes as many passes"
    ]
