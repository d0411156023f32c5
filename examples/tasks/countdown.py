"""The task `countdown`: three numbers make a target with the right two signs, in four attempts.

*Worked* conversations try the next signs, in a fixed order; *stubborn* ones repeat the expression
after the feedback that it is wrong. Supervised training on a mixture leaves a model that is mostly
stubborn; reinforcement learning with the rewards of the environment `countdown` learns to try
another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ToolSpec
from mcore_rl.agents.environments.base import format_feedback

Problem = tuple[tuple[int, int, int], int]  # the numbers and the target

NUM_TRIES = 4
_NUMBERS = range(2, 10)
_SIGNS = tuple(product("+*", repeat=2))


class CountdownTask:
    """Find the signs between three numbers."""

    name = "countdown"
    tools: Sequence[ToolSpec] = ()

    def problems(self) -> list[Problem]:
        """Return all problems that exactly one pair of signs solves, shuffled."""
        problems: list[Problem] = []
        for numbers in product(_NUMBERS, _NUMBERS, _NUMBERS):
            values = [_evaluate(numbers, signs) for signs in _SIGNS]
            problems += [(numbers, value) for value in values if values.count(value) == 1]
        random.Random(0).shuffle(problems)
        return problems

    def question(self, problem: Problem) -> str:
        """Return the user's question."""
        (a, b, c), target = problem
        return f"Make {target} of {a}, {b} and {c}."

    def fields(self, problem: Problem) -> Mapping[str, Any]:
        """Return the numbers and the target."""
        numbers, target = problem
        return {"answer": str(target), "nums": list(numbers), "target": target}

    def turns(self, problem: Problem, is_worked: bool, chance: random.Random) -> list[ChatMessage]:
        """Return attempts with their feedback, up to the right one or NUM_TRIES."""
        numbers, target = problem
        first = chance.randrange(NUM_TRIES)
        tried = [(first + number * is_worked) % NUM_TRIES for number in range(NUM_TRIES)]
        messages: list[ChatMessage] = []
        for signs in (_SIGNS[number] for number in tried):
            text, value = _format_expression(numbers, signs), _evaluate(numbers, signs)
            messages.append(ChatMessage("assistant", text))
            if value == target:
                return messages
            wrong = f"{text} is {value}, not {target}."
            messages.append(ChatMessage("user", format_feedback(wrong)))
        return messages[:-1]


def _format_expression(numbers: tuple[int, int, int], signs: tuple[str, ...]) -> str:
    a, b, c = numbers
    return f"{a}{signs[0]}{b}{signs[1]}{c}"


def _evaluate(numbers: tuple[int, int, int], signs: tuple[str, ...]) -> int:
    a, b, c = numbers
    first, second = signs
    if second == "*" and first == "+":
        return a + b * c
    left = a + b if first == "+" else a * b
    return left + c if second == "+" else left * c
