"""What a run would be: all inputs checked, roles and layouts shown; nothing is started or left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rich.console import Console
from rich.table import Table

from mcore_rl.config.resolve import for_lane, resolve
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs.cluster import moved, node_lines
from mcore_rl.jobs.gpu_memory import MemoryTurn, turns
from mcore_rl.jobs.output import inspect_run_dir
from mcore_rl.jobs.placement import build_pool_plans, count_devices, detect_lane
from mcore_rl.jobs.preflight import (
    Inputs,
    check_existing_inputs,
    has_experts,
    has_weights,
    list_unset_data,
)
from mcore_rl.jobs.resume import checkpoint_to_resume, prepare
from mcore_rl.jobs.roles import Role, roles
from mcore_rl.jobs.room import weight_bytes
from mcore_rl.models.base import HFConfig, read_config
from mcore_rl.observability.console import get_stdout_console, show_line, waiting
from mcore_rl.trainers.policy_loss import find_log_prob_pass_reason


def dry_run(
    config: RLConfig,
    console: Console | None = None,
    gpus_per_node: int | None = None,
    num_nodes: int | None = None,
) -> None:
    """Check all that a run checks before its start, then print what it would start.

    A folder model.path with a config.json alone will do, and settings of data may be missing; what
    was not checked then is said. With `gpus_per_node` it tells of a cluster of such nodes, whatever
    this machine has; without, of this machine. `num_nodes` is how many of them there would be.

    Raises:
        ConfigError: the run would be refused, for the same reason. A folder with something in it
            is no such reason here: a line tells of it.
    """
    console = console or get_stdout_console()
    resolve(config, needs_data=False)
    device = "cuda" if gpus_per_node else detect_lane()
    config = for_lane(config, device, has_experts=has_experts(config))
    folder, refusal = inspect_run_dir(config.output_dir, config.resume)
    with (
        waiting("checking the inputs", has_lines=False),
        TemporaryDirectory() as scratch,
    ):
        checkpoint = checkpoint_to_resume(config, folder)
        prepared = prepare(config, Path(scratch), checkpoint)
        inputs = check_existing_inputs(prepared)
        lines = _inputs(config, prepared, inputs)
        model = read_config(prepared.model.path)
        found = roles(prepared, model)
        on_nodes: list[str] = []
        if gpus_per_node:
            on_nodes = _on_nodes(prepared, model, gpus_per_node, num_nodes)
    say(console, *lines)
    for role in found:
        show(role, console)
    _show_turns(turns(prepared, model, found), console)
    say(console, *on_nodes, "", *_summary(config, device), *refusal)


def say(console: Console, *lines: str) -> None:
    for line in lines:
        show_line(line, console)


def _inputs(config: RLConfig, prepared: RLConfig, inputs: Inputs | None) -> list[str]:
    name = f"task {config.task.name}" if config.task.name else config.model.path
    lines = [f"model: {name}"]
    if not has_weights(prepared):
        lines[0] += "; not checked: weights, since the folder holds none"
    if unset := list_unset_data(prepared):
        verb = "is" if len(unset) == 1 else "are"
        return [*lines, f"data: not checked: {' and '.join(unset)} {verb} not set"]
    if inputs is None:
        return [*lines, "data: not checked but for the files: the model folder has no tokenizer"]
    data = f"data: {len(inputs.train)} prompts to train, {_held_out(inputs)} held out"
    if inputs.examples is not None:
        data += f", {len(inputs.examples)} examples for supervised training"
    return [*lines, data]


def _held_out(inputs: Inputs) -> str:
    sizes = {name: len(dataset) for name, dataset in inputs.tests.items()}
    if not sizes:
        return "none"
    if len(sizes) == 1:
        return str(*sizes.values())
    return " and ".join(f"{size} ({name})" for name, size in sizes.items())


def show(role: Role, console: Console) -> None:
    """A line on the role, and a table of its ranks."""
    say(
        console,
        "",
        f"{role.name}: {_format_count(role.num_ranks, 'rank')}, {role.layout} ({role.task})",
    )
    sizes = {
        "weights\nGB": [stage.weight_bytes for stage in role.stages],
        "gradients\nGB": [stage.gradient_bytes for stage in role.stages],
        "optimizer\nGB": [stage.optimizer_bytes for stage in role.stages],
        "KV cache\nGB": [stage.cache_bytes for stage in role.stages],
    }
    stages = [(spans(s.ranks), s.layers, f"{s.parameters:,}") for s in role.stages]
    console.print(_table(("ranks", "hold", "parameters"), stages, sizes))


def _show_turns(found: Sequence[MemoryTurn], console: Console) -> None:
    """What the fullest device of each turn has to hold."""
    say(console, "", "most on a device, in GB, turn by turn (activations are estimated):")
    sizes = {
        "weights": [turn.weights for turn in found],
        "gradients": [turn.gradients for turn in found],
        "optimizer": [turn.optimizer for turn in found],
        "activations": [turn.activations for turn in found],
        "KV\ncache": [turn.cache for turn in found],
        "buffers": [turn.buffers for turn in found],
        "all": [turn.total for turn in found],
    }
    console.print(_table(("turn",), [(turn.name,) for turn in found], sizes))


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], sizes: Mapping[str, Sequence[int]]
) -> Table:
    """Columns of text, then those columns of bytes, in GB, that are not empty."""
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


def _on_nodes(
    config: RLConfig, model: HFConfig, gpus_per_node: int, num_nodes: int | None
) -> list[str]:
    """Roles on nodes, and what a push of new weights moves between their GPUs."""
    lines = ["", f"nodes of {gpus_per_node} GPUs, filled in their order:"]
    taken = [f" {node}: {roles}" for node, roles in node_lines(config, gpus_per_node)]
    lines += [*taken, *_left_over(len(taken), num_nodes or len(taken))]
    tp, per_server = config.rollout.tp, config.rollout.nodes_per_server
    if tp // per_server > gpus_per_node:
        lines.append(
            f"rollout.tp={tp}: the run will be refused, since a node has {gpus_per_node} GPUs; "
            f"allowed: rollout.nodes_per_server={-(-tp // gpus_per_node)} or more, not {per_server}"
        )
    method = config.weight_sync.method
    if method == "full_export":
        size, servers = weight_bytes(config) / 1e9, config.rollout.num_servers
        text = f"{size:,.1f} GB into output_dir, read by {_format_count(servers, 'server')}"
    else:
        found = moved(config, model, gpus_per_node)
        text = (
            f"{found.received / 1e9:,.1f} GB between GPUs, of them {found.in_node / 1e9:,.1f} "
            f"inside a node; {found.local / 1e9:,.1f} GB stay on their GPU; at most "
            f"{found.most_received / 1e9:,.1f} GB into a GPU and {found.most_sent / 1e9:,.1f} out"
        )
    return [*lines, "", f"weight sync ({method}), each step: {text}"]


def _left_over(num_taken: int, num_nodes: int) -> list[str]:
    if num_nodes < num_taken:
        return [f"the run will be refused: it takes {num_taken} nodes, and there are {num_nodes}"]
    if num_nodes == num_taken:
        return []
    return [
        f"{num_nodes - num_taken} of the {num_nodes} nodes stay idle: to use them, raise "
        f"actor.layout.dp or rollout.num_servers; else ask for {num_taken} nodes"
    ]


def _format_count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def spans(ranks: Sequence[int]) -> str:
    """
    >>> spans([0, 1, 2, 6, 8, 9])
    '0-2, 6, 8-9'
    """
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _summary(config: RLConfig, device: str) -> list[str]:
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
