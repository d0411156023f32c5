"""Every rule between settings, checked before a process is started. Pure.

A rule that fails raises ConfigError naming the setting, its value and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import (
    AlgorithmConfig,
    EngineConfig,
    Layout,
    OptimizerConfig,
    RLConfig,
    RolloutConfig,
)

DTYPES = ("float32", "bfloat16")
SCHEDULES = ("constant", "linear", "cosine")
WEIGHT_SYNC_METHODS = ("full_export",)
TASKS = ("", "last_digit")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a layout has to divide."""

    num_attention_heads: int
    num_query_groups: int
    ffn_sizes: tuple[int, ...]  # of dense layers
    num_experts: int  # 0 for a dense model
    expert_ffn_size: int


def resolve(config: RLConfig) -> None:
    """Check every setting that needs no file."""
    _one_of("task.name", config.task.name, TASKS)
    _one_of("model.dtype", config.model.dtype, DTYPES)
    _one_of("weight_sync.method", config.weight_sync.method, WEIGHT_SYNC_METHODS)
    _at_least("seed", config.seed, 0)
    _at_least("trainer.num_steps", config.trainer.num_steps, 0)
    _at_least("trainer.prompts_per_step", config.trainer.prompts_per_step, 1)
    _at_least("trainer.eval_samples", config.trainer.eval_samples, 0)
    _positive("trainer.max_logprob_gap", config.trainer.max_logprob_gap)
    _positive("trainer.mean_logprob_gap", config.trainer.mean_logprob_gap)
    if config.weight_sync.bind_address in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"weight_sync.bind_address={config.weight_sync.bind_address!r}: servers connect to it; "
            "allowed: an address of this machine that they reach"
        )
    if not config.output_dir:
        raise ConfigError("output_dir='' names no folder")
    _resolve_files(config)
    _resolve_engine("actor", config.actor)
    _resolve_rollout(config.rollout)
    _resolve_algorithm(config.algorithm)
    _resolve_batch(config)
    if config.warm_start.num_steps:
        _resolve_layout("warm_start.layout", config.warm_start.layout)
        _resolve_optimizer("warm_start.optimizer", config.warm_start.optimizer)


def resolve_model(key: str, layout: Layout, sizes: ModelSizes) -> None:
    """Check that a layout divides the model; `key` names the layout, such as actor.layout."""
    _divides(f"{key}.tp", layout.tp, "attention heads", sizes.num_attention_heads)
    _divides(f"{key}.tp", layout.tp, "key/value heads", sizes.num_query_groups)
    for size in sizes.ffn_sizes:
        _divides(f"{key}.tp", layout.tp, "MLP columns", size)
    if sizes.num_experts:
        _divides(f"{key}.ep", layout.ep, "experts", sizes.num_experts)
        _divides(f"{key}.etp", layout.etp, "columns of an expert", sizes.expert_ffn_size)
    elif layout.ep > 1 or layout.etp > 1:
        axis = "ep" if layout.ep > 1 else "etp"
        raise ConfigError(
            f"{key}.{axis}={getattr(layout, axis)}: the model has no experts; allowed: 1"
        )


def resolve_rollout_model(config: RolloutConfig, sizes: ModelSizes) -> None:
    """Check that vLLM can split the model; it replicates key/value heads when ranks are more."""
    _divides("rollout.tp", config.tp, "attention heads", sizes.num_attention_heads)
    if config.ep and not sizes.num_experts:
        raise ConfigError("rollout.ep=true: the model has no experts; allowed: false")


def _resolve_files(config: RLConfig) -> None:
    made_by_task = {"model.path": config.model.path, "data.train_file": config.data.train_file}
    made_by_task["data.test_file"] = config.data.test_file
    if config.warm_start.num_steps:
        made_by_task["warm_start.train_file"] = config.warm_start.train_file
    for key, value in made_by_task.items():
        if config.task.name and value:
            raise ConfigError(
                f"{key}={value!r}: task.name={config.task.name!r} makes its own; allowed: ''"
            )
        if not config.task.name and not value:
            raise ConfigError(f"{key}='' names nothing; it is needed when task.name is empty")


def _resolve_engine(key: str, config: EngineConfig) -> None:
    _resolve_layout(f"{key}.layout", config.layout)
    _resolve_optimizer(f"{key}.optimizer", config.optimizer)
    for name in ("max_tokens_per_micro_batch", "logprob_chunk_tokens", "threads_per_rank"):
        _at_least(f"{key}.{name}", getattr(config, name), 1)
    _at_least(f"{key}.moe.aux_loss_coef", config.moe.aux_loss_coef, 0)


