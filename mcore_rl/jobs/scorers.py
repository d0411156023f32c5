"""The models of a run that only score, a reward model and teachers: checked before it starts."""

from __future__ import annotations

from mcore_rl.checkpoint.hf import CheckpointReader, read_checkpoint_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_algorithm import TOP_TOKEN_LOSSES, build_teachers
from mcore_rl.config.resolve_engine import resolve_model_engine, resolve_model_layout
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.files import open_rows
from mcore_rl.data.rows import Column
from mcore_rl.data.tokenizer import has_tokenizer, read_tokenizer
from mcore_rl.jobs.placement import frozen_engines, frozen_paths
from mcore_rl.models.base import (
    SEQUENCE,
    HFConfig,
    get_field,
    get_model_sizes,
    pad_vocab_size,
    read_config,
)
from mcore_rl.models.heads import build_value_config, get_value_head_suffix, map_model_weights
from mcore_rl.reshard.rules import list_logical_tensors


def check_scorer_layouts(config: RLConfig) -> None:
    """All that depends on each config.json alone; raises ConfigError for the first fault."""
    for role, path in frozen_paths(config).items():
        setting, engine = _setting(role), frozen_engines(config)[role]
        sizes = get_model_sizes(_config_of(config, role, path))
        layout = setting.removesuffix(".model_path") + ".layout"
        resolve_model_layout(layout, engine.layout, sizes)
        resolve_model_engine(role.partition(".")[0], engine, sizes)


def check_scorers(config: RLConfig) -> None:
    """Weights, tokenizers and the teacher of each prompt, too."""
    for role, path in frozen_paths(config).items():
        found, reader = _config_of(config, role, path), CheckpointReader(path, _setting(role))
        reader.check(list_logical_tensors(map_model_weights(found, pad_vocab_size(found, 1))))
        _check_tokenizer(config, role, path)
    _check_teacher_column(config)


def _config_of(config: RLConfig, role: str, path: str) -> HFConfig:
    setting = _setting(role)
    found = read_checkpoint_config(path, setting)
    kind = get_value_head_suffix(found)
    if role == "reward_model":
        if kind != SEQUENCE:
            raise ConfigError(
                f"{setting}={path!r} is of {found.get('architectures')}; allowed: a reward model, "
                f"...{SEQUENCE}, as mcore-rl rm leaves one"
            )
        return build_value_config(found)
    if kind:
        raise ConfigError(
            f"{setting}={path!r} is of {found['architectures']}; allowed: a language model"
        )
    policy, distillation = read_config(config.model.path), config.algorithm.distillation
    sizes = [get_field(c, "vocab_size") for c in (found, policy)]
    if distillation.loss in TOP_TOKEN_LOSSES:
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"{setting}={path!r} has vocab_size={sizes[0]}, the policy {sizes[1]}; allowed "
                f"with algorithm.distillation.loss={distillation.loss!r}: the same"
            )
        if distillation.top_k > sizes[0]:
            raise ConfigError(
                f"algorithm.distillation.top_k={distillation.top_k}; allowed: up to the "
                f"{sizes[0]} tokens of the vocabulary"
            )
    return found


def _check_tokenizer(config: RLConfig, role: str, path: str) -> None:
    """The model reads the policy's token ids, so they have to mean the same to it."""
    if path == config.model.path:
        return
    setting = _setting(role)
    if not has_tokenizer(path):
        raise ConfigError(f"{setting}={path!r} has no tokenizer to compare with the policy's")
    mine, theirs = (read_tokenizer(p).get_vocab() for p in (config.model.path, path))
    if mine != theirs:
        token = next(t for t in (mine | theirs) if mine.get(t) != theirs.get(t))
        raise ConfigError(
            f"{setting}={path!r} has another vocabulary than model.path={config.model.path!r}: "
            f"{token!r} is {theirs.get(token)}, there {mine.get(token)}; allowed: the same"
        )


def _check_teacher_column(config: RLConfig) -> None:
    if not config.teacher.column:
        return
    names, column = build_teachers(config.teacher), Column(config.teacher.column, "teacher.column")
    for name in filter(None, config.data.train_files or [config.data.train_file]):
        for row in open_rows(name, "data.train_file"):
            if (found := column.get_text(row)) not in names:
                raise column.build_error(row, found, f"one of: {', '.join(names)}")


def _setting(role: str) -> str:
    """The key of a role's path."""
    kind, _, name = role.partition(".")
    return f"{kind}.models.{name}.model_path" if name else f"{kind}.model_path"
