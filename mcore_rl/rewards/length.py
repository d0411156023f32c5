"""Length shaping: rewards for the number of tokens of a response."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.checks import check_at_least, check_between
from mcore_rl.rewards.registry import gives, register_reward


@dataclass(frozen=True)
class OverlongSettings:
    """Settings of `reward.name=overlong`."""

    buffer_tokens: int  # number of tokens before the limit over which the reward falls to -1

    def __post_init__(self) -> None:
        check_at_least("buffer_tokens", self.buffer_tokens, 1)

    def check_max_tokens(self, key: str, max_tokens: int) -> None:
        """Raise ConfigError if the buffer is longer than a response may be."""
        check_between(f"{key}.buffer_tokens", self.buffer_tokens, 1, max_tokens)


@dataclass(frozen=True)
class CosineSettings:
    """Settings of `reward.name=cosine`."""

    term: str  # an earlier term of reward.terms; a response is right if it is above 0
    right_short: float = 1.0  # reward of a right response of no tokens
    right_long: float = 0.5  # reward of a right response just below the limit
    wrong_short: float = -1.0  # reward of a wrong response of no tokens
    wrong_long: float = -0.5  # reward of a wrong response just below the limit
    overlong: float = -1.0  # reward of any response that reaches the limit


@register_reward("overlong")
@gives()
def overlong(
    text: str,
    fields: Mapping[str, Any],
    finish_reason: str,
    num_tokens: int,
    max_tokens: int,
    settings: OverlongSettings,
) -> dict[str, float]:
    """Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), to be added to other rewards.

    0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens, and -1 beyond,
    where an agent of several contexts may get.
    """
    start = max_tokens - settings.buffer_tokens
    return {"reward": max(-1.0, min(0.0, (start - num_tokens) / settings.buffer_tokens))}


@register_reward("cosine")
@gives()
def cosine(
    text: str,
    fields: Mapping[str, Any],
    finish_reason: str,
    num_tokens: int,
    max_tokens: int,
    rewards: Mapping[str, float],
    settings: CosineSettings,
) -> dict[str, float]:
    """Cosine reward of Yeo et al. (arXiv:2502.03373): short and right is best.

    r(t) = long + (short - long) * (1 + cos(pi * t / max_tokens)) / 2 for t tokens, where short and
    long are those of right or of wrong responses; `overlong` at t = max_tokens. The paper's formula
    has short and long exchanged; this follows its text and its code.
    """
    if num_tokens >= max_tokens:
        return {"reward": settings.overlong}
    short, long = settings.wrong_short, settings.wrong_long
    if rewards[settings.term] > 0:
        short, long = settings.right_short, settings.right_long
    return {"reward": long + (short - long) * (1 + math.cos(math.pi * num_tokens / max_tokens)) / 2}
