"""Pools of devices from what `placement` says."""

from __future__ import annotations

import pytest

from mcore_rl.config.schema import Layout, LoRAConfig, RLConfig
from mcore_rl.jobs.placement import get_served_models
from mcore_rl.planner.pools import PoolPlan, build_pool_plans, count_devices


def config(**placement: str) -> RLConfig:
    """Build an actor of four ranks, a reference, a warm start on two ranks, two servers of two."""
    made = RLConfig()
    made.actor.layout, made.warm_start.layout = Layout(tp=2, dp=2), Layout(dp=2)
    made.warm_start.num_steps, made.algorithm.kl_coef = 1, 0.1
    made.rollout.num_servers = made.rollout.tp = 2
    for role, pool in ({"rollout": "shared"} | placement).items():
        setattr(made.placement, role, pool)
    return made


@pytest.mark.parametrize(
    ("placement", "plans"),
    [
        ({}, {"shared pool": PoolPlan(("actor", "reference", "rollout"), 4)}),
        (
            {"actor": "own", "reference": "own", "rollout": "own"},
            {
                "actor": PoolPlan(("actor",), 4),
                "reference": PoolPlan(("reference",), 4),
                "rollout": PoolPlan(("rollout",), 2, devices_per_bundle=2),
            },
        ),
        (
            {"actor": "training", "reference": "training", "rollout": "servers"},
            {
                "training pool": PoolPlan(("actor", "reference"), 4),
                "servers pool": PoolPlan(("rollout",), 2, devices_per_bundle=2),
            },
        ),
    ],
)
def test_roles_of_a_pool_have_one_of_the_size_of_the_largest(placement, plans):
    plans_by_pool = build_pool_plans(config(**placement))
    assert plans_by_pool == plans
    assert count_devices(plans_by_pool) == 4 * len(plans)


def test_a_pool_is_as_large_as_what_is_on_it_at_any_time():
    more_servers, wide_start = config(), config()
    more_servers.rollout.num_servers = 4
    assert count_devices(build_pool_plans(more_servers)) == 8
    wide_start.warm_start.layout = Layout(dp=6)
    assert count_devices(build_pool_plans(wide_start)) == 6


def test_a_server_over_nodes_has_a_bundle_on_each():
    wide = config(rollout="own")
    wide.rollout.tp, wide.rollout.nodes_per_server = 16, 2
    assert build_pool_plans(wide)["rollout"] == PoolPlan(("rollout",), 4, devices_per_bundle=8)


def test_a_lora_actor_needs_no_devices_for_its_reference():
    adapted = config(reference="own")
    adapted.actor.lora = LoRAConfig(rank=4)
    assert build_pool_plans(adapted) == {"shared pool": PoolPlan(("actor", "rollout"), 4)}


def test_a_frozen_model_has_devices_of_its_own_a_bundle_for_each_server():
    talks = config()
    talks.agent.loop = "user"
    talks.models = {"user": {"num_servers": 3, "tp": 2}, "judge": {"path": "elsewhere"}}
    plans_by_pool = build_pool_plans(talks)
    assert plans_by_pool["models.user"] == PoolPlan(("models.user",), 3, devices_per_bundle=2)
    assert plans_by_pool["models.judge"] == PoolPlan(("models.judge",), 1)
    assert plans_by_pool["shared pool"] == PoolPlan(("actor", "reference", "rollout"), 4)
    assert count_devices(plans_by_pool) == 4 + 6 + 1
    talks.rollout.lora, talks.models["user"] = "adapter", {"adapter": "on the policy's servers"}
    talks.warm_start.num_steps = 0
    assert count_devices(build_pool_plans(talks)) == 4 + 1
    paths = {name: model.path for name, model in get_served_models(talks).items()}
    assert paths == {"user": talks.model.path, "judge": "elsewhere"}
