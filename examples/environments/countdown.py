"""The environment `countdown`: numbers have to make a target; feedback on each attempt."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import Attempts, EnvironmentStep, format_feedback
from mcore_rl.agents.tools.base import ToolError
from mcore_rl.agents.tools.built_in import calculator
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.thoughts import find_answer

_EXPRESSION = re.compile(r"[\d+\-*/() .]+")  # if there is a digit in it
_DIGIT = re.compile(r"\d")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class CountdownSettings:
    """Settings of agent.environment=countdown."""

    try_penalty: float = 0.1  # subtracted from the reward for each attempt before the right one
    uses_all: bool = False  # whether every number has to be used


class Countdown:
    """Checks arithmetic expressions that have to make a target of some numbers.

    The fields are `nums` and `target`, as `mcore-rl data countdown` writes them. An attempt is the
    last arithmetic expression in a turn, or the text in its last <answer></answer>. It may use each
    of `nums` once. A right attempt earns 1 - try_penalty * (attempts before it), at least 0.
    """

    tools: Sequence[ToolSpec] = ()

    def __init__(self, fields: Mapping[str, Any], settings: CountdownSettings) -> None:
        """Read the row; raise ConfigError if it lacks a field."""
        self._settings, self._attempts = settings, Attempts(settings.try_penalty)
        try:
            self._numbers = Counter(int(number) for number in fields["nums"])
            self._target = int(fields["target"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"agent.environment='countdown' reads the columns nums, a list of whole numbers, "
                f"and target, a whole number; this row has {sorted(fields)}: {error!r}"
            ) from error

    async def reset(self) -> Sequence[ChatMessage]:
        """Return no messages."""
        return []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        """Check the expression of a turn."""
        problem = self._find_problem(find_answer(turn.content))
        return self._attempts.record(format_feedback(problem))

    async def close(self) -> None:
        """Do nothing."""

    def _find_problem(self, text: str) -> str:
        """Describe the fault of an attempt; return "" if it is right."""
        expression = find_expression(text)
        if expression is None:
            return "There is no expression in your answer."
        used = Counter(float(number) for number in _NUMBER.findall(expression))
        given = Counter({float(number): count for number, count in self._numbers.items()})
        if excess := used - given:
            number = min(excess)
            return f"{expression} uses {number:g} more often than it is there."
        if self._settings.uses_all and (unused := given - used):
            return f"{expression} does not use {min(unused):g}."
        try:
            value = calculator(expression)
        except ToolError as error:
            return f"{expression} has no value: {error}."
        return "" if value == str(self._target) else f"{expression} is {value}, not {self._target}."


def find_expression(text: str) -> str | None:
    """Return the last expression in a text, the left side of an equation; None without one.

    >>> find_expression("I take 3 numbers: (8 - 2) * 4 = 24")
    '(8 - 2) * 4'
    """
    for part in reversed(text.split("</answer>")[:-1]):
        _, is_tagged, inside = part.partition("<answer>")
        if is_tagged:
            text = inside
            break
    lines = [line for line in text.splitlines() if _DIGIT.search(line)]
    if not lines:
        return None
    side = next(side for side in lines[-1].split("=") if _DIGIT.search(side))
    expressions: list[str] = [run for run in _EXPRESSION.findall(side) if _DIGIT.search(run)]
    return max(expressions, key=len).strip(" .")
