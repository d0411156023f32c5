"""The rules between the settings of `mcore-rl sft`, `dpo` and `rm`. Pure.

A rule that fails raises ConfigError naming the setting, its value and what is allowed.
"""

from __future__ import annotations

import math

from mcore_rl.config.checks import at_least, between, check_values, one_of, positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import MAX_SEED, resolve_checkpoint, resolve_model
from mcore_rl.config.resolve_engine import resolve_engine
from mcore_rl.config.resolve_evaluation import resolve_held_out
from mcore_rl.config.sources import resolve_sources, test_files, train_files
from mcore_rl.config.train_schema import (
    ConversationsConfig,
    DPOConfig,
    PairsConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
)


def resolve_train(config: TrainConfig) -> None:
    """Check every setting that needs no file."""
    check_values(config)
    resolve_model(config.model)
    between("seed", config.seed, 0, MAX_SEED)
    if not config.output_dir:
        raise ConfigError("output_dir='' names no folder")
    steps = config.trainer
    at_least("trainer.num_steps", steps.num_steps, 0)
    positive("trainer.num_epochs", steps.num_epochs)
    at_least("trainer.batch_size", steps.batch_size, 1)
    at_least("trainer.eval_samples", steps.eval_samples, 0)
    at_least("evaluation.every", config.evaluation.every, 0)
    resolve_checkpoint(config)
    positive("timeouts.start_s", config.timeouts.start_s)
    positive("timeouts.call_s", config.timeouts.call_s)
    resolve_engine("engine", config.engine)
    if config.engine.moe.router_replay == "rollout":
        raise ConfigError("engine.moe.router_replay='rollout': nothing is rolled out here; 'off'")
    data = data_of(config)
    for key, value in ({"model.path": config.model.path} | train_files(data)).items():
        if not value:
            raise ConfigError(f"{key}='' names nothing; it is needed")
    resolve_sources(data)
    resolve_held_out(config, has_sets=bool(test_files(data)))
    at_least("data.max_tokens", data.max_tokens, 2)
    one_of("data.long_rows", data.long_rows, ("refuse", "drop"))
    _resolve_pairs(config)
    dp, rows = config.engine.layout.dp, steps.batch_size * rows_each(config)
    if rows % dp:
        raise ConfigError(
            f"engine.layout.dp={dp} does not divide the {rows} conversations of a step "
            f"(trainer.batch_size={steps.batch_size})"
        )


def _resolve_pairs(config: TrainConfig) -> None:
    """An update by weights of tokens is right for scores alone."""
    if isinstance(config, SFTConfig):
        if config.engine.moe.router_replay == "record":
            raise ConfigError(
                "engine.moe.router_replay='record': there is one pass, and nothing to record; "
                "allowed: 'off'"
            )
        return
    if config.engine.mtp_loss_coef:
        raise ConfigError(
            f"engine.mtp_loss_coef={config.engine.mtp_loss_coef}: prediction layers are trained by "
            "mcore-rl sft; allowed: 0"
        )
    if isinstance(config, DPOConfig):
        one_of("reference.placement", config.reference.placement, ("shared", "own"))


def data_of(config: TrainConfig) -> ConversationsConfig | PairsConfig:
    assert isinstance(config, SFTConfig | DPOConfig | RMConfig)
    return config.data


def rows_each(config: TrainConfig) -> int:
    """Conversations of a row of data.train_file."""
    return 1 if isinstance(config, SFTConfig) else 2


def num_steps(config: TrainConfig, num_rows: int) -> int:
    """Of the whole run.

    >>> num_steps(SFTConfig(), 130)
    3
    """
    steps = config.trainer
    return steps.num_steps or math.ceil(steps.num_epochs * num_rows / steps.batch_size)
