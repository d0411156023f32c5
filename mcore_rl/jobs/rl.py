"""The reinforcement-learning job: check, warm-start, train, evaluate, export, report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.config.resolve import for_lane, resolve
from mcore_rl.config.schema import EngineConfig, Layout, LoRAConfig, RLConfig
from mcore_rl.controller.guard import guard
from mcore_rl.controller.pending import WorkerError, gathered
from mcore_rl.controller.pool import ResourcePool, ray_session
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch
from mcore_rl.data.prompt_batches import prompt_batch, prompt_batches
from mcore_rl.data.tasks import last_digit
from mcore_rl.engine.base import EngineSpec, LossFunction
from mcore_rl.engine.megatron.device import device_name, rank_environment
from mcore_rl.jobs.failure import told_in_one_line
from mcore_rl.jobs.output import RunOutput, claimed
from mcore_rl.jobs.preflight import Inputs, check_inputs
from mcore_rl.models.base import read_config
from mcore_rl.observability.console import waiting
from mcore_rl.observability.memory import PeakMemory
from mcore_rl.trainers import sft
from mcore_rl.trainers.sync import PolicyMismatchError, SyncTrainer, logprob_gaps
from mcore_rl.weight_sync.sync import connect
from mcore_rl.workers.model_worker import ModelWorker
from mcore_rl.workers.policy_loss import PolicyLoss, supervised_loss
from mcore_rl.workers.rollout_pool import RolloutPool
from mcore_rl.workers.rollout_worker import RolloutSpec, RolloutWorker

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
    with claimed(config.output_dir) as folder, guard(folder) as scratch, PeakMemory() as memory:
        with waiting("checking the inputs"):
            prepared = _prepare_task(config, folder)
            inputs = check_inputs(prepared)
        output = RunOutput(folder, config)
        session = ray_session(
            scratch=scratch,
            resources=_session_resources(config),
            log_to_driver=False,
            log_dir=folder / "logs",
        )
        trace_file = folder / "logs" / "error.txt"
        with told_in_one_line(trace_file, WorkerError, PolicyMismatchError), session:
            if inputs.examples is not None:
                prepared = _warm_start(prepared, inputs.examples, output)
            _reinforce(prepared, inputs, output)
        if config.task.name:  # a model that was made small enough to load here
            _generate_with_transformers(inputs, output)
        output.finish(peak_memory_bytes=memory.peak_bytes, wall_s=time.monotonic() - started)
    return output


def _prepare_task(config: RLConfig, folder: Path) -> RLConfig:
    """Make the synthetic task, when one is asked for, and point the settings at it."""
    if not config.task.name:
        return config
    task = last_digit.prepare(folder / "task", config.seed, config.task.worked_share)
    return replace(
        config,
        task=replace(config.task, name=""),
        model=replace(config.model, path=str(task.model_dir)),
        data=replace(config.data, train_file=str(task.train_file), test_file=str(task.test_file)),
        warm_start=replace(config.warm_start, train_file=str(task.warm_start_file)),
    )


def _warm_start(config: RLConfig, examples: Batch, output: RunOutput) -> RLConfig:
    """Supervised training; the settings that come back start from its checkpoint."""
    warm = config.warm_start
    engine = replace(
        config.actor,
        layout=warm.layout,
        optimizer=warm.optimizer,
        moe=replace(config.actor.moe, aux_loss_coef=warm.moe_aux_loss_coef, router_replay="off"),
        lora=LoRAConfig(),  # adapters are for what comes after it
    )
    path = output.folder / "warm_start"
    with _model(config, engine, "warm_start", supervised_loss, warm.num_steps) as model:
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
        model.export(str(path))
    return replace(config, model=replace(config.model, path=str(path)))


def _reinforce(config: RLConfig, inputs: Inputs, output: RunOutput) -> None:
    total_steps = config.trainer.num_steps * config.algorithm.num_mini_batches
    num_tests = config.trainer.eval_samples or len(inputs.test)
    tests = prompt_batch(inputs.test, range(min(num_tests, len(inputs.test))), 0)
    with contextlib.ExitStack() as stack:
        loss = PolicyLoss(config.algorithm)
        with waiting("starting the servers and the trainer"):
            servers = stack.enter_context(_servers(config))
            starts = [servers.start.submit()]  # the models load beside it
            actor = stack.enter_context(_model(config, config.actor, "actor", loss, total_steps))
            starts.append(actor.initialize.submit())
            reference = None
            if config.algorithm.kl_coef:
                frozen = _frozen(config.actor)
                reference = stack.enter_context(_model(config, frozen, "reference", None, 0))
                starts.append(reference.initialize.submit())
            gathered(starts)
        rollout = RolloutPool(servers, config.rollout, config.seed)
        sync = connect(config, read_config(config.model.path), actor, servers)
        with waiting("evaluating"):
            output.evaluated("accuracy_warm_start", rollout.generate(tests, n=1))
        trainer = SyncTrainer(config, actor, reference, rollout, sync)
        prompts = prompt_batches(inputs.train, config.trainer.prompts_per_step, config.seed)
        with output.progress("training", config.trainer.num_steps) as report:
            trainer.train(prompts, report)
        with waiting("evaluating and exporting"):
            after = actor.compute_log_probs(rollout.generate(tests, n=1))
            output.compared(logprob_gaps(after))
            output.evaluated("accuracy_grpo", after)
            actor.export(str(output.folder / "checkpoint"))


def _frozen(engine: EngineConfig) -> EngineConfig:
    """The engine of a model that only scores: no adapters, nothing recorded."""
    return replace(engine, lora=LoRAConfig(), moe=replace(engine.moe, router_replay="off"))


def _generate_with_transformers(inputs: Inputs, output: RunOutput) -> None:
    """Load the export with transformers and let it answer the first held-out prompt."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        output.folder / "checkpoint", local_files_only=True
    )
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


