"""`mcore-rl rl`, from start to end: check, warm-start, train, evaluate, export, report."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mcore_rl.checkpoint.run_checkpoints import RunCheckpoint
from mcore_rl.config.rules_rollout import ROLE
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.controller.batch_ops import select_small_columns
from mcore_rl.controller.object_store import choose_object_store_bytes, estimate_sample_bytes
from mcore_rl.controller.pending_call import PendingCall, WorkerError, gather_results
from mcore_rl.controller.process_cleanup import StopSignals
from mcore_rl.controller.ray_session import ray_session, warn_of_small_stores
from mcore_rl.controller.worker_group import WorkerGroup, wait_until_built
from mcore_rl.data.batch import Batch
from mcore_rl.data.examples import ExampleBatches
from mcore_rl.data.images import get_images_folder
from mcore_rl.engine.worker import ModelWorker, apply_on_rank_zero
from mcore_rl.jobs import disk_space
from mcore_rl.jobs.failure import RunFailed, summarize_failure
from mcore_rl.jobs.output import (
    CHECKPOINT,
    TRACES,
    OutputError,
    RunOutput,
    get_log_dir,
    lock_run_dir,
    open_job_scope,
)
from mcore_rl.jobs.placement import (
    CPU_RESOURCE,
    Pools,
    build_rank_environment,
    get_device_resource,
    list_rank_nodes,
    list_replayed_experts,
    resolve_for_nodes,
)
from mcore_rl.jobs.preflight import Inputs, check_inputs, limit_evaluation
from mcore_rl.jobs.remote_paths import check_export, export_checkpoint
from mcore_rl.jobs.resume import (
    check_critic,
    check_data,
    find_checkpoint_on_nodes,
    get_end_step,
    prepare_settings,
    remove_warm_start,
    use_warm_start,
)
from mcore_rl.jobs.run_plan import ACTOR, WARM_START, Role, RunPlan, plan_run
from mcore_rl.models.transformers_model import load_transformers_config
from mcore_rl.observability.console import show_line, show_waiting
from mcore_rl.observability.memory import PeakMemory
from mcore_rl.observability.process import get_start_time
from mcore_rl.rollout.desired_servers import read_desired_servers
from mcore_rl.rollout.server_pool import LoadFormat, ServerPool
from mcore_rl.rollout.weight_updater import ExportError, connect
from mcore_rl.rollout.worker import ModelServer, ModelServerSpec, RolloutSpec, RolloutWorker
from mcore_rl.trainers import supervised
from mcore_rl.trainers.base import RLTrainer, TrainerInputs, load_trainer
from mcore_rl.trainers.checkpointing import CheckpointManager, Stateful, handle_stop_signals
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.evaluation import build_test_sets
from mcore_rl.trainers.objectives import SupervisedObjective
from mcore_rl.trainers.policy_checks import compute_logprob_gaps
from mcore_rl.trainers.sample_log import SampleLog
from mcore_rl.trainers.step_recorder import StepRecorder

if TYPE_CHECKING:
    from mcore_rl.agents.frozen_model import ModelAddress


def run(config: RLConfig) -> None:
    """Run the job; all of its files are in config.output_dir.

    Raises:
        ConfigError: A setting or an input is wrong; nothing was started, nothing is left.
        RunFailed: The run had to stop.
        RunStopped: A signal has ended the run, which can be resumed.
    """
    started = get_start_time()
    config = resolve_for_nodes(config)
    with (
        lock_run_dir(config.output_dir, config.resume) as run_lock,
        open_job_scope(run_lock) as scratch_dir,
        handle_stop_signals(config) as stop,
        PeakMemory() as memory,
    ):
        with show_waiting("checking the inputs"):
            start = _check_start(config, run_lock.folder)
        if start is None:
            return
        prepared, plan, inputs = start.config, start.plan, start.inputs
        checkpoint, logs = start.checkpoint, get_log_dir(run_lock.folder)
        with (
            open_session(prepared, plan.num_devices, scratch_dir),
            summarize_failure(logs / TRACES),
            Pools(plan, get_device_resource(), prepared.timeouts, logs) as pools,
            contextlib.ExitStack() as stack,
        ):
            output, ranks = RunOutput(run_lock.folder, config, checkpoint), None
            output.memory = memory
            if inputs.images is not None:
                inputs.images.store.open_folder()
            if inputs.examples is not None:
                ranks = _warm_start(prepared, plan, inputs.examples, output, pools, stack)
                prepared = use_warm_start(prepared, run_lock.folder)
                plan = plan_run(prepared)
            run = _Run(config, prepared, plan, inputs, start.digests, output, checkpoint, stop)
            run.train(pools, ranks)
        if config.task.name:  # the models of built-in tasks are small
            _record_example(inputs, output)
        output.finish(peak_memory_bytes=memory.peak_bytes, wall_s=time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Start:
    """The checked inputs of a run."""

    config: RLConfig  # with the model and data that were made
    plan: RunPlan
    inputs: Inputs
    digests: dict[str, str]  # of the data sources, by setting
    checkpoint: RunCheckpoint | None  # to resume from


def _check_start(config: RLConfig, folder: Path) -> _Start | None:
    """Find the checkpoint to resume from, and check all inputs. None: the run has ended already."""
    checkpoint = find_checkpoint_on_nodes(config, folder)
    if last := get_end_step(config, checkpoint, folder):
        print(f"the run in {folder} has ended after step {last}")
        return None
    check_export(config.checkpoint.export_to)
    if checkpoint is None and config.resume == "auto":
        remove_warm_start(folder)
    config = prepare_settings(config, folder, checkpoint)
    plan = plan_run(config)
    check_critic(plan, checkpoint, config.algorithm.advantage)
    inputs = check_inputs(config, plan)
    config = limit_evaluation(config, inputs)  # which decides how many sequences servers have
    plan = plan_run(config)
    digests = check_data(checkpoint, config.data, inputs.train, inputs.tests.values())
    disk_space.check_disk_space(config, plan, folder, checkpoint.step if checkpoint else 0)
    return _Start(config, plan, inputs, digests, checkpoint)


def _warm_start(
    config: RLConfig,
    plan: RunPlan,
    examples: Batch,
    output: RunOutput,
    pools: Pools,
    stack: contextlib.ExitStack,
) -> WorkerGroup | None:
    """Train on examples, and write the weights; return workers to reuse.

    The workers, which end with `stack`, are None if the actor needs other ranks. To start processes
    and import Megatron in them takes longer than the rest of a trainer's start.
    """
    warm, role = config.warm_start, plan[WARM_START]
    path = output.folder / WARM_START
    with contextlib.ExitStack() as warm_stack:
        model = warm_stack.enter_context(pools.start(role))
        model.call(ModelWorker.initialize)
        with output.progress("warm_start", warm.num_steps) as report:
            batches = ExampleBatches(examples.take, [len(examples)], warm.batch_size, config.seed)
            supervised.train(SupervisedObjective(model), batches, warm.num_steps, report)
        disk_space.export_weights(model, path, disk_space.compute_weight_bytes(config))
        if _has_same_ranks(role, plan[ACTOR]):
            stack.push(warm_stack.pop_all())
            return model
    return None


def _has_same_ranks(first: Role, second: Role) -> bool:
    """Return whether the processes of one role can be those of the other."""
    if first.layout.world_size != second.layout.world_size:
        return False
    return build_rank_environment(first) == build_rank_environment(second)


@dataclass(frozen=True, slots=True)
class _Run:
    """Reinforcement learning, after the warm start."""

    user_config: RLConfig
    config: RLConfig  # user_config with the model and data that were made
    plan: RunPlan
    inputs: Inputs
    digests: dict[str, str]  # of the data sources, by setting
    output: RunOutput
    checkpoint: RunCheckpoint | None  # to resume from
    stop: StopSignals

    def train(self, pools: Pools, ranks: WorkerGroup | None) -> None:
        """Start the models, train, export.

        Args:
            ranks: Workers of the warm start to reuse for the actor. None starts new ones.
        """
        config, output = self.config, self.output
        with contextlib.ExitStack() as stack:
            # Ends after the servers: until they end, it may wait for them.
            thread = stack.enter_context(ThreadPoolExecutor(1, "generation"))
            load_format = choose_load_format(config, resumes=self.checkpoint is not None)
            with show_waiting("starting the servers and the trainer"):
                devices = _start_models(config, self.plan, pools, ranks, load_format, stack)
            trainer = self._build_trainer(devices, thread)
            if self.checkpoint is None and load_format == "dummy":
                with show_waiting("sending the weights"):
                    devices.offload_rollout()
                    devices.update_weights(version=0)
            if self.checkpoint is None and trainer.evaluation.is_due(0):
                with show_waiting("evaluating"):
                    output.write(0, trainer.evaluation.run(0))
            if self.checkpoint is not None:
                with show_waiting("loading the checkpoint"):
                    trainer.checkpoints.restore(self.checkpoint)
            if config.algorithm.correction.use_rollout_log_probs:
                print(
                    "algorithm.correction.use_rollout_log_probs=true: no step compares the "
                    "servers' log-probs with the trainer's"
                )
            self._run_steps(trainer)
            with show_waiting("exporting"):
                self._export(trainer)

    def _build_trainer(self, devices: DeviceSharing, thread: Executor) -> RLTrainer:
        config, inputs, folder = self.config, self.inputs, self.output.folder

        def build_checkpoints(states: Mapping[str, Stateful]) -> CheckpointManager:
            return CheckpointManager(
                self.user_config,
                folder,
                devices,
                states,
                lambda: self.output.results,
                self.stop,
                disk_space.compute_weight_bytes(config),
                self.digests,
            )

        return load_trainer(config.trainer.mode)(
            TrainerInputs(
                config=config,
                devices=devices,
                prompts=inputs.train,
                test_sets=build_test_sets(inputs.tests, config.trainer.eval_samples),
                sample_log=SampleLog(folder, inputs.tokenizer, config.sample_log, devices.actor),
                thread=thread,
                record_evaluation=self.output.record_evaluation,
                build_checkpoints=build_checkpoints,
                experts=list_replayed_experts(config),
                recorder=StepRecorder(
                    devices.models,
                    config.profile,
                    folder,
                    config.trainer.num_steps,
                    self.output.record_expert_load,
                    self.output.results,
                ),
            )
        )

    def _run_steps(self, trainer: RLTrainer) -> None:
        """Run the loop. When the disk is full, export the weights elsewhere."""
        output, devices = self.output, trainer.devices
        try:
            with (
                output.progress("training", self.config.trainer.num_steps) as report,
                self.stop.defer_to_step_end(),
            ):
                trainer.run(report)
            if summary := trainer.warnings.summary():
                show_line(summary)
        except (OutputError, ExportError) as error:
            devices.offload_rollout()
            devices.use("actor")
            num_bytes = disk_space.compute_weight_bytes(self.config)
            reason = disk_space.export_to_any_disk(
                devices.actor, output.folder / CHECKPOINT, num_bytes
            )[1]
            raise RunFailed(f"{error}; {reason}") from error

    def _export(self, trainer: RLTrainer) -> None:
        """Compare log-probs of trainer and servers on the last evaluation; export the actor."""
        evaluation, devices, output = trainer.evaluation, trainer.devices, self.output
        if not evaluation.latest:  # a run that is resumed after its last step
            evaluation.run(self.config.trainer.num_steps)
        devices.offload_rollout()
        devices.use("actor")
        actor, temperature = devices.actor, evaluation.temperature
        if temperature is not None:  # else the servers' log-probs are not comparable
            score = ModelWorker.compute_log_probs
            for samples in evaluation.latest:
                scored = actor.call(score, samples, temperature=temperature, replay=False)
                columns = select_small_columns(scored)
                output.record_gap(apply_on_rank_zero(actor, compute_logprob_gaps, columns))
        disk_space.export_weights(
            actor, output.folder / CHECKPOINT, disk_space.compute_weight_bytes(self.config)
        )
        export_checkpoint(output.folder / CHECKPOINT, self.config.checkpoint.export_to)


def choose_load_format(config: RLConfig, *, resumes: bool) -> LoadFormat:
    """Return what servers start with.

    A run that resumes sends them its checkpoint's weights before they serve. A transport's plan
    covers every element of every parameter, which workers check; nothing proves that of a full
    export, which vLLM's own loader reads.
    """
    if config.weight_sync.method == "full_export" or config.rollout.lora == "adapter":
        return "checkpoint"
    load_format = cast(LoadFormat, config.rollout.load_format)
    return "dummy" if load_format == "auto" and resumes else load_format


def _start_models(
    config: RLConfig,
    plan: RunPlan,
    pools: Pools,
    ranks: WorkerGroup | None,
    load_format: LoadFormat,
    stack: contextlib.ExitStack,
) -> DeviceSharing:
    """Start all roles at a time and load their weights.

    The servers serve when this returns, or wait for weights.

    Roles that share devices load one after the other, and are then offloaded.
    """
    frozen_servers = stack.enter_context(build_frozen_servers(config, plan, pools))
    servers = stack.enter_context(build_server_pool(config, plan, pools, load_format))
    preparing = [*servers.submit_prepare(), *frozen_servers.submit_prepare()]
    models = {}
    for role in plan.roles:
        if role.name == ACTOR and ranks is not None:
            ranks.rebuild(ACTOR, role.layout, *role.build_worker_arguments())
            models[role.name] = ranks
        else:
            models[role.name] = stack.enter_context(pools.start(role, wait=False))
    groups = [*frozen_servers.groups.values(), *models.values()]
    wait_until_built([*servers.groups, *groups])
    for line in list_rank_nodes([servers, *groups]):
        print(line)
    starting = frozen_servers.submit_start()
    waiting_for = [*preparing, *starting]
    if not plan.servers_sleep:
        waiting_for += servers.submit_start()
    for name, model in models.items():
        waiting_for.append(model.submit(ModelWorker.initialize))
        if plan.takes_turns(name):
            gather_results(waiting_for)
            model.call(ModelWorker.to, "host")
    gather_results(waiting_for)
    if plan.servers_sleep:
        gather_results(servers.submit_start())
    servers.mark_started()
    if starting:
        servers.connect_models(frozen_servers.build_addresses(gather_results(starting)))
    sync = connect(config, models[ACTOR], servers, disk_space.compute_weight_bytes(config))
    keeps_requests = plan.loop == "fully_async"
    return DeviceSharing(plan.pool_names, models, servers, sync, keeps_requests)


@contextlib.contextmanager
def build_server_pool(
    config: RLConfig, plan: RunPlan, pools: Pools, load_format: LoadFormat = "checkpoint"
) -> Iterator[ServerPool]:
    """Build the generation servers of the policy; the caller waits for them and starts them."""
    spec = RolloutSpec(
        model_path=config.model.path,
        chat_date=config.model.chat_date,
        dtype=config.model.dtype,
        max_model_tokens=config.max_sequence_tokens,
        rollout=config.rollout,
        reward=config.reward,
        agent=config.agent,
        seed=config.seed,
        timeout_s=config.inner_timeout_s,
        can_sleep=plan.servers_sleep,
        gpu_ids=pools.get_gpu_ids("rollout"),
        models=plan.models,
        adapter_rank=config.actor.lora.rank if config.rollout.lora == "adapter" else 0,
        experts=list_replayed_experts(config),
        images_folder=get_images_folder(config.data, config.output_dir),
        max_image_pixels=config.data.max_image_pixels,
        num_sequences=_get_num_sequences(plan, "rollout"),
    )
    num_servers, nodes = config.rollout.num_servers, config.rollout.nodes_per_server
    desired = functools.partial(read_desired_servers, Path(config.output_dir), num_servers)

    def start(number: int) -> WorkerGroup:
        name = f"rollout-{number}" if num_servers > 1 else "rollout"
        first = number * nodes
        return pools.group(
            "rollout", RolloutWorker, (spec, number), Layout(tp=nodes), first_rank=first,
            name=name, wait=False, num_parts=len(spec.experts.stages) if spec.experts else 0,
        )  # fmt: skip

    with ServerPool(
        start,
        num_servers,
        max_restarts=config.rollout.max_restarts,
        takes_turns=spec.can_sleep,
        timeouts=config.timeouts,
        desired=desired,
        load_format=load_format,
    ) as servers:
        yield servers
        servers.shut_down()


def _get_num_sequences(plan: RunPlan, name: str) -> int | None:
    servers = plan.find_servers(name)
    return None if servers is None else servers.num_sequences


@dataclass(slots=True)
class FrozenServers:
    """Servers of the frozen models in `models`, by name."""

    groups: dict[str, WorkerGroup]
    keys: dict[str, str] = field(repr=False)

    def submit_prepare(self) -> list[PendingCall[list[None]]]:
        """Submit the preparation of all servers."""
        return [group.submit(ModelServer.prepare) for group in self.groups.values()]

    def submit_start(self) -> list[PendingCall[list[str]]]:
        """Submit the start of all servers; each call returns the URLs of a model's servers."""
        return [group.submit(ModelServer.start) for group in self.groups.values()]

    def build_addresses(self, urls: list[Any]) -> dict[str, ModelAddress]:
        """Return the address of each model, from the results of `submit_start`."""
        from mcore_rl.agents.frozen_model import ModelAddress  # imports HTTP clients

        return {
            name: ModelAddress(tuple(model_urls), self.keys[name])
            for name, model_urls in zip(self.groups, urls, strict=True)
        }


