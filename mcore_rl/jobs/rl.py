"""The reinforcement-learning job: check, warm-start, train, evaluate, export, report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.algorithms.losses import negative_log_likelihood
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import for_lane, resolve
from mcore_rl.config.schema import EngineConfig, Layout, LoRAConfig, RLConfig
from mcore_rl.controller.guard import guard
from mcore_rl.controller.pending import WorkerError, gathered
from mcore_rl.controller.pool import ResourcePool, ray_session
from mcore_rl.controller.worker_group import WorkerGroup, wait_until_built
from mcore_rl.data.batch import Batch
from mcore_rl.data.prompt_batches import held_out_batch, prompt_batches
from mcore_rl.engine.base import EngineSpec, LossFunction
from mcore_rl.engine.megatron.device import device_name, rank_environment
from mcore_rl.jobs import room
from mcore_rl.jobs.failure import RunFailed, told_in_one_line
from mcore_rl.jobs.output import CHECKPOINT, LOGS, OutputError, RunOutput, claimed
from mcore_rl.jobs.preflight import Inputs, check_inputs, prepare_task
from mcore_rl.models.base import read_config
from mcore_rl.observability.console import waiting
from mcore_rl.observability.memory import PeakMemory
from mcore_rl.trainers import sft
from mcore_rl.trainers.sync import SyncTrainer
from mcore_rl.workers.model_worker import ModelWorker
from mcore_rl.workers.policy_loss import PolicyLoss
from mcore_rl.workers.rollout_pool import RolloutPool
from mcore_rl.workers.rollout_worker import RolloutSpec, RolloutWorker
from mcore_rl.workers.steps import PolicyMismatchError, logprob_gaps
from mcore_rl.workers.weight_sync import connect

RANK = "rank"  # the Ray resource of the CPU lane
_SHARE_OF_ONE_DEVICE = 0.3  # of each of up to three groups: actor, reference, server


def run(config: RLConfig) -> RunOutput:
    """Run the job; everything it leaves lies in config.output_dir.

    Raises:
        ConfigError: a setting or an input is wrong; nothing has been started, nothing is left.
        RunFailed: the run had to stop.
    """
    started = time.monotonic()
    resolve(config)
    config = for_lane(config, device_name())
    with (
        claimed(config.output_dir) as claim,
        guard(claim.folder, logs=claim.folder / LOGS / "ray", locks=[claim.lock]) as scratch,
        PeakMemory() as memory,
    ):
        with waiting("checking the inputs"):
            prepared = prepare_task(config, claim.folder)
            inputs = check_inputs(prepared)
            room.check_room(prepared, claim.folder)
        with (
            _session(config, scratch),
            _told(claim.folder / LOGS / "error.txt"),
            contextlib.ExitStack() as kept,
        ):
            output, ranks = RunOutput(claim.folder, config), None
            if inputs.examples is not None:
                prepared, ranks = _warm_start(prepared, inputs.examples, output, kept)
            _reinforce(prepared, inputs, output, ranks)
        if config.task.name:  # a model that was made small enough to load here
            _generate_with_transformers(inputs, output)
        output.finish(peak_memory_bytes=memory.peak_bytes, wall_s=time.monotonic() - started)
    return output


def _told(trace_file: Path) -> AbstractContextManager[None]:
    """What stops a run that has started, bad input that shows late too."""
    return told_in_one_line(trace_file, ConfigError, WorkerError, PolicyMismatchError)


def _warm_start(
    config: RLConfig, examples: Batch, output: RunOutput, kept: contextlib.ExitStack
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
    path = output.folder / "warm_start"
    with contextlib.ExitStack() as ended:
        spec = _engine_spec(config, engine, warm.num_steps)
        model = ended.enter_context(_model(config, spec, negative_log_likelihood, "warm_start"))
        model.initialize()
        with output.progress("warm start", warm.num_steps, "warm_start/") as report:
            sft.train(
                model,
                examples,
                num_steps=warm.num_steps,
                batch_size=warm.batch_size,
                seed=config.seed,
                report=report,
            )
        room.export(model, path, room.weight_bytes(config))
        is_kept = _same_ranks(warm.layout, config.actor.layout)
        if is_kept:
            kept.push(ended.pop_all())
    prepared = replace(config, model=replace(config.model, path=str(path)))
    return prepared, model if is_kept else None


def _same_ranks(one: Layout, other: Layout) -> bool:
    """Whether processes that were started for one layout can serve the other."""
    return one.world_size == other.world_size and rank_environment(one) == rank_environment(other)


def _reinforce(
    config: RLConfig, inputs: Inputs, output: RunOutput, ranks: WorkerGroup | None
) -> None:
    """`ranks` have done the warm start and are the actor's from now on; None: it needs its own."""
    total_steps = config.trainer.num_steps * config.algorithm.num_mini_batches
    num_tests = config.trainer.eval_samples or len(inputs.test)
    tests = held_out_batch(inputs.test, min(num_tests, len(inputs.test)))
    with contextlib.ExitStack() as stack:
        loss = PolicyLoss(config.algorithm)
        with waiting("starting the servers and the trainer"):  # all beside each other
            servers = stack.enter_context(_servers(config))
            started, calls = [servers], [servers.start.submit()]
            spec, reference = _engine_spec(config, config.actor, total_steps), None
            if ranks is None:
                actor = stack.enter_context(_model(config, spec, loss, "actor", wait=False))
            else:
                actor = ranks
                actor.rebuild("actor", config.actor.layout, spec, loss)
            if config.algorithm.kl_coef:
                frozen = _engine_spec(config, _frozen(config.actor), 0)
                reference = stack.enter_context(
                    _model(config, frozen, None, "reference", wait=False)
                )
            for model in (actor, reference):
                if model is not None:
                    started.append(model)
                    calls.append(model.initialize.submit())
            wait_until_built(started)
            gathered(calls)
        rollout = RolloutPool(servers, config.rollout, config.seed)
        sync = connect(config, read_config(config.model.path), actor, servers)
        with waiting("evaluating"):
            output.evaluated("accuracy_warm_start", rollout.generate(tests, n=1))
        trainer = SyncTrainer(config, actor, reference, rollout, sync)
        prompts = prompt_batches(inputs.train, config.trainer.prompts_per_step, config.seed)
        checkpoint, num_bytes = output.folder / CHECKPOINT, room.weight_bytes(config)
        try:
            with output.progress("training", config.trainer.num_steps) as report:
                trainer.train(prompts, report)
        except OutputError as error:  # the disk is full: what has been learned is kept
            raise RunFailed(f"{error}; {room.kept(actor, checkpoint, num_bytes)[1]}") from error
        with waiting("evaluating and exporting"):
            after = actor.compute_log_probs(
                rollout.generate(tests, n=1), temperature=config.rollout.temperature
            )
            output.compared(logprob_gaps(after))
            output.evaluated("accuracy_grpo", after)
            room.export(actor, checkpoint, num_bytes)


