"""Dry runs: check all inputs, print roles, layouts and memory, start nothing, leave nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rich.console import Console
from rich.table import Table

from mcore_rl.config.resolve import are_colocated
from mcore_rl.config.schema import Layout, RLConfig, TrainConfig
from mcore_rl.engine.base import load_backend
from mcore_rl.inference.registry import load_server_class
from mcore_rl.jobs.disk_space import compute_weight_bytes
from mcore_rl.jobs.memory_plan import (
    ITEMSIZES,
    MemoryPhase,
    RolePlan,
    compute_memory_phases,
    plan_roles,
    plan_supervised_roles,
)
from mcore_rl.jobs.output import inspect_run_dir
from mcore_rl.jobs.placement import (
    PoolPlan,
    build_pool_plans,
    count_devices,
    detect_lane,
    get_frozen_engines,
    get_server_config,
    resolve_for_nodes,
)
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
    has_reference_model,
    resolve_for_device,
)
from mcore_rl.models.base import HFConfig, get_family, read_config
from mcore_rl.observability.console import get_stdout_console, show_line, show_waiting
from mcore_rl.rollout.weight_updater import build_generation_layout
from mcore_rl.trainers.policy_loss import find_log_prob_pass_reason
from mcore_rl.weight_sync.spec import MemoryDomains, TransferSpec, plan_transfer


def dry_run(
    config: RLConfig,
    console: Console | None = None,
    gpus_per_node: int | None = None,
    num_nodes: int | None = None,
) -> None:
    """Make all checks that an RL run makes before it starts, then print what it would start.

    model.path may be a folder with config.json alone, and data settings may be empty: a line says
    what was not checked.

    Args:
        gpus_per_node: GPUs of each node of the cluster to plan for. None plans for this machine.
        num_nodes: Nodes of that cluster.

    Raises:
        ConfigError: The run would be refused, for the same reason. An output_dir that is not empty
            only prints a line.
    """
    console = console or get_stdout_console()
    lane = "cuda" if gpus_per_node else detect_lane()
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
        plans = plan_roles(prepared, model)
        cluster_lines: list[str] = []
        if gpus_per_node:
            cluster_lines = _describe_cluster(prepared, model, gpus_per_node, num_nodes)
    print_lines(console, *lines)
    for plan in plans:
        print_role(plan, console)
    _print_phases(compute_memory_phases(prepared, model, plans), console)
    print_lines(console, *cluster_lines, "", *_summarize(config, lane), *refusal)


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
    """Print a line on a role, and a table of its ranks."""
    ranks = _format_count(plan.num_ranks, "rank")
    print_lines(console, "", f"{plan.name}: {ranks}, {plan.layout} ({plan.task})")
    sizes = {
        "weights\nGB": [stage.weight_bytes for stage in plan.stages],
        "gradients\nGB": [stage.gradient_bytes for stage in plan.stages],
        "optimizer\nGB": [stage.optimizer_bytes for stage in plan.stages],
        "KV cache\nGB": [stage.cache_bytes for stage in plan.stages],
    }
    stages = [(format_ranks(s.ranks), s.layers, f"{s.parameters:,}") for s in plan.stages]
    console.print(_build_table(("ranks", "hold", "parameters"), stages, sizes))


def _print_phases(phases: Sequence[MemoryPhase], console: Console) -> None:
    """Print a table of the memory on the fullest device, by phase."""
    heading = "most on a device, in GB, turn by turn (activations are estimated):"
    print_lines(console, "", heading)
    sizes = {
        "weights": [phase.weights for phase in phases],
        "gradients": [phase.gradients for phase in phases],
        "optimizer": [phase.optimizer for phase in phases],
        "activations": [phase.activations for phase in phases],
        "KV\ncache": [phase.cache for phase in phases],
        "buffers": [phase.buffers for phase in phases],
        "all": [phase.total for phase in phases],
    }
    console.print(_build_table(("turn",), [(phase.name,) for phase in phases], sizes))


def _build_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], sizes: Mapping[str, Sequence[int]]
) -> Table:
    """Build a table of text columns, then of those byte columns, in GB, that are not all zero."""
    shown = {heading: column for heading, column in sizes.items() if any(column)}
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading == "parameters" else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for heading in shown:
        table.add_column(heading, justify="right", overflow="fold")
    for index, row in enumerate(rows):
        values = [column[index] / 1e9 for column in shown.values()]
        table.add_row(*row, *[f"{value:,.3f}" if value else "" for value in values])
    return table


def _describe_cluster(
    config: RLConfig, model: HFConfig, gpus_per_node: int, num_nodes: int | None
) -> list[str]:
    """Return lines on the roles of each node and on the traffic of a weight sync."""
    lines = ["", f"nodes of {gpus_per_node} GPUs, filled in their order:"]
    nodes = [f" {node}: {roles}" for node, roles in list_node_roles(config, gpus_per_node)]
    lines += [*nodes, *_describe_idle_nodes(len(nodes), num_nodes or len(nodes))]
    rollout = config.rollout
    if rollout.workers_per_node > gpus_per_node:
        least = -(-rollout.num_workers // gpus_per_node)
        shape = f"rollout.dp={rollout.dp} and " * (rollout.dp > 1) + f"rollout.tp={rollout.tp}"
        lines.append(
            f"{shape}: the run will be refused, since a node has {gpus_per_node} GPUs; allowed: "
            f"rollout.nodes_per_server={least} or more, not {rollout.nodes_per_server}"
        )
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


def _describe_idle_nodes(num_used: int, num_nodes: int) -> list[str]:
    if num_nodes < num_used:
        return [f"the run will be refused: it takes {num_used} nodes, and there are {num_nodes}"]
    if num_nodes == num_used:
        return []
    return [
        f"{num_nodes - num_used} of the {num_nodes} nodes stay idle: to use them, raise "
        f"actor.layout.dp or rollout.num_servers; else ask for {num_used} nodes"
    ]


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def format_ranks(ranks: Sequence[int]) -> str:
    """
    >>> format_ranks([0, 1, 2, 6, 8, 9])
    '0-2, 6, 8-9'
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(_format_range(first, last) for first, last in ranges)


