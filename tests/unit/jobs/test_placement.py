"""Pools of devices from what `placement` says."""

from __future__ import annotations

import pytest

from mcore_rl.config.schema import Layout, LoRAConfig, RLConfig
from mcore_rl.jobs.run_plan import Pool, plan_run


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
    ("placement", "pools"),
    [
        ({}, [Pool("shared pool", ("actor", "reference", "rollout"), 4)]),
        (
            {"actor": "own", "reference": "own", "rollout": "own"},
            [
                Pool("actor", ("actor",), 4),
                Pool("reference", ("reference",), 4),
                Pool("rollout", ("rollout",), 2, devices_per_bundle=2),
            ],
        ),
        (
            {"actor": "training", "reference": "training", "rollout": "servers"},
            [
                Pool("training pool", ("actor", "reference"), 4),
                Pool("servers pool", ("rollout",), 2, devices_per_bundle=2),
            ],
        ),
    ],
)
def test_roles_of_a_pool_have_one_of_the_size_of_the_largest(placement, pools):
    plan = plan_run(config(**placement))
    assert [*plan.pools] == pools
    assert plan.num_devices == 4 * len(pools)


def test_a_pool_is_as_large_as_what_is_on_it_at_any_time():
    more_servers, wide_start = config(), config()
    more_servers.rollout.num_servers = 4
    assert plan_run(more_servers).num_devices == 8
    wide_start.warm_start.layout = Layout(dp=6)
    assert plan_run(wide_start).num_devices == 6


def test_a_server_over_nodes_has_a_bundle_on_each():
    wide = config(rollout="own")
    wide.rollout.tp, wide.rollout.nodes_per_server = 16, 2
    assert plan_run(wide).get_pool("rollout") == Pool(
        "rollout", ("rollout",), 4, devices_per_bundle=8
    )


def test_a_lora_actor_needs_no_devices_for_its_reference():
    adapted = config(reference="own")
    adapted.actor.lora = LoRAConfig(rank=4)
    assert plan_run(adapted).pools == (Pool("shared pool", ("actor", "rollout"), 4),)


def test_a_frozen_model_has_devices_of_its_own_a_bundle_for_each_server():
    talks = config()
    talks.agent.loop = "user"
    talks.models = {"user": {"num_servers": 3, "tp": 2}, "judge": {"path": "elsewhere"}}
    assert plan_run(talks).pools == (
        Pool("shared pool", ("actor", "reference", "rollout"), 4),
        Pool("models.user", ("models.user",), 3, devices_per_bundle=2),
        Pool("models.judge", ("models.judge",), 1),
    )
    assert plan_run(talks).num_devices == 4 + 6 + 1
    talks.rollout.lora, talks.models["user"] = "adapter", {"adapter": "on the policy's servers"}
    talks.warm_start.num_steps = 0
    assert plan_run(talks).num_devices == 4 + 1
    paths = {name: model.path for name, model in plan_run(talks).models.items()}
    assert paths == {"user": talks.model.path, "judge": "elsewhere"}
