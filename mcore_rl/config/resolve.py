"""Every rule between the settings of a job, checked before a process is started. Pure.

Those of a training engine are in resolve_engine.py.

A rule that fails raises ConfigError naming the setting, its value and what is allowed.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mcore_rl.config.agent_schema import resolve_agent
from mcore_rl.config.checks import (
    at_least,
    between,
    check_values,
    divides,
    iso_date,
    one_of,
    positive,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_algorithm import resolve_algorithm, with_level
from mcore_rl.config.resolve_distillation import MAX_WEIGHT, resolve_frozen
from mcore_rl.config.resolve_engine import (
    ModelSizes,
    resolve_engine,
    resolve_layout,
    resolve_optimizer,
    resolve_schedule,
)
from mcore_rl.config.resolve_evaluation import (
    resolve_evaluation,
    resolve_trackers,
    resolve_truncation,
)
from mcore_rl.config.resolve_mode import get_loop, resolve_mode, staleness_of
from mcore_rl.config.resolve_models import check_batches_of_lane, resolve_models
from mcore_rl.config.resolve_servers import resolve_servers
from mcore_rl.config.schema import (
    DataConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    WeightSyncConfig,
)
from mcore_rl.config.sources import resolve_sources
from mcore_rl.config.train_schema import TrainConfig

DTYPES = ("float32", "bfloat16")
DTYPE_OF_LANE = {"cpu": "float32", "cuda": "bfloat16"}
# Largest and mean gap of log-probs between trainer and servers, in nats, where a run sets none.
LOGPROB_GAPS = {"float32": (0.5, 1e-4), "bfloat16": (2.0, 0.1)}
# The largest in bfloat16 where trainer and servers route a token each by themselves: rounding tips
# a router near a tie, and that token differs by nats (2.3 in 3 steps of the quickstart's model).
ROUTED_LOGPROB_GAP = 20.0
WEIGHT_SYNC_METHODS = ("colocated", "disaggregated", "full_export")
TRANSPORTS = ("process_group", "nixl")
VERIFY = ("off", "sampled", "full")
ON_ERROR = ("stop", "drop", "zero")
TASKS = ("", "calculator", "code", "countdown", "last_digit")
LONG_PROMPTS = ("refuse", "drop")
OWN_POOL = "own"
# What a term of reward.terms may have.
_TERM_PARTS: dict[str, tuple[Any, str]] = {
    "name": (str, "text"),
    "weight": (int | float, "a number"),
    "settings": (dict, "settings of that reward, as in {name: value}"),
}
MIN_CURRICULUM_WEIGHT = 1e-6  # a prompt of no weight would never be tried again
MAX_SEED = 2**32 - 1  # numpy's global generator, which vLLM seeds, takes no more


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """A reward in a weighted sum."""

    name: str  # in the registry, or an import path
    weight: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)


def resolve_model(config: ModelConfig) -> None:
    one_of("model.dtype", config.dtype, (*DTYPES, "auto"))
    iso_date("model.chat_date", config.chat_date)


def resolve(config: RLConfig, *, needs_data: bool = True) -> None:
    """Check every setting that needs no file; without `needs_data` sources of data may be unset."""
    check_values(config)
    one_of("task.name", config.task.name, TASKS)
    resolve_model(config.model)
    one_of("weight_sync.method", config.weight_sync.method, WEIGHT_SYNC_METHODS)
    one_of("weight_sync.transport", config.weight_sync.transport, TRANSPORTS)
    one_of("weight_sync.verify", config.weight_sync.verify, VERIFY)
    between("seed", config.seed, 0, MAX_SEED)
    between("task.worked_share", config.task.worked_share, 0, 1)
    at_least("trainer.num_steps", config.trainer.num_steps, 1)
    at_least("trainer.prompts_per_step", config.trainer.prompts_per_step, 1)
    at_least("trainer.eval_samples", config.trainer.eval_samples, 0)
    resolve_evaluation(config)
    resolve_checkpoint(config)
    for name in ("max_logprob_gap", "mean_logprob_gap"):
        if (bound := getattr(config.trainer, name)) is not None:
            positive(f"trainer.{name}", bound)
    positive("timeouts.start_s", config.timeouts.start_s)
    positive("timeouts.call_s", config.timeouts.call_s)
    positive("weight_sync.timeout_s", config.weight_sync.timeout_s)
    if config.weight_sync.bind_address in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"weight_sync.bind_address={config.weight_sync.bind_address!r}: servers connect to it; "
            "allowed: 'auto', or an address of rank 0's machine that they reach"
        )
    if not config.output_dir:
        raise ConfigError("output_dir='' names no folder")
    _resolve_data(config.data)
    _resolve_files(config, needs_data)
    resolve_engine("actor", config.actor)
    replay, share = config.actor.moe.router_replay, config.algorithm.samples.replay.share
    if replay == "rollout" and share:
        raise ConfigError(
            f"algorithm.samples.replay.share={share} with actor.moe.router_replay='rollout': the "
            "experts of samples of earlier steps are not kept; allowed: 0, or router_replay='off'"
        )
    if replay == "rollout" and staleness_of(config.trainer) and config.trainer.save_every:
        raise ConfigError(
            f"trainer.save_every={config.trainer.save_every}, actor.moe.router_replay='rollout' "
            "and samples ahead of their step: their experts are not in a checkpoint; allowed: "
            "trainer.save_every=0, trainer.staleness=0, or router_replay='off'"
        )
    if replay == "record" and config.algorithm.correction.use_rollout_log_probs:
        raise ConfigError(
            "actor.moe.router_replay='record' records while log-probs are computed, and "
            "algorithm.correction.use_rollout_log_probs=true computes none; allowed: 'off'"
        )
    _resolve_rollout(config.rollout)
    stops = {"rollout.stop": config.rollout.stop, "evaluation.stop": config.evaluation.stop or []}
    resolve_agent(config.agent, stops)
    resolve_truncation(config)
    resolve_reward(config.reward)
    _resolve_weight_sync(config)
    resolve_mode(config)
    _resolve_placement(config)
    resolve_algorithm(config.algorithm, staleness_of(config.trainer))
    _resolve_batch(config)
    actor_steps = config.trainer.num_steps * config.algorithm.num_mini_batches
    resolve_schedule("actor.optimizer", config.actor.optimizer, actor_steps)
    resolve_engine("critic", config.critic)
    at_least("critic.warmup_steps", config.critic.warmup_steps, 0)
    positive("critic.clip_range", config.critic.clip_range)
    if config.critic.lora.rank or config.critic.moe.router_replay != "off":
        raise ConfigError("critic.lora and critic.moe.router_replay: allowed: none, and 'off'")
    resolve_frozen(config)
    resolve_models(config)
    warm = config.warm_start
    at_least("warm_start.num_steps", warm.num_steps, 0)
    if warm.num_steps:
        at_least("warm_start.batch_size", warm.batch_size, 1)
        at_least("warm_start.moe_aux_loss_coef", warm.moe_aux_loss_coef, 0)
        resolve_layout("warm_start.layout", warm.layout)
        resolve_optimizer("warm_start.optimizer", warm.optimizer)
        resolve_schedule("warm_start.optimizer", warm.optimizer, warm.num_steps)


def for_lane(config: RLConfig, device: str, *, has_experts: bool = False) -> RLConfig:
    """Return the settings with all that the lane and the kind of model decide.

    `device` is "cpu" or "cuda".

    Raises:
        ConfigError: the lane cannot do what is asked for.
    """
    config = replace(config, placement=placement_of(config))
    is_shared = takes_turns(config.placement, "actor", "rollout")
    if device == "cuda" and config.weight_sync.method == "colocated" and not is_shared:
        raise ConfigError(
            "weight_sync.method='colocated': trainer and servers are on different GPUs "
            f"(placement.actor={config.placement.actor!r}, "
            f"placement.rollout={config.placement.rollout!r}); allowed: a pool for both, or "
            "weight_sync.method='disaggregated', 'full_export'"
        )
    check_batches_of_lane(config, device)
    staleness = staleness_of(config.trainer)
    dtype = config.model.dtype if config.model.dtype != "auto" else DTYPE_OF_LANE[device]
    trainer, (largest, mean) = replace(config.trainer, staleness=staleness), LOGPROB_GAPS[dtype]
    if has_experts and dtype == "bfloat16" and config.actor.moe.router_replay != "rollout":
        largest = ROUTED_LOGPROB_GAP
    if trainer.max_logprob_gap is None:
        trainer = replace(trainer, max_logprob_gap=largest)
    if trainer.mean_logprob_gap is None:
        trainer = replace(trainer, mean_logprob_gap=mean)
    algorithm = with_level(config.algorithm, staleness)
    if algorithm.loss_aggregation == "sequence_sum_fixed_length":
        length = {"length": config.rollout.max_response_tokens}
        settings = length | algorithm.loss_aggregation_settings
        algorithm = replace(algorithm, loss_aggregation_settings=settings)
    model = replace(config.model, dtype=dtype)
    return replace(config, model=model, trainer=trainer, algorithm=algorithm)


def resolve_rollout_model(config: RolloutConfig, sizes: ModelSizes) -> None:
    """Check that vLLM can split the model; it replicates key/value heads when ranks are more."""
    divides("rollout.tp", config.tp, "attention heads", sizes.num_attention_heads)
    if config.ep and not sizes.num_experts:
        raise ConfigError("rollout.ep=true: the model has no experts; allowed: false")


def resolve_checkpoint(config: RLConfig | TrainConfig) -> None:
    resolve_trackers(config.trainer.trackers)
    at_least("trainer.save_every", config.trainer.save_every, 0)
    at_least("checkpoint.keep", config.checkpoint.keep, 1)
    at_least("checkpoint.hf_every", config.checkpoint.hf_every, 0)
    if not config.resume:
        raise ConfigError("resume=''; allowed: 'never', 'auto', or the folder of a checkpoint")


def _resolve_data(config: DataConfig) -> None:
    at_least("data.max_prompt_tokens", config.max_prompt_tokens, 1)
    one_of("data.long_prompts", config.long_prompts, LONG_PROMPTS)
    resolve_sources(config)
    curriculum, weights = config.curriculum, config.train_weights
    between("data.curriculum.decay", curriculum.decay, 0, 1)
    between("data.curriculum.min_reward", curriculum.min_reward, -MAX_WEIGHT, MAX_WEIGHT)
    between("data.curriculum.min_weight", curriculum.min_weight, MIN_CURRICULUM_WEIGHT, 1)
    if curriculum.name and weights:
        raise ConfigError(
            f"data.curriculum.name={curriculum.name!r} and data.train_weights={weights} both say "
            "how often a prompt is drawn; allowed: one of the two"
        )


def _resolve_files(config: RLConfig, needs_data: bool) -> None:
    data = config.data
    made_by_task = {"model.path": config.model.path}
    made_by_task["data.train_file"] = data.train_file or ", ".join(data.train_files)
    if config.warm_start.num_steps:
        made_by_task["warm_start.train_file"] = config.warm_start.train_file
    test = {"data.test_file": data.test_file or ", ".join(data.test_files)}
    for key, value in (made_by_task | test).items():
        if config.task.name and value:
            raise ConfigError(
                f"{key}={value!r}: task.name={config.task.name!r} makes its own; allowed: ''"
            )
        is_needed = key not in test and (needs_data or key == "model.path")
        if not config.task.name and not value and is_needed:
            raise ConfigError(f"{key}='' names nothing; it is needed when task.name is empty")


def takes_turns(placement: PlacementConfig, role: str, *others: str) -> bool:
    """Whether these roles are on one pool."""
    pools = {pool_of(placement, name) for name in (role, *others)}
    return len(pools) == 1 and OWN_POOL not in pools


def pool_of(placement: PlacementConfig, role: str) -> str:
    """The pool of a role; teacher.math is placed as teacher is."""
    pool: str = getattr(placement, role.partition(".")[0])
    return pool


def placement_of(config: RLConfig) -> PlacementConfig:
    """With all decided that the settings decide."""
    if config.placement.rollout != "auto":
        return config.placement
    is_elsewhere = (
        config.weight_sync.method == "disaggregated" or get_loop(config.trainer) != "sync"
    )
    return replace(config.placement, rollout=OWN_POOL if is_elsewhere else "shared")


def _resolve_placement(config: RLConfig) -> None:
    for role, pool in asdict(placement_of(config)).items():
        if pool == "auto" or not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", pool):
            raise ConfigError(
                f"placement.{role}={pool!r}; allowed: 'shared', 'own', or the name of a pool, of "
                "letters, digits and '_'"
            )
    placement = placement_of(config)
    others = asdict(placement).keys() - {"rollout"}
    mates = sorted(role for role in others if takes_turns(placement, "rollout", role))
    if mates and get_loop(config.trainer) == "one_step_off":
        raise ConfigError(
            f"placement.rollout={config.placement.rollout!r} has the servers on the pool of "
            f"{', '.join(mates)}; trainer.mode='one_step_off' trains while they generate; allowed: "
            "placement.rollout='own', or a pool of no other role"
        )
    is_shared = takes_turns(placement, "actor", "rollout")
    if is_shared and config.weight_sync.method == "disaggregated":
        raise ConfigError(
            f"placement.rollout={config.placement.rollout!r}: the servers are on the actor's "
            "devices, where weight_sync.method='disaggregated' has no part; allowed: "
            "placement.rollout='own', or weight_sync.method='colocated', 'full_export'"
        )


def _resolve_weight_sync(config: RLConfig) -> None:
    bucket_bytes = config.weight_sync.bucket_bytes
    if bucket_bytes < 32 or bucket_bytes % 32:  # two halves, each of aligned boxes
        raise ConfigError(
            f"weight_sync.bucket_bytes={bucket_bytes}; allowed: multiples of 32, at least one"
        )
    method, transport = config.weight_sync.method, config.weight_sync.transport
    if method != "disaggregated" and transport != WeightSyncConfig.transport:
        raise ConfigError(
            f"weight_sync.transport={transport!r} has no part in weight_sync.method={method!r}; "
            "allowed: weight_sync.method='disaggregated'"
        )
    if method == "full_export" and config.rollout.load_format == "dummy":
        raise ConfigError(
            "rollout.load_format='dummy': vLLM's own loader, which reads what "
            "weight_sync.method='full_export' writes, does not check that all weights are there; "
            "allowed: 'auto', 'checkpoint', or another method"
        )
    num_workers = config.rollout.num_servers * config.rollout.tp
    num_ranks = config.actor.layout.world_size
    if method == "colocated" and num_workers > num_ranks:
        raise ConfigError(
            f"weight_sync.method='colocated': rollout.num_servers * rollout.tp = {num_workers} "
            f"workers of servers share the devices of actor.layout's {num_ranks} ranks; allowed: "
            "at most as many workers, or weight_sync.method='disaggregated'"
        )


def _resolve_rollout(config: RolloutConfig) -> None:
    resolve_servers(config)
    # Log-probs at temperature 0 do not exist: the policy that is trained must be one that samples.
    positive("rollout.temperature", config.temperature)


def resolve_reward(config: RewardConfig) -> None:
    one_of("reward.on_error", config.on_error, ON_ERROR)
    positive("reward.timeout_s", config.timeout_s)
    at_least("reward.num_processes", config.num_processes, 1)
    for key, given, default in (
        ("name", config.name, RewardConfig.name),
        ("settings", config.settings, {}),
    ):
        if config.terms and given != default:
            raise ConfigError(
                f"reward.{key}={given!r} has no part in reward.terms={', '.join(config.terms)}; "
                "allowed: one of the two"
            )
    reward_terms(config)


def reward_terms(config: RewardConfig) -> dict[str, RewardTerm]:
    """The rewards of a run by their names in metrics; the name of a single one is empty."""
    if not config.terms:
        return {"": RewardTerm(config.name, settings=config.settings)}
    found = {}
    for name, parts in config.terms.items():
        key = f"reward.terms.{name}"
        if not re.fullmatch("[A-Za-z0-9_-]+", str(name)):
            raise ConfigError(f"{key}; allowed: names of letters, digits, '_' and '-'")
        for part, value in parts.items():
            if part not in _TERM_PARTS:
                raise ConfigError(f"{key}.{part} is unknown; allowed: {', '.join(_TERM_PARTS)}")
            kind, words = _TERM_PARTS[part]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(f"{key}.{part}={value!r}; allowed: {words}")
        found[name] = RewardTerm(**{"name": name, **parts})
        between(f"{key}.weight", found[name].weight, -MAX_WEIGHT, MAX_WEIGHT)
    return found


def _resolve_batch(config: RLConfig) -> None:
    prompts, mini_batches = config.trainer.prompts_per_step, config.algorithm.num_mini_batches
    if prompts % mini_batches:
        raise ConfigError(
            f"algorithm.num_mini_batches={mini_batches} does not divide "
            f"trainer.prompts_per_step={prompts}"
        )
    samples = prompts // mini_batches * config.algorithm.group_size
    for role, engine in (("actor", config.actor), ("critic", config.critic)):
        if samples % (dp := engine.layout.dp):
            raise ConfigError(
                f"{role}.layout.dp={dp} does not divide the {samples} samples of a mini-batch "
                f"(trainer.prompts_per_step / algorithm.num_mini_batches * algorithm.group_size)"
            )
    warm = config.warm_start
    if warm.num_steps and warm.batch_size % warm.layout.dp:
        raise ConfigError(
            f"warm_start.layout.dp={warm.layout.dp} does not divide "
            f"warm_start.batch_size={warm.batch_size}"
        )
