"""Roles on the nodes of a cluster, and the traffic of a weight sync between their GPUs. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rl.config.schema import RLConfig
from mcore_rl.engine.base import load_backend
from mcore_rl.inference.registry import load_server_class
from mcore_rl.jobs.run_plan import ACTOR, WARM_START, Pool, RunPlan
from mcore_rl.models.base import HFConfig, get_family
from mcore_rl.planner.report import format_range
from mcore_rl.planner.roles import ITEMSIZES
from mcore_rl.rollout.weight_updater import build_generation_layout
from mcore_rl.trainers.device_sharing import ROLLOUT
from mcore_rl.weight_sync.spec import MemoryDomains, TransferSpec, plan_transfer


@dataclass(frozen=True, slots=True)
class SyncTraffic:
    """Bytes that one weight sync moves to all servers."""

    received: int  # from another GPU
    in_node: int  # part of `received` that comes from the same node
    local: int  # between processes on one GPU
    most_received: int  # by one GPU
    most_sent: int  # by one GPU


def assign_gpus(plan: RunPlan, gpus_per_node: int) -> dict[str, list[int]]:
    """Return the GPU of each rank or worker, by role; pools fill the nodes in order.

    GPU g is on node g // gpus_per_node. A server with separate GPUs that fits one node stays inside
    a node.
    """
    sizes = {role.name: role.layout.world_size for role in plan if role.name != WARM_START}
    sizes |= {servers.name: servers.num_workers for servers in plan.servers}
    role_gpus: dict[str, list[int]] = {}
    start = 0
    for pool in plan.pools:
        gpus = list(_assign_bundles(pool, start, gpus_per_node))
        start = gpus[-1] + 1
        for role in pool.roles:
            role_gpus[role] = gpus[: sizes[role]]
    return role_gpus


def _assign_bundles(pool: Pool, start: int, gpus_per_node: int) -> Iterator[int]:
    """Yield the GPUs of a pool; a bundle is on one node unless it is larger."""
    size = pool.devices_per_bundle
    for _ in range(pool.num_bundles):
        left = -start % gpus_per_node
        if left < size <= gpus_per_node:
            start += left
        yield from range(start, start + size)
        start += size


def list_node_roles(plan: RunPlan, gpus_per_node: int) -> Iterator[dict[str, list[int]]]:
    """Yield the ranks of each role on each node."""
    role_gpus = assign_gpus(plan, gpus_per_node)
    last = max(gpus[-1] for gpus in role_gpus.values())
    for node in range(last // gpus_per_node + 1):
        yield {
            role: ranks
            for role, gpus in role_gpus.items()
            if (ranks := [r for r, gpu in enumerate(gpus) if gpu // gpus_per_node == node])
        }


def fold_node_roles(plan: RunPlan, gpus_per_node: int) -> Iterator[tuple[str, str]]:
    """Yield nodes in a row with as many ranks of each role, and their roles.

    For example: ("nodes 2-3", "actor 16-31 (pp 1); rollout servers 2-3").
    """
    nodes = enumerate(list_node_roles(plan, gpus_per_node))
    for _, group in itertools.groupby(nodes, key=_count_node_ranks):
        members = list(group)
        first, last = members[0][0], members[-1][0]
        merged: dict[str, list[int]] = {}
        for _, roles in members:
            for role, ranks in roles.items():
                merged.setdefault(role, []).extend(ranks)
        parts = [f"{role} {_describe_ranks(plan, role, ranks)}" for role, ranks in merged.items()]
        name = f"node {first}" if first == last else f"nodes {first}-{last}"
        yield name, "; ".join(parts) or "nothing"


def _count_node_ranks(node: tuple[int, dict[str, list[int]]]) -> dict[str, int]:
    return {role: len(ranks) for role, ranks in node[1].items()}


def _describe_ranks(plan: RunPlan, role: str, ranks: list[int]) -> str:
    """Describe consecutive ranks, as servers and workers or with their pipeline stages."""
    first, last = ranks[0], ranks[-1]
    if servers := plan.find_servers(role):
        size = servers.settings.num_workers
        if first // size < last // size:
            return f"servers {first // size}-{last // size}"
        workers = f", workers {format_range(first % size, last % size)}" if size > 1 else ""
        return f"server {first // size}{workers}"
    text = format_range(first, last)
    layout = plan[role].layout
    if layout.pp > 1:
        stage = layout.world_size // layout.pp
        text += f" (pp {format_range(first // stage, last // stage)})"
    return text


def compute_sync_traffic(
    config: RLConfig, plan: RunPlan, model: HFConfig, gpus_per_node: int
) -> SyncTraffic:
    """Return the traffic of a weight sync, from the transfer plan that the ranks would make.

    Raises:
        ConfigError: The layouts do not fit the model.
    """
    engine, role_gpus = config.actor, assign_gpus(plan, gpus_per_node)
    training, generation = role_gpus[ACTOR], role_gpus[ROLLOUT]
    domains = None
    if plan.get_pool(ACTOR) == plan.get_pool(ROLLOUT):
        domains = MemoryDomains(
            tuple(map(str, training)), tuple(map(str, generation)), gpus_per_node
        )
    num_mtp = get_family(model).num_mtp_layers(model) if engine.mtp_loss_coef else 0
    layout = build_generation_layout(config.rollout, config.rollout.num_servers)
    weight_format = load_server_class(config.rollout).features.weight_format
    assert weight_format is not None  # else weight_sync.method is full_export
    spec = TransferSpec(
        engine.layout,
        num_mtp,
        layout,
        config.model.dtype,
        config.weight_sync,
        shard_format=load_backend(engine, "actor").shard_format,
        num_replicas=engine.fsdp.num_replicas,
        weight_format=weight_format,
        drafts=bool(config.rollout.speculative.num_tokens),
        quantization=config.rollout.quantization,
    )
    transfer = plan_transfer(spec, model, ITEMSIZES[config.model.dtype], domains)
    local = in_node = 0
    received, sent = Counter[int](), Counter[int]()
    for source, target, num_bytes in transfer.list_transfers():
        receiver, sender = generation[target], training[source]
        if receiver == sender:
            local += num_bytes
            continue
        received[receiver] += num_bytes
        sent[sender] += num_bytes
        in_node += num_bytes * (receiver // gpus_per_node == sender // gpus_per_node)
    most = (max(counts.values(), default=0) for counts in (received, sent))
    return SyncTraffic(sum(received.values()), in_node, local, *most)