def _frozen(engine: EngineConfig) -> EngineConfig:
    """The engine of a model that only scores: no adapters, nothing recorded."""
    return replace(engine, lora=LoRAConfig(), moe=replace(engine.moe, router_replay="off"))


def _generate_with_transformers(inputs: Inputs, output: RunOutput) -> None:
    """Load the export with transformers and let it answer the first held-out prompt."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(output.folder / CHECKPOINT, local_files_only=True)
    prompt_ids = torch.tensor([inputs.test[0].prompt_ids])
    ids = model.generate(prompt_ids, do_sample=False, max_new_tokens=64)[0].tolist()
    output.record(
        "example",
        {
            "prompt": inputs.tokenizer.decode(inputs.test[0].prompt_ids),
            "response": inputs.tokenizer.decode(ids[prompt_ids.shape[1] :]),
            "answer": inputs.test[0].fields["answer"],
        },
    )


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
    config: RLConfig,
    spec: EngineSpec,
    loss: LossFunction | None,
    name: str,
    *,
    wait: bool = True,
) -> Iterator[WorkerGroup]:
    """A training engine on ranks of its own; it has yet to be initialized.

    Without `wait` it is still being built, as a WorkerGroup is.
    """
    layout = spec.engine.layout
    with _group(
        config,
        ModelWorker,
        (spec, loss),
        layout,
        name,
        spec.engine.threads_per_rank,
        _SHARE_OF_ONE_DEVICE if config.one_device else 1,
        wait,
        rank_environment(layout),
    ) as group:
        yield group


@contextlib.contextmanager
def _servers(config: RLConfig) -> Iterator[WorkerGroup]:
    """The generation servers of a checkpoint: being built, and they have yet to be started."""
    spec = RolloutSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_model_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        rollout=config.rollout,
        reward=config.reward,
        seed=config.seed,
        timeout_s=config.inner_timeout_s,
    )
    layout = Layout(dp=config.rollout.num_servers)
    devices = _SHARE_OF_ONE_DEVICE if config.one_device else config.rollout.tp
    with _group(config, RolloutWorker, (spec,), layout, "rollout", 1, devices, wait=False) as group:
        yield group
        group.shut_down()


@contextlib.contextmanager
def _group(
    config: RLConfig,
    worker: type,
    args: tuple[Any, ...],
    layout: Layout,
    name: str,
    threads: int,
    devices: float,
    wait: bool,
    env: dict[str, str] | None = None,
) -> Iterator[WorkerGroup]:
    """`devices` of each rank."""
    resource = "GPU" if device_name() == "cuda" else RANK
    log_dir = Path(config.output_dir).absolute() / LOGS
    with (
        ResourcePool(
            layout.world_size,
            {resource: devices},
            timeout_s=config.timeouts.start_s,
            log_dir=log_dir,
        ) as pool,
        WorkerGroup(
            worker,
            init_args=args,
            layout=layout,
            pool=pool,
            timeouts=config.timeouts,
            name=name,
            threads_per_rank=threads,
            env=env,
            wait=wait,
        ) as group,
    ):
        yield group


def _session(config: RLConfig, scratch: Path) -> AbstractContextManager[None]:
    """A private Ray has as much as the run needs; on the CPU lane ranks share cores by turns."""
    models = 2 if config.algorithm.kl_coef else 1
    ranks = models * config.actor.layout.world_size + config.rollout.num_servers * config.rollout.tp
    if config.warm_start.num_steps:
        ranks = max(ranks, config.warm_start.layout.world_size)
    if device_name() == "cuda":
        return ray_session(scratch=scratch, log_to_driver=False, needed={"GPU": ranks})
    needed = {RANK: ranks}
    return ray_session(scratch=scratch, log_to_driver=False, resources=needed, needed=needed)
