"""Supervised jobs, from start to end: `mcore-rl sft`, `dpo` and `rm`.

Ranks are workers of a Ray session that the job starts, or the processes that torchrun started.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rl.algorithms.preference import PREFERENCE_LOSSES
from mcore_rl.checkpoint.run_checkpoints import RunCheckpoint
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_train import get_data_config
from mcore_rl.config.schema import (
    DPOConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
)
from mcore_rl.controller import torchrun
from mcore_rl.controller.dispatch import RankGroup
from mcore_rl.controller.process_cleanup import StopSignals
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.examples import ExampleBatches
from mcore_rl.engine.base import load_backend
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.jobs import disk_space
from mcore_rl.jobs.failure import RunFailed, summarize_failure
from mcore_rl.jobs.output import (
    CHECKPOINT,
    TRACES,
    OutputError,
    RunLock,
    SupervisedOutput,
    get_log_dir,
    lock_run_dir,
    open_job_scope,
)
from mcore_rl.jobs.placement import (
    CPU_RESOURCE,
    Pools,
    detect_device_type,
    get_device_resource,
    list_rank_nodes,
)
from mcore_rl.jobs.remote_paths import check_export, export_checkpoint
from mcore_rl.jobs.resume import check_data, find_checkpoint_on_nodes, get_end_step
from mcore_rl.jobs.run_plan import (
    MODEL,
    REFERENCE,
    Role,
    RunPlan,
    needs_reference_log_probs,
    plan_supervised,
)
from mcore_rl.jobs.supervised_preflight import (
    TrainInputs,
    check_train_inputs,
    resolve_for_device,
)
from mcore_rl.observability.console import show_waiting
from mcore_rl.observability.memory import PeakMemory
from mcore_rl.observability.process import get_start_time
from mcore_rl.parallel.devices import DEVICES
from mcore_rl.trainers import supervised
from mcore_rl.trainers.checkpointing import CheckpointManager, handle_stop_signals
from mcore_rl.trainers.device_sharing import ExclusiveDevices
from mcore_rl.trainers.evaluation import SupervisedEvaluation
from mcore_rl.trainers.objectives import (
    Objective,
    PreferenceObjective,
    Reference,
    RewardObjective,
    SupervisedObjective,
)
from mcore_rl.trainers.step_recorder import StepRecorder

# Starts the ranks of a role and, below _train, loads its model.
StartGroup = Callable[[Role], RankGroup]


def run(config: TrainConfig) -> None:
    """Run the job; all of its files are in config.output_dir.

    Raises:
        ConfigError: A setting or an input is wrong; nothing was started, nothing is left.
        RunFailed: The run had to stop.
        RunStopped: A signal has ended the run, which can be resumed.
    """
    started = get_start_time()
    config = resolve_for_device(config)
    if torchrun.is_launched():
        _check_torchrun(config)
        if torchrun.get_rank():
            _serve(config)
            return
    with (
        lock_run_dir(config.output_dir, config.resume) as run_lock,
        _open_scope(run_lock) as scratch_dir,
        handle_stop_signals(config) as stop,
        PeakMemory() as memory,
    ):
        with show_waiting("checking the inputs"):
            inputs = check_train_inputs(config)
            steps = replace(config.trainer, num_steps=inputs.num_steps)
            config = replace(config, trainer=steps)
            plan = plan_supervised(config)
            checkpoint = find_checkpoint_on_nodes(config, run_lock.folder)
            tests = inputs.tests.values()
            digests = check_data(checkpoint, get_data_config(config), inputs.train, tests)
            done = checkpoint.step if checkpoint else 0
            sizes = _list_output_bytes(config, run_lock.folder, done)
            disk_space.require_disk_space(config.output_dir, run_lock.folder, sizes)
        if last := get_end_step(config, checkpoint, run_lock.folder):
            print(f"the run in {run_lock.folder} has ended after step {last}")
            if scratch_dir is None:
                with _build_torchrun_ranks(config):  # the other ranks wait for this
                    pass
            return
        check_export(config.checkpoint.export_to)
        logs = get_log_dir(run_lock.folder)
        with (
            summarize_failure(logs / TRACES),
            _open_groups(config, plan, scratch_dir, logs) as start_group,
        ):
            output = SupervisedOutput(run_lock.folder, config, checkpoint)
            output.memory = memory
            if inputs.images is not None:
                inputs.images.store.open_folder()
            _train(_Run(config, plan, inputs, digests, output, checkpoint, stop), start_group)
        output.finish(peak_memory_bytes=memory.peak_bytes, wall_s=time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Run:
    """A supervised run whose inputs have been checked."""

    config: TrainConfig
    plan: RunPlan
    inputs: TrainInputs
    digests: dict[str, str]  # of the data sources, by setting
    output: SupervisedOutput
    checkpoint: RunCheckpoint | None  # to resume from
    stop: StopSignals


def _train(run: _Run, start_group: StartGroup) -> None:
    """Start the models, train, evaluate, export."""
    config, inputs, output = run.config, run.inputs, run.output
    groups: dict[str, RankGroup] = {}

    def start(role: Role) -> RankGroup:
        groups[role.name] = group = start_group(role)
        group.call(ModelWorker.initialize)
        return group

    with show_waiting("starting the trainer"):
        model = start(run.plan[MODEL])
        objective = _build_objective(config, run.plan, model, start)
    batch_size, num_bytes = config.trainer.batch_size, disk_space.compute_weight_bytes(config)
    rows, weights = inputs.train, get_data_config(config).train_weights
    batches = ExampleBatches(rows.take, rows.sizes, batch_size, config.seed, weights)
    checkpoints = CheckpointManager(
        config,
        output.folder,
        ExclusiveDevices(model),
        {"batches": batches},
        lambda: output.results,
        run.stop,
        num_bytes,
        run.digests,
    )

    evaluation = SupervisedEvaluation(config, objective, inputs.tests, output.record_evaluation)
    recorder = StepRecorder(
        groups,
        config.profile,
        output.folder,
        inputs.num_steps,
        output.record_expert_load,
        output.results,
    )
    if run.checkpoint is None and evaluation.is_due(0):
        with show_waiting("evaluating"):
            output.write(0, evaluation.run(0))
    if run.checkpoint is not None:
        with show_waiting("loading the checkpoint"):
            checkpoints.restore(run.checkpoint)
    path = output.folder / CHECKPOINT
    try:
        with (
            output.progress("training", inputs.num_steps) as report,
            run.stop.defer_to_step_end(),
        ):
            supervised.train(
                objective, batches, inputs.num_steps, report, checkpoints, evaluation, recorder
            )
    except OutputError as error:  # such as a full disk: export the weights elsewhere
        location = disk_space.export_to_any_disk(model, path, num_bytes)[1]
        raise RunFailed(f"{error}; {location}") from error
    if checkpoints.next_step > inputs.num_steps and inputs.tests:  # resumed after its last step
        with show_waiting("evaluating"):
            evaluation.run(inputs.num_steps)
    with show_waiting("exporting"):
        disk_space.export_weights(model, path, num_bytes)
        export_checkpoint(path, config.checkpoint.export_to)


def _build_objective(
    config: TrainConfig, plan: RunPlan, model: RankGroup, start_group: StartGroup
) -> Objective:
    """Return the objective of sft, rm or dpo; start a reference model if dpo needs one."""
    if isinstance(config, SFTConfig):
        return SupervisedObjective(model, config.loss_aggregation)
    if isinstance(config, RMConfig):
        return RewardObjective(model)
    assert isinstance(config, DPOConfig)
    loss = PREFERENCE_LOSSES.bind(config.loss, config.loss_settings)
    if not needs_reference_log_probs(config):
        return PreferenceObjective(model, loss, None)
    if REFERENCE not in plan:
        reference = Reference(model, ModelWorker.compute_reference_log_probs)
        return PreferenceObjective(model, loss, reference)
    frozen = start_group(plan[REFERENCE])
    is_offloaded = plan.takes_turns(REFERENCE)
    if is_offloaded:
        frozen.call(ModelWorker.to, "host")
    reference = Reference(frozen, ModelWorker.compute_log_probs, is_offloaded)
    return PreferenceObjective(model, loss, reference)


@contextlib.contextmanager
def _open_groups(
    config: TrainConfig, plan: RunPlan, scratch_dir: Path | None, logs: Path
) -> Iterator[StartGroup]:
    """Yield the function that starts groups of ranks: on Ray, or on torchrun's ranks.

    `scratch_dir` is Ray's; None under torchrun.
    """
    if scratch_dir is None:
        with _build_torchrun_ranks(config) as ranks:
            yield lambda role: ranks.create_group(role.name, role.spec.total_steps)
            return
    device = get_device_resource()
    needed = {device: plan.num_devices}
    with (
        ray_session(
            temp_dir=scratch_dir,
            log_to_driver=False,
            resources=needed if CPU_RESOURCE in needed else None,
            needed=needed,
            timeouts=config.timeouts,
        ),
        Pools(plan, device, config.timeouts, logs) as pools,
        ExitStack() as stack,
    ):

        def start_group(role: Role) -> WorkerGroup:
            group = stack.enter_context(pools.start(role))
            for line in list_rank_nodes([group]):
                print(line)
            return group

        yield start_group


def _get_reference_placement(config: TrainConfig) -> str:
    return config.reference.placement if isinstance(config, DPOConfig) else "shared"


def _build_torchrun_ranks(config: TrainConfig) -> torchrun.TorchrunRanks:
    """Join the ranks that torchrun started, with the variables that the backend needs."""
    layout, plan = config.engine.layout, plan_supervised(config)
    os.environ.update(load_backend(config.engine).rank_environment(layout, detect_device_type()))

    def build(name: str, total_steps: int) -> ModelWorker:
        """Build a worker; rank 0 alone has counted the steps."""
        role = plan[name]
        spec = replace(role.spec, total_steps=total_steps)
        return ModelWorker(*replace(role, spec=spec).build_worker_arguments())

    backend = DEVICES[detect_device_type()].backend
    return torchrun.TorchrunRanks(backend, layout, config.inner_timeout_s, build)


def _serve(config: TrainConfig) -> None:
    """Serve the calls of rank 0 on a rank above 0 under torchrun."""
    trace = get_log_dir(Path(config.output_dir)) / f"rank-{torchrun.get_rank()}.txt"
    with summarize_failure(trace):
        _build_torchrun_ranks(config).serve()


def _check_torchrun(config: TrainConfig) -> None:
    """Raise ConfigError if torchrun's ranks do not fit the layout or reference.placement."""
    torchrun.check_world_size(config.engine.layout)
    if _get_reference_placement(config) == "own":
        raise ConfigError(
            "reference.placement='own': ranks of torchrun have no other devices; allowed: 'shared'"
        )


@contextlib.contextmanager
def _open_scope(run_lock: RunLock) -> Iterator[Path | None]:
    """Yield a scratch folder for Ray; None under torchrun, which ends its processes itself."""
    if torchrun.is_launched():
        yield None
        return
    with open_job_scope(run_lock) as scratch_dir:
        yield scratch_dir


def _list_output_bytes(config: TrainConfig, folder: Path, done: int) -> dict[str, int]:
    """Return the bytes that a run writes after the step `done`, by purpose."""
    weights = disk_space.compute_weight_bytes(config)
    sizes = {"the checkpoint": weights}
    if config.trainer.save_every:
        checkpoints = disk_space.compute_checkpoint_bytes(config, config.engine, weights, folder)
        sizes["training checkpoints"] = checkpoints
    return sizes | disk_space.compute_export_bytes(config, weights, folder, done)
