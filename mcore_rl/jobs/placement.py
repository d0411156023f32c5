"""Placement: the pools of devices that a run requests from Ray, and the roles on each pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import EngineConfig, Layout, RLConfig, TimeoutsConfig
from mcore_rl.controller import torchrun
from mcore_rl.controller.ray_session import has_gpus
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.routed_experts import ExpertLayers
from mcore_rl.engine.base import (
    check_engine_package,
    check_engine_settings,
    list_unread_settings,
    load_backend,
    use_engine_family,
)
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.inference.registry import check_server_package
from mcore_rl.jobs.lengths import fill_lengths
from mcore_rl.jobs.remote_paths import fetch_inputs
from mcore_rl.jobs.run_plan import REFERENCE, WARM_START, Pool, Role, RunPlan, plan_run
from mcore_rl.models.base import (
    get_family,
    get_model_sizes,
    list_moe_layers,
    read_config,
)
from mcore_rl.parallel.devices import DEVICES, detect_device
from mcore_rl.parallel.mesh import split_into_chunks
from mcore_rl.rollout.server_pool import ServerPool

CPU_RESOURCE = DEVICES["cpu"].ray_resource  # stands for a device on a CPU


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


def detect_device_type() -> str:
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
    return DEVICES[detect_device_type()].ray_resource


def resolve_for_nodes(
    config: RLConfig, device_type: str = "", *, needs_data: bool = True
) -> RLConfig:
    """Check the settings of an RL run; fill in the defaults that the nodes and the model decide.

    Args:
        device_type: "cuda" or "cpu" instead of that of the nodes.
        needs_data: False if data settings may be empty and weights absent, as in a dry run.

    Raises:
        ConfigError: A setting is wrong, or the nodes cannot do what it says.
    """
    validate_rl(config, needs_data=needs_data)
    device_type = device_type or detect_device_type()
    check_engines(config, device_type)  # before a model is downloaded
    if needs_data:
        _check_packages(config)
    config = fetch_inputs(config, with_weights=needs_data)
    use_engine_family("actor", config.model, config.actor)
    config = fill_lengths(config)
    return resolve_for_device_type(config, device_type, has_experts=_has_experts(config))


def check_engines(config: RLConfig, device: str) -> None:
    """Check the backend of each role, and the settings that it reads, without a model.

    Args:
        device: "cuda" or "cpu" of the ranks.

    Raises:
        ConfigError: A backend does not read a setting, or cannot do what it says.
    """
    images = config.data.images_column
    plan = plan_run(config)
    for role in plan:
        if role.name not in (WARM_START, REFERENCE):  # which have the actor's settings
            column = images if role.model_type == "language_model" else ""
            engine = role.spec.engine
            check_engine_settings(role.key, engine, role.model_type, device, images_column=column)
    if warm := plan.find(WARM_START):
        _check_warm_start(warm.spec.engine, device)


def _check_packages(config: RLConfig) -> None:
    """Raise ConfigError if a package of an engine or of a server is not installed."""
    plan = plan_run(config)
    for role in plan:
        if role.name not in (WARM_START, REFERENCE):  # which have the actor's engine
            check_engine_package(role.key, role.spec.engine)
    check_server_package(config.rollout)
    for name, model in plan.models.items():
        check_server_package(model.servers, f"models.{name}")


def _check_warm_start(engine: EngineConfig, device: str) -> None:
    """Check warm_start with the backend of the actor, whose own settings are checked, too."""
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


def build_rank_environment(role: Role) -> dict[str, str]:
    """Return the variables to start the process of a rank with."""
    return load_backend(role.spec.engine).build_rank_environment(role.layout, detect_device_type())


class Pools:
    """The pools of a run, opened when the first of their roles is started. A context manager."""

    def __init__(
        self, plan: RunPlan, resource: str, timeouts: TimeoutsConfig, log_dir: Path
    ) -> None:
        """`resource` is Ray's name of a device."""
        self._plan, self._resource = plan, resource
        self._timeouts, self._log_dir = timeouts, log_dir
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
        stride = self._count_bundles_per_rank(role)
        if self._resource == CPU_RESOURCE or stride == 1:
            return ()
        pool = self._plan.get_pool(role)
        gpu_ids = self._open_pool(pool).get_gpu_ids(1 / len(pool.roles), self._timeouts.start_s)
        return tuple(
            ",".join(gpu_ids[start : start + stride]) for start in range(0, len(gpu_ids), stride)
        )

    def start(self, role: Role, *, wait: bool = True) -> WorkerGroup:
        """Start the ranks of a training engine, which is not initialized yet.

        The caller closes the group.

        Args:
            wait: Wait until the workers are built.
        """
        return self.group(
            role.name,
            ModelWorker,
            role.build_worker_arguments(),
            role.layout,
            name=role.name,
            threads_per_rank=role.spec.engine.threads_per_rank,
            env=build_rank_environment(role),
            wait=wait,
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
        pool, bundles_per_rank = self._plan.get_pool(role), self._count_bundles_per_rank(role)
        return WorkerGroup(
            worker,
            init_args=args,
            layout=layout,
            pool=self._open_pool(pool),
            timeouts=self._timeouts,
            share=1 / len(pool.roles),
            bundles_per_rank=bundles_per_rank,
            first_bundle=first_rank * bundles_per_rank,
            **options,
        )

    def _count_bundles_per_rank(self, role: str) -> int:
        """Return the bundles of a rank: on a shared pool, those of a server on one node."""
        servers = self._plan.find_servers(role)
        if servers is None or not self._plan.takes_turns(role):
            return 1
        return servers.settings.workers_per_node

    def _open_pool(self, pool: Pool) -> ResourcePool:
        """Return the devices of a pool; request them from Ray if it is not open yet."""
        if pool.name not in self._open:
            self._open[pool.name] = self._stack.enter_context(
                ResourcePool(
                    pool.num_bundles,
                    {self._resource: pool.devices_per_bundle},
                    timeout_s=self._timeouts.start_s,
                    log_dir=self._log_dir,
                )
            )
        return self._open[pool.name]
