"""The reinforcement-learning job: check, warm-start, train, evaluate, export, report."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from mcore_rl.algorithms.losses import ValueClipSettings, negative_log_likelihood, value_clip
from mcore_rl.checkpoint.run_checkpoints import RunCheckpoint
from mcore_rl.config.resolve import for_lane, resolve
from mcore_rl.config.resolve_distillation import OF_TOP_TOKENS
from mcore_rl.config.resolve_mode import get_loop
from mcore_rl.config.schema import EngineConfig, Layout, LoRAConfig, RLConfig
from mcore_rl.controller.batch_ops import select_small_columns
from mcore_rl.controller.pending import gathered
from mcore_rl.controller.stop_signals import StopSignals, stop_signals
from mcore_rl.controller.worker_group import WorkerGroup, wait_until_built
from mcore_rl.data.batch import Batch
from mcore_rl.data.examples import ExampleBatches
from mcore_rl.engine.base import EngineSpec, LossFunction, backend_of
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.jobs import room
from mcore_rl.jobs.example import record_example
from mcore_rl.jobs.failure import RunFailed, summarize_failure
from mcore_rl.jobs.model_servers import model_servers
from mcore_rl.jobs.output import (
    CHECKPOINT,
    TRACES,
    OutputError,
    RunOutput,
    exclusive_run_dir,
    job_scope,
    log_dir,
)
from mcore_rl.jobs.placement import (
    Pools,
    frozen_engines,
    frozen_paths,
    models_of,
    models_with_paths,
    num_devices,
    places,
    pool_plans,
)
from mcore_rl.jobs.preflight import Inputs, check_inputs, has_experts
from mcore_rl.jobs.resume import (
    WARM_START,
    check_data,
    checkpoint_read_by_nodes,
    clear,
    ended_after,
    prepare,
)
from mcore_rl.jobs.roles import expert_layers
from mcore_rl.jobs.session import lane, resource, session
from mcore_rl.observability.console import show_line, waiting
from mcore_rl.observability.memory import PeakMemory
from mcore_rl.observability.start import began
from mcore_rl.rollout.desired_servers import read_wanted_servers
from mcore_rl.rollout.server_pool import LoadFormat, ServerPool
from mcore_rl.rollout.weight_updater import ExportError, connect
from mcore_rl.rollout.worker import RolloutSpec, RolloutWorker
from mcore_rl.trainers import supervised
from mcore_rl.trainers.base import RLTrainer, TrainerInputs
from mcore_rl.trainers.checkpointing import CheckpointManager, Stateful, how_to_resume
from mcore_rl.trainers.device_sharing import DeviceSharing, servers_sleep, shares_devices
from mcore_rl.trainers.evaluation import build_test_sets
from mcore_rl.trainers.objectives import SupervisedObjective
from mcore_rl.trainers.policy_checks import compute_logprob_gaps
from mcore_rl.trainers.policy_loss import reads_squares
from mcore_rl.trainers.registry import load_trainer
from mcore_rl.trainers.sample_log import SampleLog


def run(config: RLConfig) -> None:
    """Run the job; everything it leaves lies in config.output_dir.

    Raises:
        ConfigError: A setting or an input is wrong; nothing has been started, nothing is left.
        RunFailed: The run had to stop.
        RunStopped: A signal has ended it, and it can be resumed.
    """
    started = began()
    resolve(config)
    config = for_lane(config, lane(), has_experts=has_experts(config))
    with (
        exclusive_run_dir(config.output_dir, config.resume) as claim,
        job_scope(claim.folder, claim.lock) as scratch,
        _stop_signals(config) as stop,
        PeakMemory() as memory,
    ):
        with waiting("checking the inputs"):
            checkpoint = checkpoint_read_by_nodes(config, claim.folder)
            if last := ended_after(config, checkpoint, claim.folder):
                print(f"the run in {claim.folder} has ended after step {last}")
                return
            if checkpoint is None and config.resume == "auto":
                clear(claim.folder)
            prepared = prepare(config, claim.folder, checkpoint)
            inputs = check_inputs(prepared)
            digests = check_data(checkpoint, prepared.data, inputs.train, inputs.tests.values())
            room.check_room(prepared, claim.folder, checkpoint.step if checkpoint else 0)
        with (
            session(prepared, num_devices(pool_plans(prepared)), scratch),
            summarize_failure(log_dir(claim.folder) / TRACES),
            Pools(prepared, resource(), log_dir(claim.folder)) as pools,
            contextlib.ExitStack() as stack,
        ):
            output, ranks = RunOutput(claim.folder, config, checkpoint), None
            if inputs.examples is not None:
                prepared, ranks = _warm_start(prepared, inputs.examples, output, pools, stack)
            _Run(config, prepared, inputs, digests, output, checkpoint, stop).train(pools, ranks)
        if config.task.name:  # a model that was made small enough to load here
            record_example(inputs, output)
        output.finish(peak_memory_bytes=memory.peak_bytes, wall_s=time.monotonic() - started)


@contextlib.contextmanager
def _stop_signals(config: RLConfig) -> Iterator[StopSignals]:
    """Let a signal end the step first; without checkpoints it waits for nothing."""
    if not config.trainer.save_every:
        yield StopSignals()
        return
    with stop_signals(how_to_resume(config)) as stop:
        yield stop


def _warm_start(
    config: RLConfig,
    examples: Batch,
    output: RunOutput,
    pools: Pools,
    stack: contextlib.ExitStack,
) -> tuple[RLConfig, WorkerGroup | None]:
    """Train on examples; return the settings that start from its checkpoint.

    With them its workers, which end with `stack`, if the actor can have them: to start processes
    and to import Megatron there takes longer than all else that a trainer does before it trains.
    """
    warm = config.warm_start
    engine = replace(
        config.actor,
        layout=warm.layout,
        optimizer=warm.optimizer,
        moe=replace(config.actor.moe, aux_loss_coef=warm.moe_aux_loss_coef, router_replay="off"),
        lora=LoRAConfig(),  # adapters are for what comes after it
    )
    path = output.folder / WARM_START
    with contextlib.ExitStack() as own_stack:
        loss, spec = negative_log_likelihood, _engine_spec(config, engine, warm.num_steps)
        model = own_stack.enter_context(_model(pools, "actor", spec, loss, "warm_start"))
        model.initialize()
        with output.progress("warm_start", warm.num_steps) as report:
            batches = ExampleBatches(examples.take, [len(examples)], warm.batch_size, config.seed)
            supervised.train(SupervisedObjective(model), batches, warm.num_steps, report)
        room.export(model, path, room.weight_bytes(config))
        is_reused = _has_same_ranks(engine, config.actor)
        if is_reused:
            stack.push(own_stack.pop_all())
    prepared = replace(config, model=replace(config.model, path=str(path)))
    return prepared, model if is_reused else None


def _has_same_ranks(first: EngineConfig, second: EngineConfig) -> bool:
    """Return whether processes that were started for one engine can have the other."""
    environments = [
        backend_of(engine).rank_environment(engine.layout, lane()) for engine in (first, second)
    ]
    has_same_size = first.layout.world_size == second.layout.world_size
    return has_same_size and environments[0] == environments[1]


@dataclass(frozen=True, slots=True)
class _Run:
    """Reinforcement learning, after the warm start."""

    given: RLConfig  # the settings of the user
    config: RLConfig  # the same, with the model and the data that were made
    inputs: Inputs
    digests: dict[str, str]  # of the data, by setting
    output: RunOutput
    checkpoint: RunCheckpoint | None  # what the run resumes from
    stop: StopSignals

    def train(self, pools: Pools, ranks: WorkerGroup | None) -> None:
        """Start the models, train, export.

        Args:
            ranks: Workers of the warm start to reuse for the actor. None starts new ones.
        """
        config, output = self.config, self.output
        with contextlib.ExitStack() as stack:
            # It ends after the servers, whose end ends what it waits for.
            thread = stack.enter_context(ThreadPoolExecutor(1, "generation"))
            load_format = choose_load_format(config, resumes=self.checkpoint is not None)
            with waiting("starting the servers and the trainer"):
                devices = _start_models(config, pools, ranks, load_format, stack)
            trainer = self._build_trainer(devices, thread)
            if self.checkpoint is None and load_format == "dummy":
                with waiting("sending the weights"):
                    devices.offload_rollout()
                    devices.update_weights(version=0)
            if self.checkpoint is None and trainer.evaluation.is_due(0):
                with waiting("evaluating"):
                    output.write(0, trainer.evaluation.run(0))
            if self.checkpoint is not None:
                with waiting("loading the checkpoint"):
                    trainer.checkpoints.restore(self.checkpoint)
            if config.algorithm.correction.use_rollout_log_probs:
                print(
                    "algorithm.correction.use_rollout_log_probs=true: no step compares the "
                    "servers' log-probs with the trainer's"
                )
            self._run_steps(trainer)
            with waiting("exporting"):
                self._export(trainer)

    def _build_trainer(self, devices: DeviceSharing, thread: Executor) -> RLTrainer:
        config, inputs, folder = self.config, self.inputs, self.output.folder

        def build_checkpoints(states: Mapping[str, Stateful]) -> CheckpointManager:
            return CheckpointManager(
                self.given,
                folder,
                devices,
                states,
                lambda: self.output.results,
                self.stop,
                room.weight_bytes(config),
                self.digests,
            )

        return load_trainer(config.trainer.mode)(
            TrainerInputs(
                config=config,
                devices=devices,
                prompts=inputs.train,
                test_sets=build_test_sets(inputs.tests, config.trainer.eval_samples),
                sample_log=SampleLog(folder, inputs.tokenizer, config.samples, devices.actor),
                thread=thread,
                record_evaluation=self.output.evaluated,
                build_checkpoints=build_checkpoints,
            )
        )

    def _run_steps(self, trainer: RLTrainer) -> None:
        """Run the loop. When the disk is full, export what was learned."""
        output, devices = self.output, trainer.devices
        try:
            with (
                output.progress("training", self.config.trainer.num_steps) as report,
                self.stop.heeded_after_a_step(),
            ):
                trainer.run(report)
            if summary := trainer.warnings.summary():
                show_line(summary)
        except (OutputError, ExportError) as error:
            devices.offload_rollout()
            devices.use("actor")
            num_bytes = room.weight_bytes(self.config)
            reason = room.kept(devices.actor, output.folder / CHECKPOINT, num_bytes)[1]
            raise RunFailed(f"{error}; {reason}") from error

    def _export(self, trainer: RLTrainer) -> None:
        """Compare log-probs with those of the last evaluation, and export the actor."""
        evaluation, devices, output = trainer.evaluation, trainer.devices, self.output
        if not evaluation.latest:  # a run that is resumed after its last step
            evaluation.run(self.config.trainer.num_steps)
        devices.offload_rollout()
        devices.use("actor")
        actor, temperature = devices.actor, evaluation.temperature
        for samples in evaluation.latest if temperature is not None else ():
            scored = actor.compute_log_probs(samples, temperature=temperature, replay=False)
            columns = select_small_columns(scored)
            output.compared(actor.apply(compute_logprob_gaps, columns))
        room.export(actor, output.folder / CHECKPOINT, room.weight_bytes(self.config))


def choose_load_format(config: RLConfig, *, resumes: bool) -> LoadFormat:
    """Return what servers start with.

    A run that resumes sends them its checkpoint's weights before they serve. A transport's plan
    covers every element of every parameter, which workers check; nothing proves that of a full
    export, which vLLM's own loader reads.
    """
    if config.weight_sync.method == "full_export":
        return "checkpoint"
    load_format = cast(LoadFormat, config.rollout.load_format)
    return "dummy" if load_format == "auto" and resumes else load_format


def _start_models(
    config: RLConfig,
    pools: Pools,
    ranks: WorkerGroup | None,
    load_format: LoadFormat,
    stack: contextlib.ExitStack,
) -> DeviceSharing:
    """Build all roles beside each other and load them.

    The servers serve when this returns, or wait for weights.

    Roles that share devices load one after the other, and leave them to the next.
    """
    loss = load_trainer(config.trainer.mode).build_loss(config)
    placement, roles = config.placement, models_of(config)
    frozen_servers = stack.enter_context(model_servers(config, pools))
    servers = stack.enter_context(server_pool(config, pools, load_format))
    preparing = [*servers.submit("prepare"), *frozen_servers.preparing()]
    total_steps = config.trainer.num_steps * config.algorithm.num_mini_batches
    spec = _engine_spec(config, config.actor, total_steps)
    spec = replace(spec, with_sum_pi_squared=reads_squares(config.algorithm))
    if ranks is None:
        actor = stack.enter_context(_model(pools, "actor", spec, loss, wait=False))
    else:
        actor = ranks
        actor.rebuild("actor", config.actor.layout, spec, loss)
    models = {"actor": actor}
    if "reference" in roles:
        frozen = _engine_spec(config, _frozen(config.actor), 0)
        models["reference"] = stack.enter_context(
            _model(pools, "reference", frozen, None, wait=False)
        )
    if "critic" in roles:
        models["critic"] = stack.enter_context(_critic(config, pools, total_steps))
    for role in frozen_engines(config):
        models[role] = stack.enter_context(_scorer(config, pools, role))
    others = [*frozen_servers.groups.values(), *models.values()]
    wait_until_built([*servers.groups, *others])
    for line in places([servers, *others]):
        print(line)
    starting = frozen_servers.starting()
    waiting_for = [*preparing, *starting]
    if not servers_sleep(placement, roles):
        waiting_for += servers.submit_start()
    for name, model in models.items():
        waiting_for.append(model.initialize.submit())
        if shares_devices(placement, name, roles):
            gathered(waiting_for)
            model.to("host")
    gathered(waiting_for)
    if servers_sleep(placement, roles):
        gathered(servers.submit_start())
    servers.started()
    if starting:
        servers.connect_models(frozen_servers.addresses(gathered(starting)))
    sync = connect(config, actor, servers, room.weight_bytes(config))
    is_async = get_loop(config.trainer) == "fully_async"
    return DeviceSharing(placement, models, servers, sync, keeps_requests=is_async)


def _critic(
    config: RLConfig, pools: Pools, total_steps: int
) -> AbstractContextManager[WorkerGroup]:
    critic = config.critic
    spec = _engine_spec(config, critic, total_steps)
    if critic.model_path:
        spec = replace(spec, model=replace(spec.model, path=critic.model_path))
    loss = functools.partial(value_clip, settings=ValueClipSettings(critic.clip_range))
    return _model(pools, "critic", spec, loss, model_type="value_model", wait=False)


def _scorer(config: RLConfig, pools: Pools, role: str) -> AbstractContextManager[WorkerGroup]:
    """The reward model, or a teacher."""
    spec = _engine_spec(config, frozen_engines(config)[role], 0)
    spec = replace(spec, model=replace(spec.model, path=frozen_paths(config)[role]))
    if role == "reward_model":
        return _model(pools, role, spec, None, model_type="reward_model", wait=False)
    distillation = config.algorithm.distillation
    if distillation.loss in OF_TOP_TOKENS:
        spec = replace(spec, num_top_log_probs=distillation.top_k)
    return _model(pools, role, spec, None, wait=False)


def _frozen(engine: EngineConfig) -> EngineConfig:
    """The engine of a model that only scores: no adapters, nothing recorded."""
    return replace(engine, lora=LoRAConfig(), moe=replace(engine.moe, router_replay="off"))


def _engine_spec(config: RLConfig, engine: EngineConfig, total_steps: int) -> EngineSpec:
    return EngineSpec(
        model=config.model,
        engine=engine,
        seed=config.seed,
        total_steps=total_steps,
        timeout_s=config.inner_timeout_s,
    )


@contextlib.contextmanager
def _model(
    pools: Pools,
    role: str,
    spec: EngineSpec,
    loss: LossFunction | None,
    name: str = "",
    *,
    model_type: str = "language_model",
    wait: bool = True,
) -> Iterator[WorkerGroup]:
    """A training engine on ranks of its own, not initialized; without `wait`, being built."""
    layout = spec.engine.layout
    with pools.group(
        role,
        ModelWorker,
        (spec, loss, model_type),
        layout,
        name=name or role,
        threads_per_rank=spec.engine.threads_per_rank,
        env=backend_of(spec.engine).rank_environment(layout, lane()),
        wait=wait,
    ) as group:
        yield group


@contextlib.contextmanager
def server_pool(
    config: RLConfig, pools: Pools, load_format: LoadFormat = "checkpoint"
) -> Iterator[ServerPool]:
    """The generation servers of a checkpoint: being built, and they have yet to be started."""
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
        can_sleep=servers_sleep(config.placement, models_of(config)),
        gpu_ids=pools.gpu_ids("rollout"),
        models=models_with_paths(config),
        experts=expert_layers(config),
    )
    num_servers, nodes = config.rollout.num_servers, config.rollout.nodes_per_server
    wanted = functools.partial(read_wanted_servers, Path(config.output_dir), num_servers)

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
        wanted=wanted,
        load_format=load_format,
    ) as servers:
        yield servers
        servers.shut_down()
