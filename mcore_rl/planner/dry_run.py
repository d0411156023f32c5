"""Dry runs: check all inputs, print roles, layouts and memory, start nothing, leave nothing."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from mcore_rl.checkpoint.hf import has_weights
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import TRANSFORMERS
from mcore_rl.config.rules_train import validate_eval
from mcore_rl.config.schema import EvalConfig, RLConfig, TrainConfig
from mcore_rl.inference.registry import load_server_class
from mcore_rl.jobs.disk_space import compute_weight_bytes
from mcore_rl.jobs.evaluate import (
    check_content,
    check_evaluation,
    find_done_sets,
    print_majority_note,
)
from mcore_rl.jobs.output import inspect_run_dir
from mcore_rl.jobs.placement import detect_device_type, resolve_for_nodes
from mcore_rl.jobs.preflight import (
    Inputs,
    check_existing_inputs,
    limit_evaluation,
    list_unset_data,
)
from mcore_rl.jobs.remote_paths import check_export, fetch_inputs
from mcore_rl.jobs.resume import check_critic, find_checkpoint_to_resume, prepare_settings
from mcore_rl.jobs.run_plan import RunPlan, plan_run, plan_supervised
from mcore_rl.jobs.supervised_preflight import (
    check_train_inputs,
    describe_inputs,
    resolve_for_device,
)
from mcore_rl.models.base import HFConfig, get_family, read_config, use_family
from mcore_rl.observability.console import get_stdout_console, show_line, show_waiting
from mcore_rl.planner.cluster import compute_sync_traffic, fold_node_roles, list_node_roles
from mcore_rl.planner.memory import Conditions, plan_cache
from mcore_rl.planner.memory_check import check_memory, find_device
from mcore_rl.planner.report import describe_cache, format_ranks, print_memory, print_sizes
from mcore_rl.planner.roles import RolePlan, fold_stages, plan_roles
from mcore_rl.planner.waste import list_waste
from mcore_rl.trainers.policy_loss import find_log_prob_pass_reason

# Rows of each file of a built-in task that a dry run checks: the others are of the same form.
_NUM_TASK_ROWS = 256


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
    device_type, device = find_device(hardware, gpus_per_node)
    config = resolve_for_nodes(config, device_type, needs_data=False)
    folder, refusal = inspect_run_dir(config.output_dir, config.resume)
    with (
        show_waiting("checking the inputs", has_lines=False),
        TemporaryDirectory() as scratch,
    ):
        checkpoint = find_checkpoint_to_resume(config, folder)
        check_export(config.checkpoint.export_to)
        prepared = prepare_settings(config, Path(scratch), checkpoint)
        plan = plan_run(prepared)
        check_critic(plan, checkpoint, config.algorithm.advantage)
        num_checked = _NUM_TASK_ROWS if config.task.name else None
        inputs = check_existing_inputs(prepared, plan, device_type, num_checked)
        lines = _describe_inputs(config, prepared, inputs)
        if inputs is not None:
            prepared = limit_evaluation(prepared, inputs)
            plan = plan_run(prepared)
        model = read_config(prepared.model.path)
        if gpus_per_node:
            _check_nodes(prepared, plan, gpus_per_node, num_nodes)
        conditions = Conditions(device_type, gpus_per_node=gpus_per_node or 8)
        check = check_memory(prepared, model, conditions, device)
        cluster_lines: list[str] = []
        if gpus_per_node and (check.fits or ignores_memory):
            cluster_lines = _describe_cluster(prepared, plan, model, gpus_per_node, num_nodes)
        if device_type == "cuda":  # processes on CPUs share the cores
            waste = [*list_waste(prepared, plan, gpus_per_node)]
            cluster_lines += ["", *waste] if waste else []
    check.print_verdict(console, ignores_memory=ignores_memory)
    print_lines(console, *lines)
    for role in check.plan.roles:
        print_role(role, console)
    print_memory(check.plan, conditions, console)
    print_lines(console, *cluster_lines)
    print_lines(console, "", *_summarize(config, plan, device_type), *refusal)


def _check_nodes(
    config: RLConfig, plan: RunPlan, gpus_per_node: int, num_nodes: int | None
) -> None:
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
    _check_num_nodes(len(list(list_node_roles(plan, gpus_per_node))), gpus_per_node, num_nodes)


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
    if not has_weights(prepared.model.path):
        lines[0] += "; not checked: weights, since the folder holds none"
    if unset := list_unset_data(prepared):
        verb = "is" if len(unset) == 1 else "are"
        return [*lines, f"data: not checked: {' and '.join(unset)} {verb} not set"]
    if inputs is None:
        return [*lines, "data: not checked but for the files: the model folder has no tokenizer"]
    data = f"data: {len(inputs.train)} prompts to train, {_count_held_out(inputs)} held out"
    if inputs.examples is not None:
        data += f", {inputs.num_examples} examples for supervised training"
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
    print_sizes(("ranks", "hold", "parameters"), rows, sizes, console)


def _describe_cluster(
    config: RLConfig, plan: RunPlan, model: HFConfig, gpus_per_node: int, num_nodes: int | None
) -> list[str]:
    """Return lines on the roles of each node and on the traffic of a weight sync."""
    lines = ["", f"nodes of {gpus_per_node} GPUs, filled in their order:"]
    nodes = [f" {nodes}: {roles}" for nodes, roles in fold_node_roles(plan, gpus_per_node)]
    lines += nodes
    num_used = len(list(list_node_roles(plan, gpus_per_node)))
    lines += _describe_idle_nodes(num_used, num_nodes, "actor.layout.dp or rollout.num_servers")
    method = config.weight_sync.method
    is_vllm = load_server_class(config.rollout).features.weight_format == "vllm"
    if method == "full_export":
        size, servers = compute_weight_bytes(config) / 1e9, config.rollout.num_servers
        text = f"{size:,.1f} GB into output_dir, read by {_format_count(servers, 'server')}"
    elif is_vllm and get_family(model).vllm_weights is None:
        text = "each worker gets its parameters, which vLLM's loader lists when a server starts"
    else:
        traffic = compute_sync_traffic(config, plan, model, gpus_per_node)
        text = (
            f"{traffic.received / 1e9:,.1f} GB between GPUs, of them {traffic.in_node / 1e9:,.1f} "
            f"inside a node; {traffic.local / 1e9:,.1f} GB stay on their GPU; at most "
            f"{traffic.most_received / 1e9:,.1f} GB into a GPU and "
            f"{traffic.most_sent / 1e9:,.1f} out"
        )
    return [*lines, "", f"weight sync ({method}), each step: {text}"]


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _summarize(config: RLConfig, plan: RunPlan, device: str) -> list[str]:
    where = "GPUs" if device == "cuda" else "processes, which share this machine's cores"
    parts = "; ".join(
        f"{pool.num_devices} for {', '.join(pool.roles)}" + ", by turns" * (len(pool.roles) > 1)
        for pool in plan.pools
    )
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    return [
        f"{plan.num_devices} {where}: {parts}",
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
    device_type, device = find_device(hardware, gpus_per_node)
    config = resolve_for_device(config, device_type)
    folder, refusal = inspect_run_dir(config.output_dir, config.resume)
    with show_waiting("checking the inputs", has_lines=False):
        find_checkpoint_to_resume(config, folder)
        check_export(config.checkpoint.export_to)
        inputs = check_train_inputs(config)
        conditions = Conditions(device_type, gpus_per_node=gpus_per_node or 8)
        check = check_memory(config, read_config(config.model.path), conditions, device)
        num_used = plan_supervised(config).num_devices
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


def dry_run_evaluation(config: EvalConfig, console: Console | None = None) -> None:
    """Make all checks that an evaluation makes before it starts, then print what it would start.

    Raises:
        ConfigError: The job would be refused, for the same reason.
    """
    console = console or get_stdout_console()
    validate_eval(config)
    config = fetch_inputs(config)
    use_family(config.model.family or TRANSFORMERS)  # it is only served
    folder, refusal = inspect_run_dir(config.output_dir, config.resume, check_content)
    with show_waiting("checking the inputs"):
        inputs = check_evaluation(config)
        if not refusal:
            find_done_sets(inputs, folder)
    n = config.rollout.n
    print_lines(console, f"model: {inputs.run.model.path}")
    for name in inputs.sets:
        prompts = inputs.count_prompts(name)
        print_lines(console, f"data.sets.{name}: {prompts} prompts, {prompts * n} responses")
    model, device_type = read_config(inputs.run.model.path), detect_device_type()
    [servers], [role] = inputs.plan.servers, plan_roles(inputs.plan, model, device_type)
    print_role(role, console)
    cache = plan_cache(servers, role, model, Conditions(device_type))
    print_lines(console, *describe_cache(cache))
    print_lines(console, "", f"pass@k for k = {', '.join(map(str, config.ks))}")
    print_majority_note(inputs)
    note = "sizes are of one rank, without what libraries take; nothing was started"
    print_lines(console, note, *refusal)