@contextlib.contextmanager
def build_frozen_servers(config: RLConfig, plan: RunPlan, pools: Pools) -> Iterator[FrozenServers]:
    """Build the servers of frozen models; the caller waits for them and starts them.

    Each model has a separate API key, which is passed to its servers and to the policy's workers.
    """
    servers = FrozenServers({}, {})
    with contextlib.ExitStack() as stack:
        for name, model in plan.models.items():
            if model.adapter:
                continue
            servers.keys[name], role = secrets.token_urlsafe(32), f"{ROLE}{name}"
            spec = ModelServerSpec(
                model_path=model.path,
                dtype=config.model.dtype,
                max_context=model.max_context,
                servers=model.servers,
                seed=config.seed,
                timeout_s=config.inner_timeout_s,
                key=servers.keys[name],
                num_sequences=_get_num_sequences(plan, role),
            )
            layout = Layout(dp=model.servers.num_servers)
            servers.groups[name] = stack.enter_context(
                pools.group(role, ModelServer, (spec,), layout, name=role, wait=False)
            )
        yield servers
        for group in servers.groups.values():
            try:
                group.call(ModelServer.shut_down)
            except WorkerError as error:  # a server died, and the run went on with the others
                print(str(error).splitlines()[0])


@contextlib.contextmanager
def open_session(config: RLConfig, num_devices: int, scratch_dir: Path) -> Iterator[None]:
    """Start a private Ray with the resources of the run, or join the Ray at RAY_ADDRESS.

    Prints a line if the object stores of a joined Ray are too small.

    Raises:
        ConfigError: /dev/shm is too small for the object store.
    """
    held = estimate_sample_bytes(config)
    store = choose_object_store_bytes(config.object_store_bytes, held, setting="object_store_bytes")
    needed = {get_device_resource(): num_devices}
    with ray_session(
        temp_dir=scratch_dir,
        log_to_driver=False,
        resources=needed if CPU_RESOURCE in needed else None,
        needed=needed,
        object_store_bytes=store,
        timeouts=config.timeouts,
    ):
        if os.environ.get("RAY_ADDRESS"):
            warn_of_small_stores(
                held, get_device_resource(), config.rollout.num_servers * config.rollout.num_workers
            )
        yield


