"""Which loop trains, and how old its samples may be. Pure."""

from __future__ import annotations

import math

from mcore_rl.config.checks import at_least, between, one_of
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path, load_own
from mcore_rl.config.schema import AsynchronousConfig, RLConfig, TrainerConfig

MODES = ("sync", "one_step_off", "fully_async")
DEFAULT_STALENESS = {"sync": 0, "one_step_off": 1, "fully_async": 2}


def resolve_mode(config: RLConfig) -> None:
    trainer, loop = config.trainer, get_loop(config.trainer)
    at_least("trainer.asynchronous.max_groups", trainer.asynchronous.max_groups, 0)
    between("trainer.asynchronous.over_issue", trainer.asynchronous.over_issue, 0, 1)
    if waiting := trainer.asynchronous.max_waiting_samples:
        a_step = trainer.prompts_per_step * config.algorithm.group_size
        at_least("trainer.asynchronous.max_waiting_samples", waiting, a_step)
    if loop == "sync" and trainer.staleness:
        raise ConfigError(
            f"trainer.staleness={trainer.staleness}: trainer.mode={trainer.mode!r} trains on "
            "samples of the policy; allowed: 0, or trainer.mode='one_step_off', 'fully_async'"
        )
    if loop == "fully_async":
        at_least("trainer.staleness", staleness_of(trainer), 0)
        _resolve_fully_async(config)
        return
    between("trainer.staleness", staleness_of(trainer), 0, 1)
    if trainer.asynchronous != AsynchronousConfig():
        raise ConfigError(
            f"trainer.asynchronous has no part in trainer.mode={trainer.mode!r}; allowed: its "
            "defaults, or trainer.mode='fully_async'"
        )


def get_loop(trainer: TrainerConfig) -> str:
    """Return the loop of this package whose rules hold: trainer.mode, or that of a user's trainer.

    A trainer by import path names it as its attribute `mode`.

    Raises:
        ConfigError: There is no such loop, or the import path leads nowhere.
    """
    if not is_import_path(trainer.mode):
        one_of("trainer.mode", trainer.mode, MODES)
        return trainer.mode
    loop = getattr(load_own("trainer.mode", trainer.mode), "mode", None)
    if loop not in MODES:
        raise ConfigError(
            f"trainer.mode={trainer.mode!r} has mode={loop!r}; allowed: a subclass of "
            f"mcore_rl.RLTrainer, with one of {', '.join(MODES)}"
        )
    return str(loop)


def staleness_of(config: TrainerConfig) -> int:
    """How many versions older than the policy samples may be."""
    if config.staleness is not None:
        return config.staleness
    return DEFAULT_STALENESS[get_loop(config)]


def num_over_issued(over_issue: float, prompts_per_step: int) -> int:
    """Groups begun beyond those that steps need: the share of a step, rounded up."""
    return math.ceil(round(over_issue * prompts_per_step, 9))  # 0.07 of 100 is 7


def _resolve_fully_async(config: RLConfig) -> None:
    asynchronous, algorithm = config.trainer.asynchronous, config.algorithm
    mode = "trainer.mode='fully_async'"
    if asynchronous.over_issue and not staleness_of(config.trainer):
        raise ConfigError(
            f"trainer.asynchronous.over_issue={asynchronous.over_issue} with trainer.staleness=0, "
            "where what a step leaves is too old for the next; allowed: 0, or staleness above 0"
        )
    if config.actor.moe.router_replay == "rollout":
        raise ConfigError(
            f"actor.moe.router_replay='rollout' with {mode}: the experts of a response are those "
            "of several versions of the router; allowed: 'off', 'record'"
        )
    is_uncut = algorithm.loss == "decoupled_ppo" and not algorithm.loss_settings.get("weight_cap")
    if is_uncut and staleness_of(config.trainer):
        raise ConfigError(
            f"algorithm.loss='decoupled_ppo' with {mode} and no weight_cap in "
            "algorithm.loss_settings: training collapses by weights of old samples without a "
            "bound; allowed: weight_cap above 0, such as 5"
        )
    if algorithm.samples.prompts_per_round:
        raise ConfigError(
            f"algorithm.samples.prompts_per_round={algorithm.samples.prompts_per_round}: {mode} "
            "generates in no rounds; allowed: 0"
        )
    if config.reward.shuffle and algorithm.samples.group_filter:
        raise ConfigError(
            f"reward.shuffle=true with {mode} and algorithm.samples.group_filter="
            f"{algorithm.samples.group_filter!r}: groups are filtered as they come, before "
            "rewards could be permuted over a step; allowed: group_filter=''"
        )
