"""Rules of the models that are not trained: a reward model, and teachers. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from mcore_rl.config.checks import at_least, between, one_of, positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_engine import resolve_engine, resolve_layout
from mcore_rl.config.schema import EngineConfig, Layout, RLConfig, TeacherConfig

DISTILLATION_LOSSES = ("off", "sampled_kl", "reverse_kl", "forward_kl")
MAX_WEIGHT = 1e6  # of a reward, whose sums are float32
OF_TOP_TOKENS = ("reverse_kl", "forward_kl")
# What a teacher may have.
_PARTS: dict[str, tuple[Any, str]] = {
    "model_path": (str, "text"),
    "weight": (int | float, "a number"),
    "layout": (dict, "settings of a layout, as in {tp: 2}"),
}


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model of teacher.models."""

    model_path: str  # "": what the actor begins with
    weight: float
    engine: EngineConfig


def teachers_of(config: TeacherConfig) -> dict[str, Teacher]:
    """By name. Raises ConfigError for one that is not valid."""
    found = {}
    for name, parts in config.models.items():
        key = f"teacher.models.{name}"
        if not re.fullmatch("[A-Za-z0-9_-]+", str(name)):
            raise ConfigError(f"{key}; allowed: names of letters, digits, '_' and '-'")
        for part, value in parts.items():
            if part not in _PARTS:
                raise ConfigError(f"{key}.{part} is unknown; allowed: {', '.join(_PARTS)}")
            kind, words = _PARTS[part]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(f"{key}.{part}={value!r}; allowed: {words}")
        weight = float(parts.get("weight", 1.0))
        positive(f"{key}.weight", weight)
        layout = _layout(f"{key}.layout", parts.get("layout", {}), config.layout)
        engine = replace(config, layout=layout)
        found[str(name)] = Teacher(parts.get("model_path", ""), weight, engine)
    return found


def _layout(key: str, changes: dict[str, Any], layout: Layout) -> Layout:
    known = asdict(Layout())
    for axis, size in changes.items():
        if axis not in known:
            raise ConfigError(f"{key}.{axis} is unknown; allowed: {', '.join(known)}")
        if not isinstance(size, int) or isinstance(size, bool):
            raise ConfigError(f"{key}.{axis}={size!r}; allowed: a whole number")
    return replace(layout, **changes)


def resolve_frozen(config: RLConfig) -> None:
    _resolve_reward_model(config)
    _resolve_teachers(config)


def _resolve_reward_model(config: RLConfig) -> None:
    model = config.reward_model
    _resolve_engine("reward_model", model)
    between("reward_model.weight", model.weight, -MAX_WEIGHT, MAX_WEIGHT)
    if not model.model_path:
        return
    if not model.weight:
        raise ConfigError("reward_model.weight=0: the model would score in vain; allowed: not 0")
    samples = config.algorithm.samples
    before = {
        "algorithm.samples.group_filter": samples.group_filter,
        "algorithm.samples.keep_responses": samples.advantages_of == "kept"
        and samples.keep_responses,
        "algorithm.samples.replay.share": samples.replay.share,
        "data.curriculum.name": config.data.curriculum.name,
        "reward.shuffle": config.reward.shuffle,
    }
    for key, value in before.items():
        if value:
            raise ConfigError(
                f"{key}={value!r} looks at rewards before reward_model.model_path="
                f"{model.model_path!r} has scored; allowed: {type(value)()!r}"
            )


def _resolve_teachers(config: RLConfig) -> None:
    distillation, settings = config.algorithm.distillation, config.teacher
    key = "algorithm.distillation"
    one_of(f"{key}.loss", distillation.loss, DISTILLATION_LOSSES)
    positive(f"{key}.coef", distillation.coef)
    at_least(f"{key}.top_k", distillation.top_k, 1)
    _resolve_engine("teacher", settings)
    is_off, teachers = distillation.loss == "off", teachers_of(settings)
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
    if group_filter := config.algorithm.samples.group_filter:
        raise ConfigError(
            f"algorithm.samples.group_filter={group_filter!r} leaves out groups that {key}.loss="
            f"{distillation.loss!r} learns from; allowed: ''"
        )
    if config.algorithm.advantage == "gae" and not distillation.use_reward:
        raise ConfigError(
            f"algorithm.advantage='gae' trains a critic of rewards, and {key}.use_reward=false "
            "uses none; allowed: use_reward=true, or another advantage"
        )


def _resolve_engine(role: str, engine: EngineConfig) -> None:
    resolve_engine(role, engine)
    if engine.lora.rank or engine.moe.router_replay != "off":
        raise ConfigError(f"{role}.lora and {role}.moe.router_replay: allowed: none, and 'off'")
