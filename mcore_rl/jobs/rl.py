"""The reinforcement-learning job: check, warm-start, train, evaluate, export, report."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from mcore_rl.algorithms.losses import ValueClipSettings, negative_log_likelihood, value_clip
from mcore_rl.checkpoint.run_checkpoints import RunCheckpoint
from mcore_rl.config.resolve import for_lane, resolve
from mcore_rl.config.resolve_distillation import OF_TOP_TOKENS
from mcore_rl.config.schema import EngineConfig, Layout, LoRAConfig, RLConfig
from mcore_rl.controller.pending import gathered
from mcore_rl.controller.stop_signals import StopSignals, stop_signals
from mcore_rl.controller.worker_group import WorkerGroup, wait_until_built
from mcore_rl.data.batch import Batch
from mcore_rl.data.examples import ExampleBatches
from mcore_rl.engine.base import EngineSpec, LossFunction, backend_of
from mcore_rl.jobs import room
from mcore_rl.jobs.example import record_example
from mcore_rl.jobs.failure import RunFailed, summarize_failure
from mcore_rl.jobs.loop import Loop
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
from mcore_rl.trainers import offline
from mcore_rl.workers.checkpointer import Checkpointer, how_to_go_on
from mcore_rl.workers.evaluation import Evaluation, held_out
from mcore_rl.workers.model_worker import ModelWorker
from mcore_rl.workers.near_data import near
from mcore_rl.workers.objectives import SupervisedObjective
from mcore_rl.workers.policy_checks import logprob_gaps
from mcore_rl.workers.policy_loss import PolicyLoss, reads_squares
from mcore_rl.workers.rollout_worker import RolloutSpec, RolloutWorker
from mcore_rl.workers.sample_tables import SampleTables
from mcore_rl.workers.server_groups import LoadFormat
from mcore_rl.workers.server_pool import ServerPool
from mcore_rl.workers.turns import Turns, model_moves, servers_sleep
from mcore_rl.workers.wanted_servers import read_wanted_servers
from mcore_rl.workers.weight_sync import ExportError, connect


def run(config: RLConfig) -> None:
    """Run the job; everything it leaves lies in config.output_dir.

    Raises:
        ConfigError: a setting or an input is wrong; nothing has been started, nothing is left.
        RunFailed: the run had to stop.
        RunStopped: a signal has ended it, and it can go on.
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
            found = checkpoint_read_by_nodes(config, claim.folder)
            if last := ended_after(config, found, claim.folder):
                print(f"the run in {claim.folder} has ended after step {last}")
                return
            if found is None and config.resume == "auto":
                clear(claim.folder)
            prepared = prepare(config, claim.folder, found)
            inputs = check_inputs(prepared)
            digests = check_data(found, prepared.data, inputs.train, inputs.tests.values())
            room.check_room(prepared, claim.folder, found.step if found else 0)
        with (
            session(prepared, num_devices(pool_plans(prepared)), scratch),
            summarize_failure(log_dir(claim.folder) / TRACES),
            Pools(prepared, resource(), log_dir(claim.folder)) as pools,
            contextlib.ExitStack() as kept,
        ):
            output, ranks = RunOutput(claim.folder, config, found), None
            if inputs.examples is not None:
                prepared, ranks = _warm_start(prepared, inputs.examples, output, pools, kept)
            run = _Run(config, prepared, inputs, digests, output, found, stop)
            _reinforce(run, pools, ranks)
        if config.task.name:  # a model that was made small enough to load here
            record_example(inputs, output)
        output.finish(peak_memory_bytes=memory.peak_bytes, wall_s=time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Run:
    """What reinforcement learning is told."""

    asked: RLConfig  # the settings that were given
    config: RLConfig  # the same, with the model and the data that were made
    inputs: Inputs
    digests: dict[str, str]  # of the data, by setting
    output: RunOutput
    found: RunCheckpoint | None  # what it goes on from
    stop: StopSignals


@contextlib.contextmanager
def _stop_signals(config: RLConfig) -> Iterator[StopSignals]:
    """Without checkpoints no signal waits for anything."""
    if not config.trainer.save_every:
        yield StopSignals()
        return
    with stop_signals(how_to_go_on(config)) as stop:
        yield stop


def _warm_start(
    config: RLConfig,
    examples: Batch,
    output: RunOutput,
    pools: Pools,
    kept: contextlib.ExitStack,
) -> tuple[RLConfig, WorkerGroup | None]:
    """Supervised training; the settings that come back start from its checkpoint.

    With them come its ranks, now on `kept`, if the actor can have them: to start processes and to
    import Megatron there takes longer than all else that a trainer does before it trains.
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
    with contextlib.ExitStack() as ended:
        loss, spec = negative_log_likelihood, _engine_spec(config, engine, warm.num_steps)
        model = ended.enter_context(_model(pools, "actor", spec, loss, "warm_start"))
        model.initialize()
        with output.progress("warm_start", warm.num_steps) as report:
            batches = ExampleBatches(examples.take, [len(examples)], warm.batch_size, config.seed)
            offline.train(SupervisedObjective(model), batches, warm.num_steps, report)
        room.export(model, path, room.weight_bytes(config))
        is_kept = _same_ranks(engine, config.actor)
        if is_kept:
            kept.push(ended.pop_all())
    prepared = replace(config, model=replace(config.model, path=str(path)))
    return prepared, model if is_kept else None


def _same_ranks(one: EngineConfig, other: EngineConfig) -> bool:
    """Whether processes that were started for one engine can have the other."""
    environments = [
        backend_of(engine).rank_environment(engine.layout, lane()) for engine in (one, other)
    ]
    return one.layout.world_size == other.layout.world_size and environments[0] == environments[1]


def _reinforce(run: _Run, pools: Pools, ranks: WorkerGroup | None) -> None:
    """`ranks` have done the warm start and are the actor's from now on; None: it needs its own."""
    config, inputs, output = run.config, run.inputs, run.output
    with contextlib.ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1, "generation"))  # it ends after them
        load_format = choose_load_format(config, goes_on=run.found is not None)
        with waiting("starting the servers and the trainer"):
            turns = _started(config, pools, ranks, load_format, stack)
        loop, actor = Loop.of(config, turns, inputs.train, thread), turns.actor
        checkpoint, num_bytes = output.folder / CHECKPOINT, room.weight_bytes(config)
        checkpointer = Checkpointer(
            run.asked,
            output.folder,
            turns,
            loop.parts,
            lambda: output.results,
            run.stop,
            num_bytes,
            run.digests,
        )
        tables = SampleTables(output.folder, inputs.tokenizer, config.samples, actor)
        tests = held_out(inputs.tests, config.trainer.eval_samples)
        evaluation = Evaluation(config, loop.rollout, tests, tables, output.evaluated)
        if run.found is None and load_format == "dummy":
            with waiting("sending the weights"):
                turns.stop_serving()
                turns.serve_again()
        if run.found is None and evaluation.is_due(0):
            with waiting("evaluating"):
                output.write(0, evaluation.run(0))
        if run.found is not None:
            with waiting("loading the checkpoint"):
                checkpointer.restore(run.found)
        if config.algorithm.correction.use_rollout_log_probs:
            print(
                "algorithm.correction.use_rollout_log_probs=true: no step compares the servers' "
                "log-probs with the trainer's"
            )
        try:
            with (
                output.progress("training", config.trainer.num_steps) as report,
                run.stop.heeded_after_a_step(),
            ):
                loop.train(checkpointer, evaluation, tables, report)
            if summary := loop.warnings.summary():
                show_line(summary)
        except (OutputError, ExportError) as error:  # a full disk: what has been learned is kept
            if isinstance(error, OutputError):  # else the actor has not left its devices yet
                turns.stop_serving()
                turns.begin_training()
            raise RunFailed(f"{error}; {room.kept(actor, checkpoint, num_bytes)[1]}") from error
        with waiting("exporting"):
            if not evaluation.latest:  # a run that goes on after its last step
                evaluation.run(config.trainer.num_steps)
            turns.stop_serving()
            turns.begin_training()
            temperature = evaluation.temperature
            for samples in evaluation.latest if temperature is not None else ():
                scored = actor.compute_log_probs(samples, temperature=temperature, replay=False)
                output.compared(near(actor, logprob_gaps, scored))
            room.export(actor, checkpoint, num_bytes)


