"""What each setting means: its default, the comment of its field, the names it may have."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache

from mcore_rl.config import (
    resolve,
    resolve_algorithm,
    resolve_distillation,
    resolve_engine,
    resolve_mode,
    schema,
)

# Values of the settings that choose something by name, by the last two parts of their keys. Those
# of the registries are repeated here, since filling one imports torch.
CHOICES: Mapping[str, Sequence[str]] = {
    "algorithm.advantage": (
        "gae",
        "gdpo",
        "gigpo",
        "gpg",
        "grpo",
        "grpo_passk",
        "lite_ppo",
        "maxrl",
        "opo",
        "optimal_token_baseline",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
    ),
    "algorithm.kl_estimator": (
        "abs",
        "abs+",
        "k1",
        "k1+",
        "k2",
        "k3",
        "k3+",
        "low_variance",
        "low_variance+",
    ),
    "algorithm.kl_in": resolve_algorithm.KL_IN,
    "algorithm.loss": (
        "cispo",
        "clip_cov",
        "decoupled_ppo",
        "dppo_kl",
        "dppo_tv",
        "dro",
        "gmpo",
        "gpg",
        "gspo",
        "gspo_token",
        "kimi",
        "kl_cov",
        "luspo",
        "m2po",
        "positive_nll",
        "ppo_clip",
        "reinforce",
        "sapo",
        "topr",
        "vespo",
    ),
    "algorithm.loss_aggregation": (
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_sum_fixed_length",
        "token_mean",
    ),
    "distillation.loss": resolve_distillation.DISTILLATION_LOSSES,
    "correction.level": resolve_algorithm.CORRECTION_LEVELS,
    "correction.method": resolve_algorithm.CORRECTION_METHODS,
    "actor.backend": resolve_engine.BACKENDS,
    "actor.modules": resolve_engine.MODULES,
    "data.long_rows": ("refuse", "drop"),
    "engine.backend": resolve_engine.BACKENDS,
    "engine.modules": resolve_engine.MODULES,
    "loss": ("dpo", "ipo", "orpo", "simpo"),
    "loss_aggregation": ("sequence_mean_token_mean", "sequence_mean_token_sum", "token_mean"),
    "critic.backend": resolve_engine.BACKENDS,
    "critic.modules": resolve_engine.MODULES,
    "data.long_prompts": resolve.LONG_PROMPTS,
    "model.dtype": ("auto", *resolve.DTYPES),
    "moe.aux_loss": resolve_engine.AUX_LOSSES,
    "moe.dispatcher": resolve_engine.DISPATCHERS,
    "moe.router_replay": resolve_engine.ROUTER_REPLAYS,
    "optimizer.schedule": resolve_engine.SCHEDULES,
    "placement.actor": ("shared", "own"),
    "placement.critic": ("shared", "own"),
    "placement.reference": ("shared", "own"),
    "placement.reward_model": ("shared", "own"),
    "placement.teacher": ("shared", "own"),
    "placement.rollout": ("auto", "shared", "own"),
    "recompute.granularity": resolve_engine.GRANULARITIES,
    "recompute.modules": resolve_engine.RECOMPUTE_MODULES,
    "reference.placement": ("shared", "own"),
    "reward.name": (
        "choice",
        "code",
        "cosine",
        "final_number",
        "format",
        "http",
        "judge",
        "math",
        "overlong",
        "pattern",
        "substring",
    ),
    "reward_model.backend": resolve_engine.BACKENDS,
    "reward_model.modules": resolve_engine.MODULES,
    "teacher.backend": resolve_engine.BACKENDS,
    "teacher.modules": resolve_engine.MODULES,
    "reward.on_error": resolve.ON_ERROR,
    "trainer.mode": resolve_mode.MODES,
    "task.name": tuple(name for name in resolve.TASKS if name),
    "weight_sync.method": resolve.WEIGHT_SYNC_METHODS,
    "weight_sync.transport": resolve.TRANSPORTS,
    "weight_sync.verify": resolve.VERIFY,
}

# Settings of the default functions, by the key under which they are given. Those of others are
# beside the functions, and in docs/algorithms.md.
OF_FUNCTIONS: Mapping[str, Sequence[type]] = {
    "algorithm.advantage_settings": (schema.GRPOSettings,),
    "algorithm.loss_settings": (schema.PPOClipSettings,),
}


@dataclass(frozen=True, slots=True)
class Setting:
    key: str  # in full, such as actor.layout.tp
    kind: str  # its type, as the schema spells it: "int | None"
    default: object
    meaning: str  # the comment of its field, and the allowed names where that lacks one
    choices: tuple[str, ...]  # empty for a setting that is no name from a list

    @property
    def is_mapping(self) -> bool:
        """Whether it contains the settings of a function, which that function names and checks."""
        return self.kind.startswith("dict")


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """Settings of one dataclass."""

    key: str  # such as actor.layout; "" for the settings of the whole run
    about: str  # the docstring of the dataclass
    settings: tuple[Setting, ...]


def groups(part: object, key: str = "") -> Iterator[SettingGroup]:
    """The groups of settings in an instance of a dataclass of settings, outer ones first."""
    kind = type(part)
    found, inner = [], []
    for entry in fields(part):  # type: ignore[arg-type]
        value, name = getattr(part, entry.name), f"{key}.{entry.name}".lstrip(".")
        if is_dataclass(value):
            inner.append((value, name))
            continue
        choices = tuple(CHOICES.get(".".join(name.split(".")[-2:]), ()))
        of = next(base for base in kind.__mro__ if entry.name in base.__annotations__)
        meaning = _with_choices(_comments(of.__module__)[of.__name__, entry.name], choices)
        found.append(Setting(name, str(entry.type), value, meaning, choices))
    about = kind.__doc__ or ""
    if about.startswith(f"{kind.__name__}("):  # what dataclass writes where there is no docstring
        about = ""
    yield SettingGroup(key, inspect.cleandoc(about), tuple(found))
    for value, name in inner:
        yield from groups(value, name)
    for setting in found:
        for settings in OF_FUNCTIONS.get(setting.key, ()):
            yield from groups(settings(), setting.key)


def setting_names(schema: type) -> list[str]:
    """The full key of every setting, such as actor.layout.tp."""
    return [setting.key for group in groups(schema()) for setting in group.settings]


def _with_choices(meaning: str, choices: Sequence[str]) -> str:
    if all(word in meaning for word in choices):
        return meaning
    listed = f"one of: {', '.join(choices)}"
    return f"{meaning}; {listed}" if meaning else listed


@cache
def _comments(module: str) -> dict[tuple[str, str], str]:
    """By (class, field): comments on the lines of a field, or on separate lines above it."""
    source = inspect.getsource(sys.modules[module])
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
    found: dict[tuple[str, str], str] = {}
    for part in ast.parse(source).body:
        if not isinstance(part, ast.ClassDef):
            continue
        for node in part.body:
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            first = node.lineno
            while (above := comments.get(first - 1)) and above.line.lstrip().startswith("#"):
                first -= 1
            lines = range(first, (node.end_lineno or node.lineno) + 1)
            texts = [comments[n].string.lstrip("# ") for n in lines if n in comments]
            found[part.name, node.target.id] = " ".join(texts)
    return found
