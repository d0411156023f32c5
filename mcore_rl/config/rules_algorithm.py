"""Rules of the algorithm: its settings, and models that are not trained. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from mcore_rl.config.allowed import DISTILLATION_LOSSES
from mcore_rl.config.checks import check_at_least, check_between
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import build_settings
from mcore_rl.config.rules_engine import validate_layout, validate_plain_engine
from mcore_rl.config.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    EngineConfig,
    FilterConfig,
    Layout,
    RLConfig,
    TeacherConfig,
    TeacherModelConfig,
)

TOP_TOKEN_LOSSES = DISTILLATION_LOSSES[2:]  # which compare the likeliest tokens
# Advantages that compare the responses to one prompt.
GROUP_ADVANTAGES = (
    "gdpo", "gpg", "grpo", "grpo_passk", "lite_ppo", "maxrl", "opo", "optimal_token_baseline",
    "reinforce_plus_plus_baseline", "rloo",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model of teacher.models."""

    model_path: str  # "": the initial checkpoint of the actor
    weight: float
    engine: EngineConfig


def fill_correction_level(config: AlgorithmConfig, *, is_off_policy: bool) -> AlgorithmConfig:
    """Return the settings with a default for algorithm.correction.level.

    Args:
        is_off_policy: Whether servers sample from another policy than the one in training: of older
            weights, or of quantised ones.
    """
    correction = config.correction
    if correction.level is not None:
        return config
    is_weighted = correction.use_rollout_log_probs or config.loss == "decoupled_ppo"
    level = "token" if is_off_policy and not is_weighted else "off"
    return replace(config, correction=replace(correction, level=level))


def validate_algorithm(
    config: AlgorithmConfig, staleness: int = 0, *, is_quantized: bool = False
) -> None:
    """Check the settings of the algorithm.

    Args:
        staleness: Versions by which samples may be older than the weights.
        is_quantized: Whether servers have quantised weights.
    """
    config = fill_correction_level(config, is_off_policy=staleness > 0 or is_quantized)
    fewest = 2 if config.advantage in GROUP_ADVANTAGES else 1
    check_at_least("algorithm.group_size", config.group_size, fewest)
    _validate_kl(config)
    _validate_entropy(config)
    _validate_correction(config.correction)
    _validate_filter(config.filter, config.group_size, fewest)
    _validate_old_samples(config, staleness)


def _validate_filter(config: FilterConfig, group_size: int, fewest: int) -> None:
    """Check algorithm.filter; `fewest` is the smallest group that the advantage can compare."""
    key = "algorithm.filter"
    default = FilterConfig()
    for name in ("max_rounds", "prompts_per_round", "if_short"):
        if not config.group_filter and (value := getattr(config, name)) != getattr(default, name):
            raise ConfigError(
                f"{key}.{name}={value!r} has no part without a filter; allowed: "
                f"{getattr(default, name)!r}, or {key}.group_filter='drop_uniform'"
            )
    if config.keep_responses:
        least = fewest if config.advantages_of == "kept" else 1
        check_between(f"{key}.keep_responses", config.keep_responses, least, group_size)


def _validate_old_samples(config: AlgorithmConfig, staleness: int) -> None:
    """Check that the loss of old samples uses the probabilities that they were generated with."""
    replay, key = config.filter.replay, "algorithm.filter.replay"
    if replay.share:  # a replayed sample is older by at least a step
        check_at_least(f"{key}.max_age", replay.max_age, 1 + staleness)
    correction = config.correction
    is_weighted = correction.has_weights or correction.use_rollout_log_probs
    cause = f"trainer.staleness={staleness}" if staleness else f"{key}.share={replay.share}"
    if (replay.share or staleness) and not is_weighted and config.loss != "decoupled_ppo":
        raise ConfigError(
            f"{cause}: old samples would count as those of the policy; allowed: "
            "algorithm.correction.level='token', 'sequence' or 'geometric', "
            "algorithm.correction.use_rollout_log_probs=true, or algorithm.loss='decoupled_ppo'"
        )


def _validate_kl(config: AlgorithmConfig) -> None:
    is_set = {
        "kl_placement": config.kl_placement == "reward",
        "kl_target": config.kl_target is not None,
        "correction.unbiased_kl": config.correction.unbiased_kl,
    }
    for name, is_used in is_set.items():
        if is_used and not config.kl_coef:
            raise ConfigError(
                f"algorithm.kl_coef=0: there is no KL for algorithm.{name}; allowed: above 0"
            )
    if config.correction.unbiased_kl and config.kl_placement != "loss":
        raise ConfigError(
            "algorithm.correction.unbiased_kl=true corrects a gradient, and "
            f"algorithm.kl_placement={config.kl_placement!r} has none; allowed: kl_placement='loss'"
        )


