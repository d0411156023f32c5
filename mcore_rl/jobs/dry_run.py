"""Dry runs: check all inputs, print roles, layouts and memory, start nothing, leave nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import are_colocated
from mcore_rl.config.schema import Layout, RLConfig, TrainConfig
from mcore_rl.engine.base import load_backend
from mcore_rl.inference.registry import load_server_class
from mcore_rl.jobs.disk_space import compute_weight_bytes
from mcore_rl.jobs.memory_check import check_memory, find_device
from mcore_rl.jobs.output import inspect_run_dir
from mcore_rl.jobs.placement import get_server_config, resolve_for_nodes
from mcore_rl.jobs.preflight import (
    Inputs,
    check_existing_inputs,
    has_weights,
    list_unset_data,
)
from mcore_rl.jobs.remote_paths import check_export
from mcore_rl.jobs.resume import find_checkpoint_to_resume, prepare_settings
from mcore_rl.jobs.supervised_preflight import (
    check_train_inputs,
    describe_inputs,
    resolve_for_device,
)
from mcore_rl.models.base import HFConfig, get_family, read_config
from mcore_rl.observability.console import get_stdout_console, show_line, show_waiting
from mcore_rl.planner.memory import Conditions
from mcore_rl.planner.pools import PoolPlan, build_pool_plans, count_devices
from mcore_rl.planner.report import (
    build_table,
    format_range,
    format_ranks,
    print_memory,
)
from mcore_rl.planner.roles import (
    ITEMSIZES,
    RolePlan,
    fold_stages,
    get_frozen_engines,
)
from mcore_rl.planner.supervised import shares_devices
from mcore_rl.rollout.weight_updater import build_generation_layout
from mcore_rl.trainers.policy_loss import find_log_prob_pass_reason
from mcore_rl.weight_sync.spec import MemoryDomains, TransferSpec, plan_transfer


def dry_run(
    config: RLConfig,
    console: Console | None = None,
    gpus_per_node: int | None = None,
    num_nodes: int | None = None,
    hardware: str | None = None,
    *,
    ignores_memory: bool = False,
) -> None:
    """Make all checks that an RL run makes before it starts, then print what it would start.

    model.path may be a folder with config.json alone, and data settings may be empty: a line says
    what was not checked.

    Args:
        gpus_per_node: GPUs of each node of the cluster to plan for. None plans for this machine.
        num_nodes: Nodes of that cluster.
        hardware: Name or file of the devices, or gigabytes of a GPU. None: those of this machine,
            or memory_check.DEFAULT_HARDWARE of a cluster.
        ignores_memory: Do not refuse a run that does not fit.

    Raises:
        ConfigError: The run would be refused, for the same reason, or does not fit its nodes or the
            memory of its GPUs. An output_dir that is not empty only prints a line.
    """
    console = console or get_stdout_console()
    lane, device = find_device(hardware, gpus_per_node)
    config = resolve_for_nodes(config, lane, needs_data=False)
    folder, refusal = inspect_run_dir(config.output_dir, config.resume)
    with (
        show_waiting("checking the inputs", has_lines=False),
        TemporaryDirectory() as scratch,
    ):
        checkpoint = find_checkpoint_to_resume(config, folder)
        check_export(config.checkpoint.export_to)
        prepared = prepare_settings(config, Path(scratch), checkpoint)
        inputs = check_existing_inputs(prepared)
        lines = _describe_inputs(config, prepared, inputs)
        model = read_config(prepared.model.path)
        if gpus_per_node:
            _check_nodes(prepared, gpus_per_node, num_nodes)
        conditions = Conditions(lane, gpus_per_node=gpus_per_node or 8)
        check = check_memory(prepared, model, conditions, device)
        cluster_lines: list[str] = []
        if gpus_per_node and (check.fits or ignores_memory):
            cluster_lines = _describe_cluster(prepared, model, gpus_per_node, num_nodes)
    check.print_verdict(console, ignores_memory=ignores_memory)
    print_lines(console, *lines)
    for role in check.plan.roles:
        print_role(role, console)
    print_memory(check.plan, conditions, console)
    print_lines(console, *cluster_lines, "", *_summarize(config, lane), *refusal)


def _check_nodes(config: RLConfig, gpus_per_node: int, num_nodes: int | None) -> None:
    """Check that servers and ranks fit the nodes.

    Raises:
        ConfigError: They do not.
    """
    rollout = config.rollout
    if rollout.workers_per_node > gpus_per_node:
        least = -(-rollout.num_workers // gpus_per_node)
        shape = f"rollout.dp={rollout.dp} and " * (rollout.dp > 1) + f"rollout.tp={rollout.tp}"
        raise ConfigError(
            f"{shape}: a node has {gpus_per_node} GPUs; allowed: "
            f"rollout.nodes_per_server={least} or more, not {rollout.nodes_per_server}"
        )
    _check_num_nodes(len(list(list_node_roles(config, gpus_per_node))), gpus_per_node, num_nodes)


def _check_num_nodes(num_used: int, gpus_per_node: int, num_nodes: int | None) -> None:
    if num_nodes is not None and num_nodes < num_used:
        raise ConfigError(
            f"--num-nodes={num_nodes}: the run takes {num_used} nodes of {gpus_per_node} GPUs"
        )


def _describe_idle_nodes(num_used: int, num_nodes: int | None, settings: str) -> list[str]:
    if num_nodes is None or num_nodes == num_used:
        return []
    return [
        f"{num_nodes - num_used} of the {num_nodes} nodes stay idle: to use them, raise "
        f"{settings}; else ask for {num_used} nodes"
    ]


def print_lines(console: Console, *lines: str) -> None:
    """Print lines without markup."""
    for line in lines:
        show_line(line, console)


def _describe_inputs(config: RLConfig, prepared: RLConfig, inputs: Inputs | None) -> list[str]:
    name = f"task {config.task.name}" if config.task.name else config.model.path
    lines = [f"model: {name}"]
    if not has_weights(prepared):
        lines[0] += "; not checked: weights, since the folder holds none"
    if unset := list_unset_data(prepared):
        verb = "is" if len(unset) == 1 else "are"
        return [*lines, f"data: not checked: {' and '.join(unset)} {verb} not set"]
    if inputs is None:
        return [*lines, "data: not checked but for the files: the model folder has no tokenizer"]
    data = f"data: {len(inputs.train)} prompts to train, {_count_held_out(inputs)} held out"
    if inputs.examples is not None:
        data += f", {len(inputs.examples)} examples for supervised training"
    return [*lines, data]


def _count_held_out(inputs: Inputs) -> str:
    sizes = {name: len(dataset) for name, dataset in inputs.tests.items()}
    if not sizes:
        return "none"
    if len(sizes) == 1:
        return str(*sizes.values())
    return " and ".join(f"{size} ({name})" for name, size in sizes.items())


def print_role(plan: RolePlan, console: Console) -> None:
    """Print a line on a role, and a table of its ranks; equal ones share a row."""
    ranks = _format_count(plan.num_ranks, "rank")
    stages = fold_stages(plan.stages)
    print_lines(console, "", f"{plan.name}: {ranks}, {plan.layout} ({plan.task})")
    sizes = {
        "weights\nGB": [stage.weight_bytes for stage in stages],
        "gradients\nGB": [stage.gradient_bytes for stage in stages],
        "optimizer\nGB": [stage.optimizer_bytes for stage in stages],
        "KV cache\nGB": [stage.cache_bytes for stage in stages],
    }
    rows = [(format_ranks(s.ranks), s.layers, f"{s.parameters:,}") for s in stages]
    console.print(build_table(("ranks", "hold", "parameters"), rows, sizes))


def _describe_cluster(
    config: RLConfig, model: HFConfig, gpus_per_node: int, num_nodes: int | None
) -> list[str]:
    """Return lines on the roles of each node and on the traffic of a weight sync."""
    lines = ["", f"nodes of {gpus_per_node} GPUs, filled in their order:"]
    nodes = [f" {nodes}: {roles}" for nodes, roles in fold_node_roles(config, gpus_per_node)]
    lines += nodes
    num_used = len(list(list_node_roles(config, gpus_per_node)))
    lines += _describe_idle_nodes(num_used, num_nodes, "actor.layout.dp or rollout.num_servers")
    method = config.weight_sync.method
    is_vllm = load_server_class(config.rollout).features.weight_format == "vllm"
    if method == "full_export":
        size, servers = compute_weight_bytes(config) / 1e9, config.rollout.num_servers
        text = f"{size:,.1f} GB into output_dir, read by {_format_count(servers, 'server')}"
    elif is_vllm and get_family(model).vllm_weights is None:
        text = "each worker gets its parameters, which vLLM's loader lists when a server starts"
    else:
        traffic = compute_sync_traffic(config, model, gpus_per_node)
        text = (
            f"{traffic.received / 1e9:,.1f} GB between GPUs, of them {traffic.in_node / 1e9:,.1f} "
            f"inside a node; {traffic.local / 1e9:,.1f} GB stay on their GPU; at most "
            f"{traffic.most_received / 1e9:,.1f} GB into a GPU and "
            f"{traffic.most_sent / 1e9:,.1f} out"
        )
    return [*lines, "", f"weight sync ({method}), each step: {text}"]


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _summarize(config: RLConfig, device: str) -> list[str]:
    plans = build_pool_plans(config)
    where = "GPUs" if device == "cuda" else "processes, which share this machine's cores"
    parts = "; ".join(
        f"{plan.num_bundles * plan.devices_per_bundle} for {', '.join(plan.roles)}"
        + ", by turns" * (len(plan.roles) > 1)
        for plan in plans.values()
    )
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    return [
        f"{count_devices(plans)} {where}: {parts}",
        f"a step: {_format_count(config.trainer.prompts_per_step, 'prompt')}, "
        f"{_format_count(samples, 'sample')}, "
        f"{_format_count(config.algorithm.num_mini_batches, 'optimizer step')}; "
        f"{_format_count(config.trainer.num_steps, 'step')}",
        f"log-probs of the trainer: {_describe_log_probs(config)}",
        f"log-probs of trainer and servers: {config.trainer.max_logprob_gap:g} nats apart at most, "
        f"{config.trainer.mean_logprob_gap:g} on average",
        "sizes are of one rank; nothing was started",
    ]


def _describe_log_probs(config: RLConfig) -> str:
    if config.algorithm.correction.use_rollout_log_probs:
        return "none, those of the servers stand for them"
    if reason := find_log_prob_pass_reason(config):
        return f"in a pass before the update ({reason})"
    return "from the forward pass of the update (algorithm.log_prob_pass='auto')"


def dry_run_supervised(
    config: TrainConfig,
    gpus_per_node: int | None = None,
    num_nodes: int | None = None,
    hardware: str | None = None,
    *,
    ignores_memory: bool = False,
) -> None:
    """Make all checks that a supervised job makes before it starts, then print its roles.

    Args:
        gpus_per_node: See `dry_run`, also for the arguments after it.

    Raises:
        ConfigError: The job would be refused, for the same reason, or does not fit its nodes or the
            memory of its GPUs.
    """
    console = get_stdout_console()
    lane, device = find_device(hardware, gpus_per_node)
    config = resolve_for_device(config, lane)
    folder, refusal = inspect_run_dir(config.output_dir, config.resume)
    with show_waiting("checking the inputs", has_lines=False):
        find_checkpoint_to_resume(config, folder)
        check_export(config.checkpoint.export_to)
        inputs = check_train_inputs(config)
        conditions = Conditions(lane, gpus_per_node=gpus_per_node or 8)
        check = check_memory(config, read_config(config.model.path), conditions, device)
        num_pools = 1 if shares_devices(config) else len(check.plan.roles)
        num_used = num_pools * config.engine.layout.world_size
        nodes: list[str] = []
        if gpus_per_node:
            num_used = -(-num_used // gpus_per_node)
            _check_num_nodes(num_used, gpus_per_node, num_nodes)
            nodes = ["", f"{_format_count(num_used, 'node')} of {gpus_per_node} GPUs"]
            nodes += _describe_idle_nodes(num_used, num_nodes, "engine.layout.dp")
    check.print_verdict(console, ignores_memory=ignores_memory)
    print_lines(console, *describe_inputs(config, inputs))
    for role in check.plan.roles:
        print_role(role, console)
    print_memory(check.plan, conditions, console)
    note = "sizes are of one rank; nothing was started"
    print_lines(console, *nodes, "", note, *refusal)


# Roles on the nodes of a cluster, and the traffic of a weight sync between their GPUs. Pure.


@dataclass(frozen=True, slots=True)
class SyncTraffic:
    """Bytes that one weight sync moves to all servers."""

    received: int  # from another GPU
    in_node: int  # part of `received` that comes from the same node
    local: int  # between processes on one GPU
    most_received: int  # by one GPU
    most_sent: int  # by one GPU


def assign_gpus(config: RLConfig, gpus_per_node: int) -> dict[str, list[int]]:
    """Return the GPU of each rank or worker, by role; pools fill the nodes in order.

    GPU g is on node g // gpus_per_node. A server with separate GPUs that fits one node stays inside
    a node.
    """
    role_gpus: dict[str, list[int]] = {}
    start = 0
    for plan in build_pool_plans(config).values():
        gpus = list(_assign_bundles(plan, start, gpus_per_node))
        start = gpus[-1] + 1
        for role in plan.roles:
            role_gpus[role] = gpus[: _count_ranks(config, role)]
    return role_gpus


def _count_ranks(config: RLConfig, role: str) -> int:
    if servers := get_server_config(config, role):
        return servers.num_servers * servers.num_workers
    return _get_layout(config, role).world_size


def _get_layout(config: RLConfig, role: str) -> Layout:
    """Return the layout of a role with a training engine."""
    engine = config.critic if role == "critic" else config.actor
    return get_frozen_engines(config).get(role, engine).layout


def _assign_bundles(plan: PoolPlan, start: int, gpus_per_node: int) -> Iterator[int]:
    """Yield the GPUs of a pool; a bundle is on one node unless it is larger."""
    size = plan.devices_per_bundle
    for _ in range(plan.num_bundles):
        left = -start % gpus_per_node
        if left < size <= gpus_per_node:
            start += left
        yield from range(start, start + size)
        start += size


def list_node_roles(config: RLConfig, gpus_per_node: int) -> Iterator[dict[str, list[int]]]:
    """Yield the ranks of each role on each node."""
    role_gpus = assign_gpus(config, gpus_per_node)
    last = max(gpus[-1] for gpus in role_gpus.values())
    for node in range(last // gpus_per_node + 1):
        yield {
            role: ranks
            for role, gpus in role_gpus.items()
            if (ranks := [r for r, gpu in enumerate(gpus) if gpu // gpus_per_node == node])
        }


def fold_node_roles(config: RLConfig, gpus_per_node: int) -> Iterator[tuple[str, str]]:
    """Yield nodes in a row with as many ranks of each role, and their roles.

    For example: ("nodes 2-3", "actor 16-31 (pp 1); rollout servers 2-3").
    """
    nodes = enumerate(list_node_roles(config, gpus_per_node))
    for _, group in itertools.groupby(nodes, key=_count_node_ranks):
        members = list(group)
        first, last = members[0][0], members[-1][0]
        merged: dict[str, list[int]] = {}
        for _, roles in members:
            for role, ranks in roles.items():
                merged.setdefault(role, []).extend(ranks)
        parts = [f"{role} {_describe_ranks(config, role, ranks)}" for role, ranks in merged.items()]
        name = f"node {first}" if first == last else f"nodes {first}-{last}"
        yield name, "; ".join(parts) or "nothing"


def _count_node_ranks(node: tuple[int, dict[str, list[int]]]) -> dict[str, int]:
    return {role: len(ranks) for role, ranks in node[1].items()}


def _describe_ranks(config: RLConfig, role: str, ranks: list[int]) -> str:
    """Describe consecutive ranks, as servers and workers or with their pipeline stages."""
    first, last = ranks[0], ranks[-1]
    if servers := get_server_config(config, role):
        size = servers.num_workers
        if first // size < last // size:
            return f"servers {first // size}-{last // size}"
        workers = f", workers {format_range(first % size, last % size)}" if size > 1 else ""
        return f"server {first // size}{workers}"
    text = format_range(first, last)
    layout = _get_layout(config, role)
    if layout.pp > 1:
        stage = layout.world_size // layout.pp
        text += f" (pp {format_range(first // stage, last // stage)})"
    return text


def compute_sync_traffic(config: RLConfig, model: HFConfig, gpus_per_node: int) -> SyncTraffic:
    """Return the traffic of a weight sync, from the transfer plan that the ranks would make.

    Raises:
        ConfigError: The layouts do not fit the model.
    """
    engine, role_gpus = config.actor, assign_gpus(config, gpus_per_node)
    training, generation = role_gpus["actor"], role_gpus["rollout"]
    domains = None
    if are_colocated(config.placement, "actor", "rollout"):
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
    plan = plan_transfer(spec, model, ITEMSIZES[config.model.dtype], domains)
    local = in_node = 0
    received, sent = Counter[int](), Counter[int]()
    for source, target, num_bytes in plan.list_transfers():
        receiver, sender = generation[target], training[source]
        if receiver == sender:
            local += num_bytes
            continue
        received[receiver] += num_bytes
        sent[sender] += num_bytes
        in_node += num_bytes * (receiver // gpus_per_node == sender // gpus_per_node)
    most = (max(counts.values(), default=0) for counts in (received, sent))
    return SyncTraffic(sum(received.values()), in_node, local, *most)
