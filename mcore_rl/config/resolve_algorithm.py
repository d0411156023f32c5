"""Rules of the algorithm: its settings, and models that are not trained. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from mcore_rl.config.checks import check_at_least, check_between, check_choice, check_positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_engine import resolve_layout, resolve_plain_engine
from mcore_rl.config.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    EngineConfig,
    FilterConfig,
    Layout,
    RLConfig,
    TeacherConfig,
)

KL_PLACEMENTS = ("loss", "reward")
CORRECTION_LEVELS = ("off", "token", "sequence", "geometric")
CORRECTION_METHODS = ("truncate", "mask")
IF_SHORT = ("train", "stop")
LOG_PROB_PASS = ("auto", "always")
ADVANTAGES_OF = ("kept", "generated")
# Advantages that compare the responses to one prompt.
GROUP_ADVANTAGES = (
    "gdpo", "gpg", "grpo", "grpo_passk", "lite_ppo", "maxrl", "opo", "optimal_token_baseline",
    "reinforce_plus_plus_baseline", "rloo",
)  # fmt: skip
DISTILLATION_LOSSES = ("off", "sampled_kl", "reverse_kl", "forward_kl")
MAX_WEIGHT = 1e6  # of a reward, whose sums are float32
TOP_TOKEN_LOSSES = ("reverse_kl", "forward_kl")
# Settings of a teacher.
_TEACHER_PARTS: dict[str, tuple[Any, str]] = {
    "model_path": (str, "text"),
    "weight": (int | float, "a number"),
    "layout": (dict, "settings of a layout, as in {tp: 2}"),
}


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


def resolve_algorithm(
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
    check_at_least("algorithm.num_mini_batches", config.num_mini_batches, 1)
    check_choice("algorithm.log_prob_pass", config.log_prob_pass, LOG_PROB_PASS)
    check_at_least("algorithm.kl_coef", config.kl_coef, 0)
    check_at_least("algorithm.entropy_coef", config.entropy_coef, 0)
    check_at_least("algorithm.cross_entropy_coef", config.cross_entropy_coef, 0)
    _resolve_kl(config)
    _resolve_entropy(config)
    _resolve_correction(config.correction)
    _resolve_filter(config.filter, config.group_size, fewest)
    _resolve_old_samples(config, staleness)


def _resolve_filter(config: FilterConfig, group_size: int, fewest: int) -> None:
    """Check algorithm.filter; `fewest` is the smallest group that the advantage can compare."""
    key = "algorithm.filter"
    check_choice(f"{key}.if_short", config.if_short, IF_SHORT)
    check_choice(f"{key}.advantages_of", config.advantages_of, ADVANTAGES_OF)
    check_at_least(f"{key}.max_rounds", config.max_rounds, 1)
    check_at_least(f"{key}.prompts_per_round", config.prompts_per_round, 0)
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


def _resolve_old_samples(config: AlgorithmConfig, staleness: int) -> None:
    """Check that the loss of old samples uses the probabilities that they were generated with."""
    replay, key = config.filter.replay, "algorithm.filter.replay"
    check_between(f"{key}.share", replay.share, 0, 1)
    # A replayed sample is older by at least a step.
    check_at_least(f"{key}.max_age", replay.max_age, 1 + staleness if replay.share else 1)
    correction = config.correction
    is_weighted = correction.has_weights or correction.use_rollout_log_probs
    cause = f"trainer.staleness={staleness}" if staleness else f"{key}.share={replay.share}"
    if (replay.share or staleness) and not is_weighted and config.loss != "decoupled_ppo":
        raise ConfigError(
            f"{cause}: old samples would count as those of the policy; allowed: "
            "algorithm.correction.level='token', 'sequence' or 'geometric', "
            "algorithm.correction.use_rollout_log_probs=true, or algorithm.loss='decoupled_ppo'"
        )


def _resolve_kl(config: AlgorithmConfig) -> None:
    check_choice("algorithm.kl_placement", config.kl_placement, KL_PLACEMENTS)
    check_at_least("algorithm.kl_horizon", config.kl_horizon, 1)
    if config.kl_target is not None:
        check_positive("algorithm.kl_target", config.kl_target)
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


def _resolve_entropy(config: AlgorithmConfig) -> None:
    share = config.top_entropy_share
    if not 0 < share <= 1:
        raise ConfigError(f"algorithm.top_entropy_share={share}; allowed: above 0, up to 1")
    check_positive("algorithm.entropy_coef_step", config.entropy_coef_step)
    check_positive("algorithm.entropy_coef_max", config.entropy_coef_max)
    if config.entropy_target is not None:
        check_positive("algorithm.entropy_target", config.entropy_target)
        check_between("algorithm.entropy_coef", config.entropy_coef, 0, config.entropy_coef_max)
    reads = {"entropy_target": config.entropy_target is not None, "top_entropy_share": share < 1}
    for name, is_read in reads.items():
        if is_read and config.correction.use_rollout_log_probs:
            raise ConfigError(
                f"algorithm.{name}={getattr(config, name)} reads the entropy that comes with the "
                "trainer's log-probs; allowed: algorithm.correction.use_rollout_log_probs=false"
            )


def _resolve_correction(config: CorrectionConfig) -> None:
    key = "algorithm.correction"
    check_choice(f"{key}.level", config.level or "off", CORRECTION_LEVELS)
    check_choice(f"{key}.method", config.method, CORRECTION_METHODS)
    check_positive(f"{key}.weight_max", config.weight_max)
    check_at_least(f"{key}.weight_min", config.weight_min, 0)
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
    for name, parts in config.models.items():
        key = f"teacher.models.{name}"
        if not re.fullmatch("[A-Za-z0-9_-]+", str(name)):
            raise ConfigError(f"{key}; allowed: names of letters, digits, '_' and '-'")
        for part, value in parts.items():
            if part not in _TEACHER_PARTS:
                raise ConfigError(f"{key}.{part} is unknown; allowed: {', '.join(_TEACHER_PARTS)}")
            kind, allowed = _TEACHER_PARTS[part]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(f"{key}.{part}={value!r}; allowed: {allowed}")
        weight = float(parts.get("weight", 1.0))
        check_positive(f"{key}.weight", weight)
        layout = _build_layout(f"{key}.layout", parts.get("layout", {}), config.layout)
        engine = replace(config, layout=layout)
        teachers[str(name)] = Teacher(parts.get("model_path", ""), weight, engine)
    return teachers


def _build_layout(key: str, changes: dict[str, Any], layout: Layout) -> Layout:
    """Return the layout of all teachers with the axes that a teacher sets itself."""
    known = asdict(Layout())
    for axis, size in changes.items():
        if axis not in known:
            raise ConfigError(f"{key}.{axis} is unknown; allowed: {', '.join(known)}")
        if not isinstance(size, int) or isinstance(size, bool):
            raise ConfigError(f"{key}.{axis}={size!r}; allowed: a whole number")
    return replace(layout, **changes)


def resolve_frozen_models(config: RLConfig) -> None:
    """Check the reward model and the teachers."""
    _resolve_reward_model(config)
    _resolve_teachers(config)


def _resolve_reward_model(config: RLConfig) -> None:
    model = config.reward_model
    resolve_plain_engine("reward_model", model)
    check_between("reward_model.weight", model.weight, -MAX_WEIGHT, MAX_WEIGHT)
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


def _resolve_teachers(config: RLConfig) -> None:
    distillation, settings = config.algorithm.distillation, config.teacher
    key = "algorithm.distillation"
    check_choice(f"{key}.loss", distillation.loss, DISTILLATION_LOSSES)
    check_positive(f"{key}.coef", distillation.coef)
    check_at_least(f"{key}.top_k", distillation.top_k, 1)
    resolve_plain_engine("teacher", settings)
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
        resolve_layout(f"teacher.models.{name}.layout", teacher.engine.layout)
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
