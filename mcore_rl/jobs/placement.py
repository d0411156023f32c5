"""Placement: the pools of devices that a run requests from Ray, and the roles on each pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_lane, validate_rl
from mcore_rl.config.rules_rollout import (
    ROLE,
    ServedModel,
    build_models_with_servers,
    build_served_models,
)
from mcore_rl.config.schema import Layout, RLConfig, RolloutConfig
from mcore_rl.controller import torchrun
from mcore_rl.controller.ray_session import has_gpus
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.routed_experts import ExpertLayers
from mcore_rl.engine.base import (
    check_engine_settings,
    list_unread_settings,
    load_backend,
    use_engine_family,
)
from mcore_rl.jobs.remote_paths import fetch_inputs
from mcore_rl.models.base import (
    get_family,
    get_model_sizes,
    list_moe_layers,
    read_config,
)
from mcore_rl.parallel.devices import DEVICES, detect_device
from mcore_rl.parallel.mesh import split_into_chunks
from mcore_rl.planner.pools import PoolPlan, build_pool_plans
from mcore_rl.planner.roles import (
    build_warm_engine,
    get_frozen_engines,
    has_reference_model,
    needs_critic,
)
from mcore_rl.rollout.server_pool import ServerPool

CPU_RESOURCE = DEVICES["cpu"].ray_resource  # stands for a device on the CPU lane


def list_rank_nodes(groups: Sequence[WorkerGroup | ServerPool]) -> list[str]:
    """Return a line per group with the node of each rank; [] if all are on one node."""
    group_hosts = [
        {rank: info.host for rank, info in group.worker_infos.items()} for group in groups
    ]
    if len({host for hosts in group_hosts for host in hosts.values()}) < 2:
        return []
    return [
        f"{group.name}: " + ", ".join(f"rank {rank} on {hosts[rank]}" for rank in sorted(hosts))
        for group, hosts in zip(groups, group_hosts, strict=True)
    ]


def list_engine_roles(config: RLConfig) -> set[str]:
    """Return the roles of a run that have a training engine."""
    optional = {"reference": has_reference_model(config), "critic": needs_critic(config)}
    needed = {role for role, is_needed in optional.items() if is_needed}
    return {"actor"} | needed | get_frozen_engines(config).keys()


def get_engine_key(role: str) -> str:
    """Return the name of the engine settings of a scoring role."""
    kind, _, name = role.partition(".")
    return f"{kind}.models.{name}" if name else kind


def get_server_config(config: RLConfig, role: str) -> RolloutConfig | None:
    """Return the server settings of the rollout role or of a frozen model; None for other roles."""
    if role == "rollout":
        return config.rollout
    if not role.startswith(ROLE):
        return None
    model = build_models_with_servers(config).get(role.removeprefix(ROLE))
    return model.servers if model else None


def get_served_models(config: RLConfig) -> dict[str, ServedModel]:
    """Return the frozen models of `models`; one without a path gets the policy's path."""
    models = build_served_models(config).items()
    return {name: replace(model, path=model.path or config.model.path) for name, model in models}


def detect_lane() -> str:
    """Return "cuda" if the nodes that ranks run on have GPUs, else "cpu".

    With RAY_ADDRESS these are the nodes of that cluster; the driver itself need not have a GPU.
    Ranks that torchrun has started run on this machine.

    Raises:
        ConfigError: No cluster answers at RAY_ADDRESS.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address or torchrun.is_launched():
        return detect_device().type
    return "cuda" if has_gpus(address) else "cpu"


def get_device_resource() -> str:
    """Return Ray's name of a device."""
    return DEVICES[detect_lane()].ray_resource


def resolve_for_nodes(config: RLConfig, lane: str = "", *, needs_data: bool = True) -> RLConfig:
    """Check the settings of an RL run; fill in the defaults that the nodes and the model decide.

    Args:
        lane: "cuda" or "cpu" instead of that of the nodes.
        needs_data: False if data settings may be empty and weights absent, as in a dry run.

    Raises:
        ConfigError: A setting is wrong, or the nodes cannot do what it says.
    """
    validate_rl(config, needs_data=needs_data)
    lane = lane or detect_lane()
    check_engines(config, lane)  # before a model is downloaded
    config = fetch_inputs(config, with_weights=needs_data)
    use_engine_family("actor", config.model, config.actor)
    return resolve_for_lane(config, lane, has_experts=_has_experts(config))