def _format_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


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
        "sizes are of one rank, without what libraries take; nothing was started",
    ]


def _describe_log_probs(config: RLConfig) -> str:
    if config.algorithm.correction.use_rollout_log_probs:
        return "none, those of the servers stand for them"
    if reason := find_log_prob_pass_reason(config):
        return f"in a pass before the update ({reason})"
    return "from the forward pass of the update (algorithm.log_prob_pass='auto')"


def dry_run_supervised(config: TrainConfig, console: Console | None = None) -> None:
    """Make all checks that a supervised job makes before it starts, then print its roles.

    Raises:
        ConfigError: The job would be refused, for the same reason.
    """
    console = console or get_stdout_console()
    config = resolve_for_device(config)
    folder, refusal = inspect_run_dir(config.output_dir, config.resume)
    with show_waiting("checking the inputs", has_lines=False):
        find_checkpoint_to_resume(config, folder)
        check_export(config.checkpoint.export_to)
        inputs = check_train_inputs(config)
    print_lines(console, *describe_inputs(config, inputs))
    model, has_reference = read_config(config.model.path), has_reference_model(config)
    for plan in plan_supervised_roles(config, model, has_reference=has_reference):
        print_role(plan, console)
    note = "sizes are of one rank, without activations; nothing was started"
    print_lines(console, "", note, *refusal)


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


def list_node_roles(config: RLConfig, gpus_per_node: int) -> Iterator[tuple[str, str]]:
    """Yield the roles of each node: ("node 3", "actor 24-31 (pp 1); rollout server 3")."""
    role_gpus = assign_gpus(config, gpus_per_node)
    last = max(gpus[-1] for gpus in role_gpus.values())
    for node in range(last // gpus_per_node + 1):
        parts = []
        for role, gpus in role_gpus.items():
            ranks = [rank for rank, gpu in enumerate(gpus) if gpu // gpus_per_node == node]
            if ranks:
                parts.append(f"{role} {_describe_ranks(config, role, ranks)}")
        yield f"node {node}", "; ".join(parts) or "nothing"


def _describe_ranks(config: RLConfig, role: str, ranks: list[int]) -> str:
    """Describe consecutive ranks, as servers and workers or with their pipeline stages."""
    first, last = ranks[0], ranks[-1]
    if servers := get_server_config(config, role):
        size = servers.num_workers
        if first // size < last // size:
            return f"servers {first // size}-{last // size}"
        workers = f", workers {_format_range(first % size, last % size)}" if size > 1 else ""
        return f"server {first // size}{workers}"
    text = _format_range(first, last)
    layout = _get_layout(config, role)
    if layout.pp > 1:
        stage = layout.world_size // layout.pp
        text += f" (pp {_format_range(first // stage, last // stage)})"
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
