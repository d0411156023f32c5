"""The environment `countdown`: numbers that have to make a target, with a word on each try."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import EnvironmentStep, Tries, try_again
from mcore_rl.agents.tools.base import ToolError
from mcore_rl.agents.tools.built_in import calculator
from mcore_rl.config.errors import ConfigError

_RUN = re.compile(r"[\d+\-*/() .]+")  # an expression, if there is a digit in it
_DIGIT = re.compile(r"\d")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class CountdownSettings:
    try_penalty: float = 0.1  # taken off the reward for each try before the right one
    uses_all: bool = False  # whether every number has to be used


class Countdown:
    """The fields `nums` and `target`, as `mcore-rl data countdown` writes them.

    A try is the last arithmetic expression in a turn, or what is in its last <answer></answer>. Its
    numbers have to be among `nums`, each as often as it is there at most. A right try earns
    1 - try_penalty * (tries before it), at least 0.
    """

    tools: Sequence[ToolSpec] = ()

    def __init__(self, fields: Mapping[str, Any], settings: CountdownSettings) -> None:
        """Raises ConfigError where the row has no such fields."""
        self._settings, self._tries = settings, Tries(settings.try_penalty)
        try:
            self._numbers = Counter(int(number) for number in fields["nums"])
            self._target = int(fields["target"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"agent.environment='countdown' reads the columns nums, a list of whole numbers, "
                f"and target, a whole number; this row has {sorted(fields)}: {error!r}"
            ) from error

    async def reset(self) -> Sequence[ChatMessage]:
        return []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        return self._tries.step(try_again(self._problem(turn.content)))

    async def close(self) -> None:
        pass

    def _problem(self, text: str) -> str:
        """What is wrong with a try; empty if nothing is."""
        tried = expression_of(text)
        if tried is None:
            return "There is no expression in your answer."
        used = Counter(float(number) for number in _NUMBER.findall(tried))
        given = Counter({float(number): count for number, count in self._numbers.items()})
        if more := used - given:
            number = min(more)
            return f"{tried} uses {number:g} more often than it is there."
        if self._settings.uses_all and (left := given - used):
            return f"{tried} does not use {min(left):g}."
        try:
            value = calculator(tried)
        except ToolError as error:
            return f"{tried} has no value: {error}."
        return "" if value == str(self._target) else f"{tried} is {value}, not {self._target}."


def expression_of(text: str) -> str | None:
    """The last expression in a text, the left side of an equation; None without one.

    >>> expression_of("I take 3 numbers: (8 - 2) * 4 = 24")
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
    found: list[str] = [run for run in _RUN.findall(side) if _DIGIT.search(run)]
    return max(found, key=len).strip(" .")
