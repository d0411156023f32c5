"""Which loop trains, and how old its samples may be. Pure."""

from __future__ import annotations

from mcore_rl.config.checks import between, one_of
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import TrainerConfig

MODES = ("sync", "one_step_off")


def resolve_mode(config: TrainerConfig) -> None:
    one_of("trainer.mode", config.mode, MODES)
    if config.mode == "sync" and config.staleness:
        raise ConfigError(
            f"trainer.staleness={config.staleness}: trainer.mode='sync' trains on samples of the "
            "policy; allowed: 0, or trainer.mode='one_step_off'"
        )
    between("trainer.staleness", staleness_of(config), 0, 1)


def staleness_of(config: TrainerConfig) -> int:
    """How many versions older than the policy samples are."""
    if config.staleness is not None:
        return config.staleness
    return 0 if config.mode == "sync" else 1
