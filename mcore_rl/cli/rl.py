"""mcore-rl rl: settings from configs/rl.yaml, a recipe and key=value overrides."""

from __future__ import annotations

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.schema import RLConfig


def main(arguments: list[str]) -> None:
    config = compose_config("rl", RLConfig, arguments)
    from mcore_rl.jobs import rl  # imports torch and Ray: bad settings should not wait for that

    rl.run(config)