def _record_example(inputs: Inputs, output: RunOutput) -> None:
    """Load the export with transformers, and record its answer to the first held-out prompt."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    first, images = next(iter(inputs.tests.values()))[0], inputs.images
    prompt_ids, options = torch.tensor([first.prompt_ids]), {}
    auto_class = transformers.AutoModelForCausalLM
    if images is not None:
        auto_class = transformers.AutoModelForImageTextToText
    if images is not None and first.images:
        files = map(images.store.read, first.images)
        pixels, grids = zip(*map(images.tokens.compute_pixels, files), strict=True)
        options = {
            "pixel_values": torch.cat(pixels),
            "image_grid_thw": torch.stack(grids),
            "mm_token_type_ids": (prompt_ids == images.tokens.token_id).int(),
        }
    path = output.folder / CHECKPOINT
    model = auto_class.from_pretrained(
        path,
        config=load_transformers_config(path),
        local_files_only=True,
        trust_remote_code=False,
    )
    ids = model.generate(prompt_ids, do_sample=False, max_new_tokens=64, **options)[0].tolist()
    output.results["example"] = {
        "prompt": inputs.tokenizer.decode(first.prompt_ids),
        "response": inputs.tokenizer.decode(ids[prompt_ids.shape[1] :]),
        "answer": first.fields["answer"],
    }