@contextlib.contextmanager
def _model(
    config: RLConfig, engine: EngineConfig, name: str, loss: LossFunction | None, total_steps: int
) -> Iterator[WorkerGroup]:
    """A training engine on ranks of its own; it has yet to be initialized."""
    spec = EngineSpec(
        model=config.model,
        engine=engine,
        temperature=config.rollout.temperature,
        seed=config.seed,
        total_steps=total_steps,
        entropy_in_loss=isinstance(loss, PolicyLoss) and config.algorithm.entropy_coef != 0,
    )
    with _group(
        ModelWorker,
        (spec, loss),
        engine.layout,
        name,
        engine.threads_per_rank,
        _SHARE_OF_ONE_DEVICE if config.one_device else 1,
        rank_environment(engine.layout),
    ) as group:
        yield group


@contextlib.contextmanager
def _servers(config: RLConfig) -> Iterator[WorkerGroup]:
    """The generation servers of a checkpoint; they have yet to be started."""
    spec = RolloutSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_model_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        rollout=config.rollout,
        reward=config.reward.name,
        seed=config.seed,
    )
    layout = Layout(dp=config.rollout.num_servers)
    devices = _SHARE_OF_ONE_DEVICE if config.one_device else config.rollout.tp
    with _group(RolloutWorker, (spec,), layout, "rollout", 1, devices) as group:
        yield group
        group.shut_down()


@contextlib.contextmanager
def _group(
    worker: type,
    args: tuple[Any, ...],
    layout: Layout,
    name: str,
    threads: int,
    devices: float,
    env: dict[str, str] | None = None,
) -> Iterator[WorkerGroup]:
    """`devices` of each rank."""
    resource = "GPU" if device_name() == "cuda" else RANK
    with (
        ResourcePool(layout.world_size, {resource: devices}) as pool,
        WorkerGroup(
            worker,
            init_args=args,
            layout=layout,
            pool=pool,
            name=name,
            threads_per_rank=threads,
            env=env,
        ) as group,
    ):
        yield group


def _session_resources(config: RLConfig) -> dict[str, float]:
    """On the CPU lane a rank takes one unit of a resource of its own: cores are shared by turns."""
    if device_name() == "cuda":
        return {}
    models = 2 if config.algorithm.kl_coef else 1
    ranks = models * config.actor.layout.world_size + config.rollout.num_servers * config.rollout.tp
    return {RANK: max(ranks, config.warm_start.layout.world_size)}
