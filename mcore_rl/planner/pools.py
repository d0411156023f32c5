"""Pools of devices of a run, and the roles on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.config.rules import OWN_POOL, get_pool
from mcore_rl.config.rules_rollout import ROLE, build_models_with_servers
from mcore_rl.config.schema import RLConfig
from mcore_rl.planner.roles import get_frozen_engines, has_reference_model, needs_critic


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """`roles` share `num_bundles` bundles of `devices_per_bundle` devices."""

    roles: tuple[str, ...]
    num_bundles: int
    devices_per_bundle: int = 1


def build_pool_plans(config: RLConfig) -> dict[str, PoolPlan]:
    """Return the plan of each pool, by name; the pool of a single role has the role's name.

    A pool is as large as its largest role. On a pool of their own, servers have one bundle per
    server and node, which Ray places on one node; on a shared pool a server takes as many bundles
    as it has workers.
    """
    rollout, sizes = config.rollout, {"actor": config.actor.layout.world_size}
    if config.warm_start.num_steps:  # runs on the actor's devices, before the actor starts
        sizes["actor"] = max(sizes["actor"], config.warm_start.layout.world_size)
    if has_reference_model(config):
        sizes["reference"] = config.actor.layout.world_size
    if needs_critic(config):
        sizes["critic"] = config.critic.layout.world_size
    sizes |= {role: engine.layout.world_size for role, engine in get_frozen_engines(config).items()}
    sizes["rollout"] = rollout.num_servers * rollout.num_workers
    members: dict[str, list[str]] = {}
    for role in sizes:
        pool = get_pool(config.placement, role)
        members.setdefault(role if pool == OWN_POOL else f"{pool} pool", []).append(role)
    plans = {}
    for name, roles in members.items():
        if roles == ["rollout"]:
            per_node = rollout.workers_per_node
            plans[name] = PoolPlan(("rollout",), sizes["rollout"] // per_node, per_node)
        else:
            plans[name] = PoolPlan(tuple(roles), max(sizes[role] for role in roles))
    for name, model in build_models_with_servers(config).items():
        role = f"{ROLE}{name}"
        plans[role] = PoolPlan((role,), model.servers.num_servers, model.servers.num_workers)
    return plans


def count_devices(plans: Mapping[str, PoolPlan]) -> int:
    """Return the devices of all pools."""
    return sum(plan.num_bundles * plan.devices_per_bundle for plan in plans.values())
