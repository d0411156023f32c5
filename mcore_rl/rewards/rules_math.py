"""Rewards that check a mathematical answer by rule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.rewards.base import register_reward

_FINAL_LINE = re.compile(r"#### ([0-9]+)")


@register_reward("final_number")
def final_number(text: str, fields: Mapping[str, Any], finish_reason: str) -> dict[str, float]:
    """1.0 when the last line is exactly `#### <digits>`, the digits are the answer, and it ended.

    A response cut off by the length limit earns nothing: its last line might have gone on.
    `format` is 1.0 when the response ended in such a line, right or wrong. Answers are compared as
    text, so `07` is not `7`. Raises ConfigError when the fields hold no answer.
    """
    if "answer" not in fields:
        raise ConfigError(
            f"reward.name='final_number' needs the field 'answer' (data.answer_column); "
            f"this sample has {', '.join(sorted(fields)) or 'no field'}"
        )
    match = _FINAL_LINE.fullmatch(text.rpartition("\n")[2])
    if match is None or finish_reason != "stop":
        return {"reward": 0.0, "format": 0.0}
    return {"reward": float(match[1] == str(fields["answer"])), "format": 1.0}
