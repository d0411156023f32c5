"""What a run would be: all inputs checked, roles and layouts shown; nothing is started or left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from mcore_rl.config.resolve import for_lane, resolve
from mcore_rl.config.schema import RLConfig
from mcore_rl.engine.lane import lane
from mcore_rl.jobs.output import exclusive_run_dir
from mcore_rl.jobs.placement import num_devices, pool_plans
from mcore_rl.jobs.preflight import (
    Inputs,
    check_inputs,
    check_without_weights,
    has_weights,
)
from mcore_rl.jobs.resume import checkpoint_to_resume, prepare
from mcore_rl.jobs.roles import Role, roles
from mcore_rl.models.base import read_config
from mcore_rl.observability.console import waiting


def dry_run(config: RLConfig, console: Console | None = None) -> None:
    """Check all that a run checks before its start, then print what it would start.

    A folder model.path with a config.json alone will do; what was not checked then is said.

    Raises:
        ConfigError: the run would be refused, for the same reason.
    """
    console = console or Console()
    resolve(config)
    config = for_lane(config, lane())
    with (
        exclusive_run_dir(config.output_dir, config.resume) as claim,
        waiting("checking the inputs"),
        TemporaryDirectory() as scratch,
    ):
        checkpoint = checkpoint_to_resume(config, claim.folder)
        prepared = prepare(config, Path(scratch), checkpoint)
        complete = has_weights(prepared)
        inputs = check_inputs(prepared) if complete else check_without_weights(prepared)
        found = roles(prepared, read_config(prepared.model.path))
    for line in _inputs(config, inputs, complete):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for role in found:
        _show(role, console)
    console.print()
    for line in _summary(config, found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _inputs(config: RLConfig, inputs: Inputs | None, complete: bool) -> list[str]:
    name = f"task {config.task.name}" if config.task.name else config.model.path
    lines = [f"model: {name}"]
    if not complete:
        lines[0] += "; not checked: weights, since the folder holds none"
    if inputs is None:
        return [*lines, "data: not checked but for the files: the model folder has no tokenizer"]
    data = f"data: {len(inputs.train)} prompts to train, {len(inputs.test)} held out"
    if inputs.examples is not None:
        data += f", {len(inputs.examples)} examples for supervised training"
    return [*lines, data]


def _show(role: Role, console: Console) -> None:
    """A line on the role, and a table of its ranks."""
    line = f"{role.name}: {_ranks(role)}, {role.layout} ({role.task})"
    console.print(f"\n{line}", markup=False, highlight=False, soft_wrap=True)
    columns = [
        (heading, [getattr(stage, name) for stage in role.stages])
        for heading, name in (
            ("weights", "weight_bytes"),
            ("gradients", "gradient_bytes"),
            ("optimizer", "optimizer_bytes"),
            ("KV cache", "cache_bytes"),
        )
    ]
    shown = [(heading, sizes) for heading, sizes in columns if any(sizes)]
    table = Table(box=None)
    for heading in ("ranks", "hold"):
        table.add_column(heading, overflow="fold")
    for heading in ("parameters", *(f"{heading} GB" for heading, _ in shown)):
        table.add_column(heading, justify="right", overflow="fold")
    for index, stage in enumerate(role.stages):
        sizes = [f"{values[index] / 1e9:,.3f}" for _, values in shown]
        table.add_row(spans(stage.ranks), stage.layers, f"{stage.parameters:,}", *sizes)
    console.print(table)


def _ranks(role: Role) -> str:
    return f"{role.num_ranks} rank{'s' * (role.num_ranks > 1)}"


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


def _summary(config: RLConfig, found: Sequence[Role]) -> list[str]:
    plans = pool_plans(config)
    where = "GPUs" if lane() == "cuda" else "processes, which share this machine's cores"
    parts = "; ".join(
        f"{plan.num_bundles * plan.devices_per_bundle} for {', '.join(plan.roles)}"
        + ", by turns" * (len(plan.roles) > 1)
        for plan in plans.values()
    )
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    return [
        f"{num_devices(plans)} {where}: {parts}",
        f"a step: {config.trainer.prompts_per_step} prompts, {samples} samples, "
        f"{config.algorithm.num_mini_batches} optimizer steps; {config.trainer.num_steps} steps",
        "sizes are of one rank, without activations and what libraries take; nothing was started",
    ]