def check_engines(config: RLConfig, device: str) -> None:
    """Check the backend of each role, and the settings that it reads, without a model.

    Args:
        device: "cuda" or "cpu" of the ranks.

    Raises:
        ConfigError: A backend does not read a setting, or cannot do what it says.
    """
    images = config.data.images_column
    check_engine_settings("actor", config.actor, "language_model", device, images_column=images)
    if config.warm_start.num_steps:
        _check_warm_start(config, device)
    if needs_critic(config):
        check_engine_settings("critic", config.critic, "value_model", device)
    for role, engine in get_frozen_engines(config).items():
        is_reward, key = role == "reward_model", get_engine_key(role)
        kind, column = ("reward_model", "") if is_reward else ("language_model", images)
        check_engine_settings(key, engine, kind, device, images_column=column)


def _check_warm_start(config: RLConfig, device: str) -> None:
    """Check warm_start with the backend of the actor, whose own settings have been checked."""
    engine = build_warm_engine(config)
    backend = load_backend(engine, "actor")
    for name, value, default in list_unread_settings(engine, backend):
        raise ConfigError(
            f"warm_start.{name.replace('moe.', 'moe_')}={value!r}: actor.backend="
            f"{engine.backend!r} does not read it; allowed: {default!r}"
        )
    backend.check_settings("warm_start", engine, device)


def _has_experts(config: RLConfig) -> bool:
    """Return whether the model is a mixture of experts; the models of built-in tasks are."""
    return bool(config.task.name or get_model_sizes(read_config(config.model.path)).num_experts)


def list_replayed_experts(config: RLConfig) -> ExpertLayers | None:
    """Return the MoE layers of each pipeline rank if the actor replays the servers' routing.

    Reads config.json in config.model.path.
    """
    if config.actor.moe.router_replay != "rollout":
        return None
    model = read_config(config.model.path)
    fields, moe_layers = get_family(model).config_map(model), list_moe_layers(model)
    stages: list[list[int]] = [[] for _ in range(config.actor.layout.pp)]
    for chunk in split_into_chunks(config.actor.layout, fields["num_layers"]):
        stages[chunk.pp_rank] += [layer for layer in chunk.layers if layer in moe_layers]
    return ExpertLayers(tuple(map(tuple, stages)), fields["moe_router_topk"])


class Pools:
    """The pools of a run, opened when the first of their roles is started. A context manager."""

    def __init__(self, config: RLConfig, resource: str, log_dir: Path) -> None:
        """`resource` is Ray's name of a device."""
        self._config, self._resource, self._log_dir = config, resource, log_dir
        self._plans = build_pool_plans(config)
        self._open: dict[str, ResourcePool] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get_gpu_ids(self, role: str) -> tuple[str, ...]:
        """Return the GPU ids of each rank of a role; () if Ray itself shows a rank its GPUs.

        Ray shows a rank the GPU of its first bundle only; servers on shared pools have several.
        """
        plan = self._find_plan(role)[1]
        stride = self._count_bundles_per_rank(role, plan)
        if self._resource == CPU_RESOURCE or stride == 1:
            return ()
        gpu_ids = self._open_pool(role).get_gpu_ids(
            1 / len(plan.roles), self._config.timeouts.start_s
        )
        return tuple(
            ",".join(gpu_ids[start : start + stride]) for start in range(0, len(gpu_ids), stride)
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
        """Start a group of workers for a role, or for its ranks from `first_rank` on.

        `options` are those of WorkerGroup. The caller closes the group.

        Raises:
            ConfigError: The cluster does not provide the devices.
        """
        _, plan = self._find_plan(role)
        return WorkerGroup(
            worker,
            init_args=args,
            layout=layout,
            pool=self._open_pool(role),
            timeouts=self._config.timeouts,
            share=1 / len(plan.roles),
            bundles_per_rank=self._count_bundles_per_rank(role, plan),
            first_bundle=first_rank * self._count_bundles_per_rank(role, plan),
            **options,
        )

    def _find_plan(self, role: str) -> tuple[str, PoolPlan]:
        """Return name and plan of the pool of a role."""
        return next((n, plan) for n, plan in self._plans.items() if role in plan.roles)

    def _count_bundles_per_rank(self, role: str, plan: PoolPlan) -> int:
        """Return the bundles of a rank: on a shared pool, those of a server on one node."""
        is_spread = role == "rollout" and plan.roles != ("rollout",)
        return self._config.rollout.workers_per_node if is_spread else 1

    def _open_pool(self, role: str) -> ResourcePool:
        """Return the pool of a role; request it from Ray if it is not open yet."""
        name, plan = self._find_plan(role)
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
