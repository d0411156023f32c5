"""Rewards by name.

A reward reads the text of a response, the fields of its prompt and why generation ended, and
returns its total under "reward" and whatever parts are worth watching under other names.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from mcore_rl.algorithms.registry import Registry


class Reward(Protocol):
    def __call__(
        self, text: str, fields: Mapping[str, Any], finish_reason: str
    ) -> dict[str, float]: ...


_REWARDS: Registry[Reward] = Registry("reward.name")
_BUILT_IN = ("mcore_rl.rewards.rules_math",)  # modules that register rewards when imported

register_reward = _REWARDS.register


def get_reward(name: str) -> Reward:
    """The reward registered under `name`; ConfigError lists the names there are."""
    for module in _BUILT_IN:
        importlib.import_module(module)
    return _REWARDS[name]
