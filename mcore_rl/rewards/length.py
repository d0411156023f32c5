"""Length shaping: what the number of tokens of a response is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.checks import check_at_least, check_between
from mcore_rl.rewards.base import gives, register_reward


@dataclass(frozen=True)
class OverlongSettings:
    """Settings of `reward.name=overlong`."""

    buffer_tokens: int  # the last tokens before the limit, over which the reward falls to -1

    def __post_init__(self) -> None:
        check_at_least("buffer_tokens", self.buffer_tokens, 1)

    def check_max_tokens(self, key: str, max_tokens: int) -> None:
        """Raises ConfigError; a longer buffer would punish a response without a token."""
        check_between(f"{key}.buffer_tokens", self.buffer_tokens, 1, max_tokens)


@dataclass(frozen=True)
class CosineSettings:
    """Settings of `reward.name=cosine`."""

    term: str  # the term of reward.terms before it that is above 0 for a right response
    right_short: float = 1.0  # reward of a right response of no tokens
    right_long: float = 0.5  # and of one that almost reaches the limit
    wrong_short: float = -1.0  # reward of a wrong response of no tokens
    wrong_long: float = -0.5  # and of one that almost reaches the limit
    overlong: float = -1.0  # reward of a response, right or wrong, that reaches the limit


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

    0 up to max_tokens - buffer_tokens; from there on falling linearly, -1 at max_tokens. With
    y = num_tokens: min(0, (max_tokens - buffer_tokens - y) / buffer_tokens). The paper's third
    case, y above max_tokens, does not occur: generation ends there.
    """
    free = max_tokens - settings.buffer_tokens
    return {"reward": min(0.0, (free - num_tokens) / settings.buffer_tokens)}


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
    long are of right or of wrong responses; `overlong` at t = max_tokens. The formula of the paper
    has short and long the other way round, against its text and its code, which this follows.
    """
    if num_tokens >= max_tokens:
        return {"reward": settings.overlong}
    short, long = settings.wrong_short, settings.wrong_long
    if rewards[settings.term] > 0:
        short, long = settings.right_short, settings.right_long
    return {"reward": long + (short - long) * (1 + math.cos(math.pi * num_tokens / max_tokens)) / 2}
