"""Memory and time of supervised jobs (sft, dpo, rm), from settings and config.json alone.

The formulas are those of RL runs: memory.py, training.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mcore_rl.config.rules_train import count_row_conversations, get_data_config
from mcore_rl.config.schema import LoRAConfig, RMConfig, SFTConfig, TrainConfig
from mcore_rl.jobs.run_plan import (
    REFERENCE,
    RunPlan,
    needs_reference_log_probs,
    plan_supervised,
)
from mcore_rl.models.base import HFConfig
from mcore_rl.planner.flops import count_work
from mcore_rl.planner.generation import Lengths
from mcore_rl.planner.hardware import Hardware
from mcore_rl.planner.memory import (
    CONTEXT_BYTES,
    Conditions,
    MemoryPlan,
    Moment,
    Rows,
    count_fragmentation,
    count_nccl_bytes,
    count_node_bytes,
    count_pass_bytes,
    count_state_bytes,
    counts_activations,
)
from mcore_rl.planner.roles import RolePlan, plan_roles
from mcore_rl.planner.step import get_dtype
from mcore_rl.planner.training import Load, TrainingModel, UpdateTime, check_backend

# Memory


def plan_supervised_memory(
    config: TrainConfig, model: HFConfig, conditions: Conditions
) -> MemoryPlan:
    """Plan the memory of a resolved supervised job.

    Args:
        model: config.json of the model. Quantised weights are planned as what they become,
            model.dtype.
    """
    run = plan_supervised(config)
    roles = plan_roles(run, model)
    moments = [
        moment
        for role in roles
        for moment in _plan_role(config, run, model, conditions, role, roles[0])
    ]
    is_counted = counts_activations(config.engine, model)
    uncounted = () if is_counted else tuple(role.name for role in roles)
    host = _compute_host_bytes(config, run, roles, conditions.gpus_per_node)
    return MemoryPlan(tuple(roles), tuple(moments), host, None, uncounted)


def _plan_role(
    config: TrainConfig,
    run: RunPlan,
    model: HFConfig,
    conditions: Conditions,
    role: RolePlan,
    trained: RolePlan,
) -> Iterator[Moment]:
    """Yield the moments of a role; equal ranks are together.

    While a reference on shared devices computes, the trained model stays beside it.
    """
    passes = {"reference": ["log-probs"], "model": ["update"]}[role.name]
    if role is trained and not isinstance(config, SFTConfig):
        passes.insert(0, "scores" if isinstance(config, RMConfig) else "log-probs")
    is_beside = role is not trained and run.takes_turns(role.name)
    num_processes = len(run.get_pool(role.name).roles)
    for name in passes:
        folded: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for pp_rank, stage in enumerate(role.stages):
            kinds = count_state_bytes(config.engine, stage)
            if is_beside:
                weight_bytes = kinds["weights"]
                kinds = count_state_bytes(config.engine, trained.stages[pp_rank])
                kinds["weights"] += weight_bytes
            elif role is not trained:
                kinds = {"weights": kinds["weights"]}
            kinds |= _count_pass(config, model, conditions, pp_rank, trains=name == "update")
            if conditions.device_type == "cuda":
                kinds["CUDA contexts"] = CONTEXT_BYTES * num_processes
                kinds["NCCL"] = count_nccl_bytes(config.engine.layout) * num_processes
                kinds["fragmentation"] = count_fragmentation(kinds)
            folded.setdefault(tuple(kinds.items()), []).extend(stage.ranks)
        for items, ranks in folded.items():
            yield Moment(f"{role.name}: {name}", role.name, tuple(ranks), dict(items))


def _count_pass(
    config: TrainConfig, model: HFConfig, conditions: Conditions, pp_rank: int, *, trains: bool
) -> dict[str, int]:
    """Count the bytes of a pass over micro-batches of the longest rows, all of them scored."""
    longest = get_data_config(config).token_limit
    return count_pass_bytes(
        config.engine,
        model,
        Rows(config.trainer.batch_size * count_row_conversations(config), longest, longest),
        conditions,
        config.model.dtype,
        pp_rank,
        has_value_head=isinstance(config, RMConfig),
        trains=trains,
    )


def _compute_host_bytes(
    config: TrainConfig, run: RunPlan, roles: list[RolePlan], size: int
) -> dict[str, int]:
    """Return the bytes on the fullest node, without data."""
    host = Counter[str]()
    for role in roles:
        takes_turns = role is not roles[0] and run.takes_turns(role.name)
        host += count_node_bytes(config, role, config.engine, size, takes_turns=takes_turns)
    return dict(host)


# Time


@dataclass(frozen=True, slots=True)
class SupervisedStepTime:
    """Seconds of the parts of an optimizer step of a supervised job."""

    scores_s: float  # pass before the update: log-probs of dpo, scores of rm
    reference_s: float  # log-probs of dpo's reference
    offload_s: float  # of a reference on shared devices, to them and back to the host
    update: UpdateTime
    num_devices: int
    tokens: float  # of a step
    mfu: float  # of the update, over the peak of its dtype

    @property
    def step_s(self) -> float:
        return self.scores_s + self.reference_s + self.offload_s + self.update.total_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second and device."""
        return self.tokens / self.step_s / self.num_devices


def predict_supervised_step(
    config: TrainConfig, model: HFConfig, hardware: Hardware, lengths: Lengths
) -> SupervisedStepTime:
    """Predict an optimizer step.

    Args:
        config: Resolved settings.
        model: config.json of the model.
        lengths: Of the rows' conversations: prompts and what follows them.
    """
    engine, run = config.engine, plan_supervised(config)
    check_backend(engine)
    work = count_work(model)
    if isinstance(config, RMConfig):
        work = work.with_value_head()
    dtype = get_dtype(config, engine)
    rows = config.trainer.batch_size * count_row_conversations(config)
    tokens = rows * (lengths.mean + lengths.prompt)
    load = Load(tokens, lengths.sequence)
    trained = TrainingModel(work, engine, hardware, dtype)
    forward_s = trained.predict_forward(load)
    update = trained.predict_update(load)
    reference_s = offload_s = 0.0
    if needs_reference_log_probs(config):
        plain = replace(engine, lora=LoRAConfig())
        reference = TrainingModel(work, plain, hardware, dtype)
        reference_s = reference.predict_forward(load)
        if REFERENCE in run and run.takes_turns(REFERENCE):
            size = sum(reference.count_local_parameters()) * reference.itemsize
            offload_s = 2 * size / (hardware.host_bandwidth * hardware.host_share)
    num_devices = engine.layout.world_size
    flops = trained.count_training_flops(load)
    return SupervisedStepTime(
        scores_s=0.0 if isinstance(config, SFTConfig) else forward_s,
        reference_s=reference_s,
        offload_s=offload_s,
        update=update,
        num_devices=run.num_devices,
        tokens=tokens,
        mfu=flops / (update.total_s * num_devices * hardware.get_peak_flops(dtype)),
    )