def _validate_entropy(config: AlgorithmConfig) -> None:
    if config.entropy_target is not None:
        check_between("algorithm.entropy_coef", config.entropy_coef, 0, config.entropy_coef_max)
    reads = {
        "entropy_target": config.entropy_target is not None,
        "top_entropy_share": config.top_entropy_share < 1,
    }
    for name, is_read in reads.items():
        if is_read and config.correction.use_rollout_log_probs:
            raise ConfigError(
                f"algorithm.{name}={getattr(config, name)} reads the entropy that comes with the "
                "trainer's log-probs; allowed: algorithm.correction.use_rollout_log_probs=false"
            )


def _validate_correction(config: CorrectionConfig) -> None:
    key = "algorithm.correction"
    if config.weight_min > (config.weight_max if config.method == "mask" else 0):
        raise ConfigError(
            f"{key}.weight_min={config.weight_min}; allowed: 0, or up to weight_max="
            f"{config.weight_max} with {key}.method='mask'"
        )
    if config.use_rollout_log_probs and (config.has_weights or config.reject):
        raise ConfigError(
            f"{key}.use_rollout_log_probs=true computes no log-probs that {key}.level and "
            f"{key}.reject could compare with the servers'; allowed: level='off' and no reject"
        )


def build_teachers(config: TeacherConfig) -> dict[str, Teacher]:
    """Return the teachers by name.

    Raises:
        ConfigError: A teacher is not valid.
    """
    teachers = {}
    for name, settings in config.models.items():
        key = f"teacher.models.{name}"
        model = build_settings(key, TeacherModelConfig, settings)
        axes = {**asdict(config.layout), **model.layout}
        layout = build_settings(f"{key}.layout", Layout, axes)
        engine = replace(config, layout=layout)
        teachers[str(name)] = Teacher(model.model_path, model.weight, engine)
    return teachers


def validate_frozen_models(config: RLConfig) -> None:
    """Check the reward model and the teachers."""
    _validate_reward_model(config)
    _validate_teachers(config)


def _validate_reward_model(config: RLConfig) -> None:
    model = config.reward_model
    validate_plain_engine("reward_model", model)
    if not model.model_path:
        return
    if not model.weight:
        raise ConfigError("reward_model.weight=0: the model would score in vain; allowed: not 0")
    filters = config.algorithm.filter
    readers = {  # of rewards, before the model has scored
        "algorithm.filter.group_filter": filters.group_filter,
        "algorithm.filter.keep_responses": filters.advantages_of == "kept"
        and filters.keep_responses,
        "algorithm.filter.replay.share": filters.replay.share,
        "data.curriculum.name": config.data.curriculum.name,
        "reward.shuffle": config.reward.shuffle,
    }
    for key, value in readers.items():
        if value:
            raise ConfigError(
                f"{key}={value!r} looks at rewards before reward_model.model_path="
                f"{model.model_path!r} has scored; allowed: {type(value)()!r}"
            )


def _validate_teachers(config: RLConfig) -> None:
    distillation, settings = config.algorithm.distillation, config.teacher
    key = "algorithm.distillation"
    validate_plain_engine("teacher", settings)
    is_off, teachers = distillation.loss == "off", build_teachers(settings)
    if is_off and (teachers or settings.column):
        raise ConfigError(
            f"{key}.loss='off': nothing is learned from teacher.models={', '.join(teachers)}; "
            f"allowed: {', '.join(DISTILLATION_LOSSES[1:])}"
        )
    if is_off:
        return
    if not teachers:
        raise ConfigError(
            f"{key}.loss={distillation.loss!r}: teacher.models names no teacher; allowed: at "
            "least one, as in {math: {model_path: ...}}"
        )
    for name, teacher in teachers.items():
        validate_layout(f"teacher.models.{name}.layout", teacher.engine.layout)
    if group_filter := config.algorithm.filter.group_filter:
        raise ConfigError(
            f"algorithm.filter.group_filter={group_filter!r} leaves out groups that {key}.loss="
            f"{distillation.loss!r} learns from; allowed: ''"
        )
    if config.algorithm.advantage == "gae" and not distillation.use_reward:
        raise ConfigError(
            f"algorithm.advantage='gae' trains a critic of rewards, and {key}.use_reward=false "
            "uses none; allowed: use_reward=true, or another advantage"
        )