def choose_load_format(config: RLConfig, *, goes_on: bool) -> LoadFormat:
    """Return what servers start with; a run that goes on sends them its checkpoint's weights.

    A transport's plan covers every element of every parameter, which workers check. Of a full
    export, which vLLM's own loader reads, nothing proves that.
    """
    if config.weight_sync.method == "full_export":
        return "checkpoint"
    given = cast(LoadFormat, config.rollout.load_format)
    return "dummy" if given == "auto" and goes_on else given


def _started(
    config: RLConfig,
    pools: Pools,
    ranks: WorkerGroup | None,
    load_format: LoadFormat,
    stack: contextlib.ExitStack,
) -> Turns:
    """All roles, built beside each other and loaded; the servers serve, or wait for weights.

    What shares devices loads one after the other, and leaves them to the next.
    """
    loss, placement, roles = PolicyLoss(config.algorithm), config.placement, models_of(config)
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
        if model_moves(placement, name, roles):
            gathered(waiting_for)
            model.to("host")
    gathered(waiting_for)
    if servers_sleep(placement, roles):
        gathered(servers.submit_start())
    servers.started()
    if starting:
        servers.connect_models(frozen_servers.addresses(gathered(starting)))
    sync = connect(config, actor, servers, room.weight_bytes(config))
    return Turns(placement, models, servers, sync, config.trainer.mode == "fully_async")


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
