"""Roles on nodes and GPUs, and what the weight sync moves between those. Pure: asks no cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rl.config.resolve import takes_turns
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.jobs.placement import (
    PoolPlan,
    build_pool_plans,
    get_frozen_engines,
    get_server_config,
)
from mcore_rl.jobs.roles import ITEMSIZES
from mcore_rl.models.base import HFConfig, get_family
from mcore_rl.rollout.weight_updater import build_generation_layout
from mcore_rl.weight_sync.spec import MemoryDomains, TransferSpec, plan_transfer


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one push of new weights to all servers."""

    received: int  # from other GPUs
    in_node: int  # of them, from GPUs of the receiver's node
    local: int  # that stay on their GPU
    most_received: int  # by one GPU
    most_sent: int  # by one GPU


def devices(config: RLConfig, gpus_per_node: int) -> dict[str, list[int]]:
    """By role, the GPU of each rank or worker, where pools fill nodes in their order.

    GPU g is on node g // gpus_per_node. Servers with GPUs of their own stay inside a node when they
    fit one.
    """
    found: dict[str, list[int]] = {}
    start = 0
    for plan in build_pool_plans(config).values():
        gpus = list(_bundles(plan, start, gpus_per_node))
        start = gpus[-1] + 1
        for role in plan.roles:
            found[role] = gpus[: _num_ranks(config, role)]
    return found


def _num_ranks(config: RLConfig, role: str) -> int:
    if servers := get_server_config(config, role):
        return servers.num_servers * servers.tp
    return _layout(config, role).world_size


def _layout(config: RLConfig, role: str) -> Layout:
    """Of a role with a training engine."""
    engine = config.critic if role == "critic" else config.actor
    return get_frozen_engines(config).get(role, engine).layout


def _bundles(plan: PoolPlan, start: int, gpus_per_node: int) -> Iterator[int]:
    """The GPUs of a pool; a bundle is on one node unless it is larger."""
    size = plan.devices_per_bundle
    for _ in range(plan.num_bundles):
        left = -start % gpus_per_node
        if left < size <= gpus_per_node:
            start += left
        yield from range(start, start + size)
        start += size


def node_lines(config: RLConfig, gpus_per_node: int) -> Iterator[tuple[str, str]]:
    """For each node its GPUs' roles: ("node 3", "actor 24-31 (pp 1), rollout server 3")."""
    placed = devices(config, gpus_per_node)
    last = max(gpus[-1] for gpus in placed.values())
    for node in range(last // gpus_per_node + 1):
        parts = []
        for role, gpus in placed.items():
            ranks = [rank for rank, gpu in enumerate(gpus) if gpu // gpus_per_node == node]
            if ranks:
                parts.append(f"{role} {_named(config, role, ranks)}")
        yield f"node {node}", "; ".join(parts) or "nothing"


def _named(config: RLConfig, role: str, ranks: list[int]) -> str:
    """Ranks that follow each other, by what they are."""
    first, last = ranks[0], ranks[-1]
    if servers := get_server_config(config, role):
        tp = servers.tp
        if first // tp < last // tp:
            return f"servers {first // tp}-{last // tp}"
        workers = f", workers {_span(first % tp, last % tp)}" if tp > 1 else ""
        return f"server {first // tp}{workers}"
    text = _span(first, last)
    layout = _layout(config, role)
    if layout.pp > 1:
        stage = layout.world_size // layout.pp
        text += f" (pp {_span(first // stage, last // stage)})"
    return text


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def moved(config: RLConfig, model: HFConfig, gpus_per_node: int) -> Moved:
    """What a push moves, by the plan that the ranks would make.

    Raises:
        ConfigError: the layouts do not fit the model.
    """
    engine, placed = config.actor, devices(config, gpus_per_node)
    training, generation = placed["actor"], placed["rollout"]
    sites = None
    if takes_turns(config.placement, "actor", "rollout"):
        sites = MemoryDomains(tuple(map(str, training)), tuple(map(str, generation)), gpus_per_node)
    num_mtp = get_family(model).num_mtp_layers(model) if engine.mtp_loss_coef else 0
    layout = build_generation_layout(config.rollout, config.rollout.num_servers)
    spec = TransferSpec(engine.layout, num_mtp, layout, config.model.dtype, config.weight_sync)
    plan = plan_transfer(spec, model, ITEMSIZES[config.model.dtype], sites)
    local = in_node = 0
    received, sent = Counter[int](), Counter[int]()
    for source, target, num_bytes in plan.list_transfers():
        here, there = generation[target], training[source]
        if here == there:
            local += num_bytes
            continue
        received[here] += num_bytes
        sent[there] += num_bytes
        in_node += num_bytes * (here // gpus_per_node == there // gpus_per_node)
    most = (max(counts.values(), default=0) for counts in (received, sent))
    return Moved(sum(received.values()), in_node, local, *most)
