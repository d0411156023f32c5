"""Rewards by name, or by import path.

A reward reads the text of a response, the fields of its prompt and why generation ended, and
returns its total under "reward" and other metrics under other names. All are
finite numbers, and the names are the same for every response.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol

from mcore_rl.algorithms.registry import Registry


class Reward(Protocol):
    def __call__(
        self, text: str, fields: Mapping[str, Any], finish_reason: str
    ) -> dict[str, float]: ...


class RewardError(RuntimeError):
    """A reward raised, or returned an invalid result."""


_SHOWN = 200  # characters of a response or of its fields in an error
_REWARDS: Registry[Reward] = Registry(
    "reward.name", ("text", "fields", "finish_reason"), "reward.settings"
)
_BUILT_IN = ("mcore_rl.rewards.rules_math",)  # modules that register rewards when imported

register_reward = _REWARDS.register


def get_reward(name: str, settings: Mapping[str, object] | None = None) -> Reward:
    """The reward that reward.name names, with its settings; ConfigError as Registry.bound."""
    for module in _BUILT_IN:
        importlib.import_module(module)
    return _REWARDS.bound(name, settings or {})


class Judge:
    """A reward by its name, with a check on what it returns."""

    def __init__(self, name: str, settings: Mapping[str, object] | None = None) -> None:
        self._name, self._reward = name, get_reward(name, settings)
        self._parts: set[str] = set()  # of the first response

    def __call__(
        self, text: str, fields: Mapping[str, Any], finish_reason: str, where: str
    ) -> dict[str, float]:
        """The total and its parts as floats; `where` says in errors which prompt it is about.

        Raises:
            RewardError: the reward raised, or returned anything but a dict of finite numbers with
                "reward" among them, or other names than for the first response.
        """
        try:
            found = self._reward(text, fields, finish_reason)
        except Exception as error:
            what = f"raised {type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"
            raise self._refusal(what, text, fields, where) from error
        if (fault := _fault(found)) or (fault := self._other_parts(found)):
            raise self._refusal(f"returned {fault}", text, fields, where)
        return {name: float(value) for name, value in found.items()}

    def _other_parts(self, found: Mapping[str, float]) -> str:
        self._parts = self._parts or set(found)
        if self._parts == set(found):
            return ""
        return f"the keys {sorted(found)}, and {sorted(self._parts)} for an earlier response"

    def _refusal(self, what: str, text: str, fields: Mapping[str, Any], where: str) -> RewardError:
        return RewardError(
            f"reward.name={self._name!r} {what}; it must return a dict of finite numbers, with "
            f"'reward' and the same keys for every response. It was asked about {where}, with the "
            f"fields {_shown(dict(fields))} and the response {_shown(text)}"
        )


def _fault(found: object) -> str:
    """Why a reward's result is invalid; empty if it is valid."""
    if not isinstance(found, Mapping):
        return f"{_shown(found)}, which is no dict but {type(found).__name__}"
    if "reward" not in found:
        return f"a dict without 'reward', with the keys {_shown(list(found))}"
    for name, value in found.items():
        if not isinstance(name, str):
            return f"the key {_shown(name)}, which is no text"
        if not isinstance(value, Real) or not math.isfinite(value):
            return f"{_shown(value)} for {name!r}, which is no finite number"
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
