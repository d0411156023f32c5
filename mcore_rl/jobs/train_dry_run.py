"""What a job that trains on examples would be: inputs checked, ranks shown; nothing is started."""

from __future__ import annotations

from rich.console import Console

from mcore_rl.config.resolve_train import resolve_train
from mcore_rl.config.train_schema import TrainConfig
from mcore_rl.jobs.dry_run import say, show
from mcore_rl.jobs.output import inspect_run_dir
from mcore_rl.jobs.placement import detect_lane
from mcore_rl.jobs.resume import checkpoint_to_resume
from mcore_rl.jobs.roles import training_roles
from mcore_rl.jobs.supervised_preflight import (
    check_train_inputs,
    describe_inputs,
    has_reference_model,
    resolve_dtype,
)
from mcore_rl.models.base import read_config
from mcore_rl.observability.console import get_stdout_console, waiting


def dry_run(config: TrainConfig, console: Console | None = None) -> None:
    """Check all that a run checks before its start, then print what it would start.

    Raises:
        ConfigError: the run would be refused, for the same reason.
    """
    console = console or get_stdout_console()
    resolve_train(config)
    config = resolve_dtype(config, detect_lane())
    folder, refusal = inspect_run_dir(config.output_dir, config.resume)
    with waiting("checking the inputs", has_lines=False):
        checkpoint_to_resume(config, folder)
        inputs = check_train_inputs(config)
    say(console, *describe_inputs(config, inputs))
    model, has_reference = read_config(config.model.path), has_reference_model(config)
    for role in training_roles(config, model, has_reference=has_reference):
        show(role, console)
    say(console, "", "sizes are of one rank, without activations; nothing was started", *refusal)
