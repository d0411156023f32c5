"""The sources of data that settings name, to train on and held out, and the rules between them."""

from __future__ import annotations

import re

from mcore_rl.config.checks import positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DataConfig
from mcore_rl.config.train_schema import ConversationsConfig, PairsConfig

_SET_NAME = "[A-Za-z0-9_-]+"
AnyData = DataConfig | ConversationsConfig | PairsConfig


def resolve_sources(config: AnyData) -> None:
    files, weights = config.train_files, config.train_weights
    if files and config.train_file:
        raise ConfigError(
            f"data.train_file={config.train_file!r} and data.train_files={files}; allowed: one of "
            "the two"
        )
    if weights and len(weights) != len(files):
        raise ConfigError(
            f"data.train_weights={weights}: {len(files)} files in data.train_files; allowed: a "
            "weight for each of them, or []"
        )
    for index, weight in enumerate(weights):
        positive(f"data.train_weights[{index}]", weight)
    if config.test_files and config.test_file:
        raise ConfigError(
            f"data.test_file={config.test_file!r} and data.test_files={config.test_files}; "
            "allowed: one of the two"
        )
    for name in config.test_files:
        if not re.fullmatch(_SET_NAME, str(name)):
            raise ConfigError(f"data.test_files.{name}; allowed: names of {_SET_NAME}")


def train_files(config: AnyData) -> dict[str, str]:
    """The sources that are trained on, by setting."""
    several = {f"data.train_files[{i}]": name for i, name in enumerate(config.train_files)}
    return several or {"data.train_file": config.train_file}


def test_files(config: AnyData) -> dict[str, tuple[str, str]]:
    """Setting and source of each held-out set, by its name."""
    several = config.test_files
    found = {name: (f"data.test_files.{name}", file) for name, file in several.items()}
    if config.test_file:
        found["test"] = "data.test_file", config.test_file
    return found