def _resolve_layout(key: str, layout: Layout) -> None:
    for axis in ("tp", "pp", "cp", "dp", "ep", "etp"):
        _at_least(f"{key}.{axis}", getattr(layout, axis), 1)
    for axis, name in (("pp", "pipeline"), ("cp", "context")):
        if getattr(layout, axis) > 1:
            raise ConfigError(
                f"{key}.{axis}={getattr(layout, axis)}: {name} parallelism is not supported; "
                "allowed: 1"
            )
    experts = layout.etp * layout.ep * layout.pp
    if layout.world_size % experts:
        raise ConfigError(
            f"{key}: etp * ep * pp = {layout.etp} * {layout.ep} * {layout.pp} = {experts} must "
            f"divide the world size tp * pp * cp * dp = {layout.world_size}"
        )


def _resolve_optimizer(key: str, config: OptimizerConfig) -> None:
    _one_of(f"{key}.schedule", config.schedule, SCHEDULES)
    _positive(f"{key}.lr", config.lr)
    _positive(f"{key}.eps", config.eps)
    if not 0 <= config.min_lr <= config.lr:
        raise ConfigError(f"{key}.min_lr={config.min_lr}; allowed: 0 to {key}.lr={config.lr}")
    for name in ("warmup_steps", "weight_decay", "clip_grad"):
        _at_least(f"{key}.{name}", getattr(config, name), 0)
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(
                f"{key}.{name}={getattr(config, name)}; allowed: 0 up to, not including, 1"
            )


def _resolve_rollout(config: RolloutConfig) -> None:
    for name in ("num_servers", "tp", "max_response_tokens", "max_num_seqs", "kv_cache_bytes"):
        _at_least(f"rollout.{name}", getattr(config, name), 1)
    if config.cores and len(config.cores.split("|")) != config.tp:
        raise ConfigError(
            f"rollout.cores={config.cores!r} must list the cores of each of the "
            f"rollout.tp={config.tp} workers of a server, separated by '|'"
        )
    # Log-probs at temperature 0 do not exist: the policy that is trained must be one that samples.
    _positive("rollout.temperature", config.temperature)
    if config.top_p != 1.0:
        raise ConfigError(
            f"rollout.top_p={config.top_p}: training needs log-probs of the whole distribution; "
            "allowed: 1"
        )


def _resolve_algorithm(config: AlgorithmConfig) -> None:
    _at_least("algorithm.group_size", config.group_size, 2)
    _at_least("algorithm.num_mini_batches", config.num_mini_batches, 1)
    _at_least("algorithm.kl_coef", config.kl_coef, 0)
    _at_least("algorithm.clip_ratio_high", config.clip_ratio_high, 0)
    if not 0 <= config.clip_ratio_low <= 1:
        raise ConfigError(f"algorithm.clip_ratio_low={config.clip_ratio_low}; allowed: 0 to 1")


def _resolve_batch(config: RLConfig) -> None:
    prompts, mini_batches = config.trainer.prompts_per_step, config.algorithm.num_mini_batches
    if prompts % mini_batches:
        raise ConfigError(
            f"algorithm.num_mini_batches={mini_batches} does not divide "
            f"trainer.prompts_per_step={prompts}"
        )
    samples, dp = prompts // mini_batches * config.algorithm.group_size, config.actor.layout.dp
    if samples % dp:
        raise ConfigError(
            f"actor.layout.dp={dp} does not divide the {samples} samples of a mini-batch "
            f"(trainer.prompts_per_step / algorithm.num_mini_batches * algorithm.group_size)"
        )
    warm = config.warm_start
    if warm.num_steps and warm.batch_size % warm.layout.dp:
        raise ConfigError(
            f"warm_start.layout.dp={warm.layout.dp} does not divide "
            f"warm_start.batch_size={warm.batch_size}"
        )


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}; allowed: {', '.join(map(repr, allowed))}")


def _at_least(key: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{key}={value}; allowed: at least {least}")


def _positive(key: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{key}={value}; allowed: above 0")


def _divides(key: str, size: int, what: str, number: int) -> None:
    if number % size:
        raise ConfigError(f"{key}={size} does not divide the model's {number} {what}")
