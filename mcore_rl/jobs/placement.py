"""Which pool of devices each role of a run is on: `placement` as requests to Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.inputs import get_needs
from mcore_rl.config.resolve import OWN_POOL, get_pool
from mcore_rl.config.resolve_algorithm import build_teachers
from mcore_rl.config.resolve_rollout import ROLE, ServedModel, build_served_models
from mcore_rl.config.schema import EngineConfig, Layout, RLConfig, RolloutConfig
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.rollout.server_pool import ServerPool


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """`roles` share `num_bundles` bundles of `devices_per_bundle` devices."""

    roles: tuple[str, ...]
    num_bundles: int
    devices_per_bundle: int = 1


def pool_plans(config: RLConfig) -> dict[str, PoolPlan]:
    """By name; a role's own pool has the role's name. Only roles that the run has.

    A pool is as large as the largest of its roles. Servers on separate devices have one bundle
    each and node, so that Ray keeps the workers in it on one node; on a shared pool each takes as
    many bundles as workers.
    """
    rollout, sizes = config.rollout, {"actor": config.actor.layout.world_size}
    if config.warm_start.num_steps:  # on the actor's devices, before it
        sizes["actor"] = max(sizes["actor"], config.warm_start.layout.world_size)
    if needs_reference(config):
        sizes["reference"] = config.actor.layout.world_size
    if needs_critic(config):
        sizes["critic"] = config.critic.layout.world_size
    sizes |= {role: engine.layout.world_size for role, engine in frozen_engines(config).items()}
    sizes["rollout"] = rollout.num_servers * rollout.tp
    members: dict[str, list[str]] = {}
    for role in sizes:
        pool = get_pool(config.placement, role)
        members.setdefault(role if pool == OWN_POOL else f"{pool} pool", []).append(role)
    plans = {}
    for name, roles in members.items():
        if roles == ["rollout"]:
            per_node = rollout.tp // rollout.nodes_per_server
            plans[name] = PoolPlan(("rollout",), sizes["rollout"] // per_node, per_node)
        else:
            plans[name] = PoolPlan(tuple(roles), max(sizes[role] for role in roles))
    for name, model in build_served_models(config).items():
        role = f"{ROLE}{name}"
        plans[role] = PoolPlan((role,), model.servers.num_servers, model.servers.tp)
    return plans


def places(groups: Sequence[WorkerGroup | ServerPool]) -> list[str]:
    """A line a group on which node each of its ranks is; none while all are on one node."""
    hosts = [{rank: info.host for rank, info in group.worker_infos.items()} for group in groups]
    if len({host for found in hosts for host in found.values()}) < 2:
        return []
    return [
        f"{group.name}: " + ", ".join(f"rank {rank} on {found[rank]}" for rank in sorted(found))
        for group, found in zip(groups, hosts, strict=True)
    ]


def needs_reference(config: RLConfig) -> bool:
    """Whether there is a separate reference model; a LoRA actor is its own reference."""
    return bool(config.algorithm.kl_coef) and not config.actor.lora.rank


def needs_critic(config: RLConfig) -> bool:
    """Whether there is a value model: the advantage function reads values."""
    return "values" in get_needs(ADVANTAGES[config.algorithm.advantage])


def models_of(config: RLConfig) -> set[str]:
    """The roles of a run that have a training engine."""
    found = {"reference": needs_reference(config), "critic": needs_critic(config)}
    needed = {role for role, is_needed in found.items() if is_needed}
    return {"actor"} | needed | frozen_engines(config).keys()


def frozen_engines(config: RLConfig) -> dict[str, EngineConfig]:
    """Of the roles that only score and have settings of their own: reward_model, teacher.NAME."""
    found: dict[str, EngineConfig] = {}
    if config.reward_model.model_path:
        found["reward_model"] = config.reward_model
    for name, teacher in build_teachers(config.teacher).items():
        found[f"teacher.{name}"] = teacher.engine
    return found


def frozen_paths(config: RLConfig) -> dict[str, str]:
    """The checkpoints of these roles; a teacher without one is what the actor begins with."""
    found = {}
    if config.reward_model.model_path:
        found["reward_model"] = config.reward_model.model_path
    for name, teacher in build_teachers(config.teacher).items():
        found[f"teacher.{name}"] = teacher.model_path or config.model.path
    return found


def servers_of(config: RLConfig, role: str) -> RolloutConfig | None:
    """Of the policy and of models with servers of their own; None for other roles."""
    if role == "rollout":
        return config.rollout
    model = (
        build_served_models(config).get(role.removeprefix(ROLE)) if role.startswith(ROLE) else None
    )
    return model.servers if model else None


def models_with_paths(config: RLConfig) -> dict[str, ServedModel]:
    """Those of `models`; one without a path is what the actor begins with."""
    models = build_served_models(config).items()
    return {name: replace(model, path=model.path or config.model.path) for name, model in models}


def num_devices(plans: Mapping[str, PoolPlan]) -> int:
    return sum(plan.num_bundles * plan.devices_per_bundle for plan in plans.values())


class Pools:
    """The pools of a run, opened when the first of their roles is started. A context manager."""

    def __init__(self, config: RLConfig, resource: str, log_dir: Path) -> None:
        """`resource` is what Ray calls a device."""
        self._config, self._resource, self._log_dir = config, resource, log_dir
        self._plans = pool_plans(config)
        self._open: dict[str, ResourcePool] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def gpu_ids(self, role: str) -> tuple[str, ...]:
        """Of each of the role's ranks, where Ray itself shows it fewer GPUs than are its own."""
        plan = self._plan(role)[1]
        stride = self._bundles_per_rank(role, plan)
        if self._resource != "GPU" or stride == 1:
            return ()
        found = self._pool(role).get_gpu_ids(1 / len(plan.roles), self._config.timeouts.start_s)
        return tuple(
            ",".join(found[start : start + stride]) for start in range(0, len(found), stride)
        )

    def group(
        self,
        role: str,
        worker: type,
        args: Sequence[Any],
        layout: Layout,
        *,
        first_rank: int = 0,
        **options: Any,
    ) -> WorkerGroup:
        """A group of workers for a role, or for its ranks from `first_rank` on.

        `options` are those of WorkerGroup. It is the caller's to close.

        Raises ConfigError when the cluster does not provide the devices.
        """
        _, plan = self._plan(role)
        return WorkerGroup(
            worker,
            init_args=args,
            layout=layout,
            pool=self._pool(role),
            timeouts=self._config.timeouts,
            share=1 / len(plan.roles),
            bundles_per_rank=self._bundles_per_rank(role, plan),
            first_bundle=first_rank * self._bundles_per_rank(role, plan),
            **options,
        )

    def _plan(self, role: str) -> tuple[str, PoolPlan]:
        return next((n, plan) for n, plan in self._plans.items() if role in plan.roles)

    def _bundles_per_rank(self, role: str, plan: PoolPlan) -> int:
        """A rank of the servers is a server's node, with as many workers as GPUs."""
        rollout = self._config.rollout
        is_spread = role == "rollout" and plan.roles != ("rollout",)
        return rollout.tp // rollout.nodes_per_server if is_spread else 1

    def _pool(self, role: str) -> ResourcePool:
        name, plan = self._plan(role)
        if name not in self._open:
            self._open[name] = self._stack.enter_context(
                ResourcePool(
                    plan.num_bundles,
                    {self._resource: plan.devices_per_bundle},
                    timeout_s=self._config.timeouts.start_s,
                    log_dir=self._log_dir,
                )
            )
        return self._open[name]
