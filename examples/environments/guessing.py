"""The environment `guessing`: find a number from "too low" and "too high"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import Attempts, EnvironmentStep
from mcore_rl.config.checks import check_at_least
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.thoughts import find_answer

_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class GuessingSettings:
    """Settings of agent.environment=guessing."""

    low: int = 1
    high: int = 100
    try_penalty: float = 0.05  # subtracted from the reward for each guess before the right one

    def __post_init__(self) -> None:
        check_at_least("high", self.high, self.low)


class Guessing:
    """Compares guesses with the number in the field `answer`.

    A guess is the last whole number in a turn. A right guess earns 1 - try_penalty *
    (guesses before it), at least 0.
    """

    tools: Sequence[ToolSpec] = ()

    def __init__(self, fields: Mapping[str, Any], settings: GuessingSettings) -> None:
        """Read the number; raise ConfigError if the row has none in the range."""
        self._settings, self._attempts = settings, Attempts(settings.try_penalty)
        try:
            self._number = int(fields["answer"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "agent.environment='guessing' needs a whole number as the field 'answer' "
                f"(data.answer_column); this row has {fields.get('answer')!r}"
            ) from error
        if not settings.low <= self._number <= settings.high:
            raise ConfigError(
                f"agent.environment='guessing': the answer {self._number} is not from "
                f"{settings.low} to {settings.high}, as agent.environment_settings say"
            )

    async def reset(self) -> Sequence[ChatMessage]:
        """Return no messages."""
        return []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        """Compare the guess of a turn."""
        numbers = _INTEGER.findall(find_answer(turn.content))
        if not numbers:
            feedback = f"Guess a whole number from {self._settings.low} to {self._settings.high}."
        elif (guess := int(numbers[-1][:20])) == self._number:
            feedback = ""
        else:
            feedback = f"{guess} is too {'low' if guess < self._number else 'high'}."
        return self._attempts.record(feedback)

    async def close(self) -> None:
        """Do nothing."""
