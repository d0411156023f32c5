"""Roles on the nodes of a cluster, and what a weight sync moves between their GPUs."""

from __future__ import annotations

import json

import pytest

from mcore_rl.config.rules import resolve_placement
from mcore_rl.config.schema import (
    AlgorithmConfig,
    EngineConfig,
    Layout,
    ModelConfig,
    PlacementConfig,
    RLConfig,
    RolloutConfig,
    WeightSyncConfig,
)
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.planner.cluster import (
    SyncTraffic,
    assign_gpus,
    compute_sync_traffic,
    fold_node_roles,
)

WEIGHTS = 2 * 8_190_735_360  # Qwen3-8B in bfloat16
NORMS = 2 * (36 * (2 * 4096 + 2 * 128) + 4096)  # of them, what every rank of tp has whole


def config_of(layout: Layout, servers: int, tp: int, method: str = "colocated", **settings: object):
    config = RLConfig(
        model=ModelConfig(dtype="bfloat16"),
        actor=EngineConfig(layout=layout),
        rollout=RolloutConfig(num_servers=servers, tp=tp),
        weight_sync=WeightSyncConfig(method=method),
        **settings,  # type: ignore[arg-type]
    )
    config.placement = resolve_placement(config)
    return config


def qwen() -> dict[str, object]:
    return json.loads((find_published("Qwen3-8B") / "config.json").read_text())


def test_roles_that_take_turns_are_on_the_same_nodes():
    config = config_of(Layout(tp=2, pp=2, dp=4), servers=4, tp=4)
    assert assign_gpus(plan_run(config), 8) == {
        "actor": list(range(16)),
        "rollout": list(range(16)),
    }
    assert list(fold_node_roles(plan_run(config), 8)) == [
        ("nodes 0-1", "actor 0-15 (pp 0-1); rollout servers 0-3")
    ]
    wide = config_of(Layout(tp=2, pp=2, dp=4), servers=1, tp=16)
    assert list(fold_node_roles(plan_run(wide), 8)) == [
        ("nodes 0-1", "actor 0-15 (pp 0-1); rollout server 0, workers 0-15")
    ]


def test_a_server_with_gpus_of_its_own_stays_on_a_node_when_it_fits_one():
    config = config_of(Layout(dp=6), servers=3, tp=4, method="disaggregated")
    assert assign_gpus(plan_run(config), 8)["rollout"] == [*range(8, 16), *range(16, 20)]
    assert list(fold_node_roles(plan_run(config), 8)) == [
        ("node 0", "actor 0-5"),
        ("node 1", "rollout servers 0-1"),
        ("node 2", "rollout server 2, workers 0-3"),
    ]


def test_a_server_that_is_larger_than_a_node_spans_as_many_as_it_says():
    config = config_of(Layout(tp=6), 1, 16, method="disaggregated")
    config.rollout.nodes_per_server = 2
    assert assign_gpus(plan_run(config), 8)["rollout"] == [*range(8, 24)]
    assert [roles for _, roles in fold_node_roles(plan_run(config), 8)][1:] == [
        "rollout server 0, workers 0-15"
    ]


def test_a_reference_with_gpus_of_its_own_comes_behind_the_others():
    placement = PlacementConfig(reference="own")
    config = config_of(
        Layout(tp=2), 2, 1, placement=placement, algorithm=AlgorithmConfig(kl_coef=0.1)
    )
    assert assign_gpus(plan_run(config), 2) == {
        "actor": [0, 1],
        "reference": [2, 3],
        "rollout": [0, 1],
    }


def test_between_the_same_layouts_on_the_same_gpus_nothing_moves():
    config = config_of(Layout(tp=8), servers=1, tp=8)
    held = compute_sync_traffic(config, plan_run(config), qwen(), 8)
    assert held == SyncTraffic(0, 0, WEIGHTS + 7 * NORMS, 0, 0)


@pytest.mark.parametrize(("gpus_per_node", "in_node"), [(8, 0), (16, WEIGHTS)])
def test_to_gpus_of_their_own_servers_get_all_they_need(gpus_per_node, in_node):
    config = config_of(Layout(tp=8), servers=1, tp=1, method="disaggregated")
    traffic = compute_sync_traffic(config, plan_run(config), qwen(), gpus_per_node)
    assert (traffic.received, traffic.in_node, traffic.local) == (WEIGHTS, in_node, 0)
    assert traffic.most_received == WEIGHTS
    assert traffic.most_sent == pytest.approx(WEIGHTS / 8, rel=1e-3)


def test_half_of_what_a_gpu_needs_is_on_it_already():
    config = config_of(Layout(tp=2), servers=2, tp=1)
    traffic = compute_sync_traffic(config, plan_run(config), qwen(), 8)
    assert traffic.received + traffic.local == 2 * WEIGHTS
    assert traffic.local == WEIGHTS + NORMS
    assert traffic.in_node == traffic.received
