"""Time of each part of an RL step, from a run's settings, for each kind of trainer.

training.py and generation.py predict the parts, with formulas and sources in their docstrings.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.rules import are_colocated
from mcore_rl.config.schema import EngineConfig, RLConfig, TrainConfig
from mcore_rl.jobs.run_plan import CRITIC, Role, RunPlan, needs_reference_log_probs, plan_run
from mcore_rl.models.base import HFConfig, read_config
from mcore_rl.planner.flops import ModelWork, count_work
from mcore_rl.planner.generation import GenerationTime, Lengths, ServerModel
from mcore_rl.planner.hardware import Hardware
from mcore_rl.planner.training import Load, TrainingModel, UpdateTime, check_backend
from mcore_rl.trainers.policy_loss import find_log_prob_pass_reason


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of the parts of a trainer step, and the parts that decide its length."""

    generation: GenerationTime
    log_probs_s: float  # of the actor before the update
    reference_s: float
    reward_model_s: float
    teachers_s: float  # of all teachers, one after the other
    values_s: float  # of the critic, its update included
    update: UpdateTime  # of one mini-batch
    num_mini_batches: int
    offload_s: float  # roles that take turns on devices
    weight_sync_s: float
    step_s: float
    trainer_idle_s: float
    servers_idle_s: float
    num_devices: int
    tokens: float  # of a step, prompts included
    mfu: float  # of the update, over the peak of its dtype

    @property
    def update_s(self) -> float:
        return self.update.total_s * self.num_mini_batches

    @property
    def training_s(self) -> float:
        return self.scores_s + self.log_probs_s + self.values_s + self.update_s

    @property
    def scores_s(self) -> float:
        """Seconds of the frozen models: reference, reward model, teachers."""
        return self.reference_s + self.reward_model_s + self.teachers_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second and device."""
        return self.tokens / self.step_s / self.num_devices


def predict_step(
    config: RLConfig,
    model: HFConfig,
    hardware: Hardware,
    lengths: Lengths,
    *,
    sync_bytes: float | None = None,
    work: ModelWork | None = None,
) -> StepTime:
    """Predict a step of a run.

    Args:
        config: Resolved settings.
        model: config.json of the policy.
        sync_bytes: Most bytes into or out of a device in a weight sync, from its transfer plan.
            None: a server's shard of the weights, the most that a worker can receive.
        work: That of `model`, where it is counted already.
    """
    check_backend(config.actor)  # before its matrices are counted: another's have other rules
    work = work or count_work(model)
    actor, rollout = config.actor, config.rollout
    dtype = get_dtype(config, actor)
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    tokens = samples * (lengths.mean + lengths.prompt)
    num_mini_batches = config.algorithm.num_mini_batches
    sequence = lengths.sequence
    step_load, mini_load = Load(tokens, sequence), Load(tokens / num_mini_batches, sequence)
    engine = TrainingModel(work, actor, hardware, dtype)
    forward_s = engine.predict_forward(step_load)
    reads_log_probs = config.algorithm.correction.use_rollout_log_probs
    has_pass = not reads_log_probs and bool(find_log_prob_pass_reason(config))
    values_s = 0.0
    run = plan_run(config)
    if role := run.find(CRITIC):
        critic_dtype = get_dtype(config, config.critic)
        critic_work = work
        if role.path != config.model.path:
            critic_work = count_work(read_config(role.path))
        critic = TrainingModel(critic_work.with_value_head(), config.critic, hardware, critic_dtype)
        update_s = critic.predict_update(mini_load).total_s
        values_s = critic.predict_forward(step_load) + num_mini_batches * update_s
    scores = _predict_scores(config, run, hardware, step_load)
    update = engine.predict_update(mini_load)
    server = ServerModel(work, model, rollout, hardware, config.model.dtype)
    share = max(1, round(samples / rollout.num_servers))
    generation = server.predict(
        lengths.draw(share).tolist(), lengths.prompt, config.algorithm.group_size
    )
    is_shared = are_colocated(config.placement, "actor", "rollout")
    num_training = actor.layout.world_size
    num_devices = run.num_devices
    if sync_bytes is None:
        sync_bytes = server.count_weight_bytes()
    link = hardware.get_link(num_devices)
    parts = {
        "generation": generation,
        "log_probs_s": forward_s if has_pass else 0.0,
        # An actor with adapters is the reference without them.
        "reference_s": forward_s if needs_reference_log_probs(config) else 0.0,
        "reward_model_s": scores.pop("reward_model", 0.0),
        "teachers_s": sum(scores.values()),
        "values_s": values_s,
        "update": update,
        "num_mini_batches": num_mini_batches,
        "offload_s": _predict_offload(engine, actor, hardware) if is_shared else 0.0,
        "weight_sync_s": link.predict_s(sync_bytes, 2),
        "num_devices": num_devices,
        "tokens": tokens,
        "mfu": engine.count_training_flops(mini_load)
        / (update.total_s * num_training * hardware.get_peak_flops(dtype)),
    }
    empty = StepTime(**parts, step_s=0.0, trainer_idle_s=0.0, servers_idle_s=0.0)  # type: ignore[arg-type]
    steady_s = share * lengths.mean / generation.steady_tokens_per_s + generation.prefill_s
    step_s, trainer_idle, servers_idle = _combine(config.trainer.mode, is_shared, empty, steady_s)
    return StepTime(
        **parts,  # type: ignore[arg-type]
        step_s=step_s,
        trainer_idle_s=trainer_idle,
        servers_idle_s=servers_idle,
    )


def get_dtype(config: RLConfig | TrainConfig, engine: EngineConfig) -> str:
    """Return the dtype of an engine's products."""
    if engine.fp8.recipe != "off":
        return "float8"
    return "float32" if config.model.dtype == "float32" else "bfloat16"


def _predict_scores(
    config: RLConfig, run: RunPlan, hardware: Hardware, load: Load
) -> dict[str, float]:
    """Return the seconds of a pass of the reward model and of each teacher, by role."""
    seconds = {}
    for role in filter(Role.is_scoring, run):
        engine, work = role.spec.engine, count_work(read_config(role.path))
        check_backend(engine)
        if role.model_type == "reward_model":
            work = work.with_value_head()
        model = TrainingModel(work, engine, hardware, get_dtype(config, engine))
        seconds[role.name] = model.predict_forward(load)
    return seconds


def _predict_offload(engine: TrainingModel, actor: EngineConfig, hardware: Hardware) -> float:
    """Return the seconds to move weights and Adam's state to the host and back."""
    bytes_of_state = sum(engine.count_local_parameters()) * engine.itemsize
    if not actor.optimizer.cpu_offload:
        bytes_of_state += engine.count_optimizer_parameters() * engine.optimizer_itemsize
    return 2 * bytes_of_state / (hardware.host_bandwidth * hardware.host_share)


def _combine(
    mode: str, is_shared: bool, parts: StepTime, steady_s: float
) -> tuple[float, float, float]:
    """Return the seconds of a step, and the idle seconds of trainer and servers.

    sync: one after the other. one_step_off: the next step's responses are generated during this
    one's training. fully_async: servers never drain, at the rate of full slots. Trainers on shared
    devices take turns in each mode.
    """
    training, sync = parts.training_s, parts.weight_sync_s
    generation = parts.generation.total_s if mode != "fully_async" else steady_s
    if is_shared or mode == "sync":
        step = generation + training + parts.offload_s + sync
        if is_shared:
            return step, 0.0, 0.0
        return step, generation, training
    step = max(generation, training) + sync
    return step, max(0.0, generation - training), max(0.0, training - generation)
