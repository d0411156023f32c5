"""Three numbers that make a target with the right two signs, in up to four tries.

*Worked* conversations go on to the next signs, in a fixed order; *stubborn* ones say the same again
when they are told that it is wrong. Supervised training on a mixture leaves a model that is mostly
stubborn; reinforcement learning with the rewards of the environment `countdown` learns to try
another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ToolSpec
from mcore_rl.agents.environments.base import try_again

Problem = tuple[tuple[int, int, int], int]  # the numbers and the target

NUM_TRIES = 4
_NUMBERS = range(2, 10)
_SIGNS = tuple(product("+*", repeat=2))


class CountdownTask:
    name = "countdown"
    tools: Sequence[ToolSpec] = ()

    def problems(self) -> list[Problem]:
        """Those that one pair of signs alone solves."""
        found = []
        for numbers in product(_NUMBERS, _NUMBERS, _NUMBERS):
            values = [_value(numbers, signs) for signs in _SIGNS]
            found += [(numbers, value) for value in values if values.count(value) == 1]
        random.Random(0).shuffle(found)
        return found

    def question(self, problem: Problem) -> str:
        (a, b, c), target = problem
        return f"Make {target} of {a}, {b} and {c}."

    def fields(self, problem: Problem) -> Mapping[str, Any]:
        numbers, target = problem
        return {"answer": str(target), "nums": list(numbers), "target": target}

    def turns(self, problem: Problem, is_worked: bool, chance: random.Random) -> list[ChatMessage]:
        numbers, target = problem
        first = chance.randrange(NUM_TRIES)
        tried = [(first + number * is_worked) % NUM_TRIES for number in range(NUM_TRIES)]
        found: list[ChatMessage] = []
        for signs in (_SIGNS[number] for number in tried):
            said, value = _expression(numbers, signs), _value(numbers, signs)
            found.append(ChatMessage("assistant", said))
            if value == target:
                return found
            wrong = f"{said} is {value}, not {target}."
            found.append(ChatMessage("user", try_again(wrong)))
        return found[:-1]


def _expression(numbers: tuple[int, int, int], signs: tuple[str, ...]) -> str:
    a, b, c = numbers
    return f"{a}{signs[0]}{b}{signs[1]}{c}"


def _value(numbers: tuple[int, int, int], signs: tuple[str, ...]) -> int:
    a, b, c = numbers
    first, second = signs
    if second == "*" and first == "+":
        return a + b * c
    left = a + b if first == "+" else a * b
    return left + c if second == "+" else left * c
