"""Changes of settings that a plan tries, and their values."""

from __future__ import annotations

import pytest

from mcore_rl.config.schema import Layout, OptimizerConfig
from mcore_rl.planner.fixes import apply_change, list_changes
from tests.unit.planner import test_memory


def list_names(layout: Layout, model: str = "Qwen3-8B", **engine: object) -> dict[str, dict]:
    config = test_memory.build_config(layout, **engine)
    changes = list_changes(config, test_memory.read_model(model))
    return {name: dict(change) for name, (change, _) in changes.items()}


def test_an_axis_doubles_for_half_of_the_data_parallel_ranks() -> None:
    changes = list_names(Layout(tp=2, dp=4))
    for axis, size in (("tp", 4), ("pp", 2), ("cp", 2)):
        expected = {f"actor.layout.{axis}": size, "actor.layout.dp": 2}
        assert changes[f"actor: {axis}"] == expected
    assert "actor: tp" not in list_names(Layout(tp=2, dp=3)) and "actor: ep" not in changes
    changes = list_names(Layout(dp=4, ep=4), "Qwen3-30B-A3B")
    assert changes["actor: ep"] == {"actor.layout.ep": 8}


def test_micro_batches_shrink_to_the_longest_sequence_on_a_context_parallel_rank() -> None:
    """Sequences have 1,000 and 3,000 tokens; micro-batches 4,096."""
    changes = list_names(Layout(cp=3))
    assert changes["actor: micro-batches"] == {"actor.max_tokens_per_micro_batch": 1334}
    config = test_memory.build_config(Layout())
    config.actor.max_tokens_per_micro_batch = 4000
    assert "actor: micro-batches" not in list_changes(config, test_memory.read_model("Qwen3-8B"))


def test_servers_have_half_of_the_cache_or_twice_the_tensor_parallel_ranks() -> None:
    config = test_memory.build_config(Layout(dp=4))
    config.rollout.num_servers, config.rollout.kv_cache_bytes = 4, 8 << 30
    changes = list_changes(config, test_memory.read_model("Qwen3-8B"))
    assert dict(changes["KV cache"][0]) == {"rollout.kv_cache_bytes": 4 << 30}
    expected = {"rollout.tp": 2, "rollout.num_servers": 2}
    assert dict(changes["servers' tp"][0]) == expected
    expected = {"actor.layout.dp": 8, "rollout.num_servers": 8}
    assert dict(changes["GPUs"][0]) == expected
    config.rollout.num_servers = 3
    assert "servers' tp" not in list_changes(config, test_memory.read_model("Qwen3-8B"))


@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_a_distributed_optimizer_needs_ranks_to_share_it(axis: str) -> None:
    shared, offload = list_names(Layout(**{axis: 2})), "actor: Adam on the host"
    assert shared["actor: distributed optimizer"] == {"actor.optimizer.distributed": True}
    alone = list_names(Layout())
    assert "actor: distributed optimizer" not in alone
    expected = {"actor.optimizer.distributed": True, "actor.optimizer.cpu_offload": True}
    assert alone[offload] == expected
    distributed = list_names(Layout(), optimizer=OptimizerConfig(distributed=True))
    assert distributed[offload] == {"actor.optimizer.cpu_offload": True}


def test_a_change_leaves_the_settings_that_it_starts_from() -> None:
    config = test_memory.build_config(Layout(tp=2))
    changed = apply_change(config, (("actor.layout.tp", 4),))
    assert (config.actor.layout.tp, changed.actor.layout.tp) == (2, 4)
