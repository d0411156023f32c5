"""One-line functions with a number that only the tests know, in up to two programs.

The first program cannot but guess the number; the failure of its test tells it. *Worked*
conversations take it from there; *stubborn* ones guess again. Supervised training on a mixture
leaves a model that mostly guesses; reinforcement learning with the rewards of the environment
`code` learns to read what has failed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mcore_rl.agents.codec import ChatMessage, ToolSpec
from mcore_rl.agents.coding import told_assert
from mcore_rl.agents.environment import try_again

Problem = tuple[int, int]  # f(x) = x * factor + number

NUM_TRIES = 2
_FACTORS, _NUMBERS = range(10, 40), range(10, 60)


class CodeTask:
    name = "code"
    tools: Sequence[ToolSpec] = ()

    def problems(self) -> list[Problem]:
        found = list(product(_FACTORS, _NUMBERS))
        random.Random(0).shuffle(found)
        return found

    def question(self, problem: Problem) -> str:
        return f"Write f(x): x times {problem[0]}, plus a number."

    def fields(self, problem: Problem) -> Mapping[str, Any]:
        factor, number = problem
        asserts = [_assert(0, number), _assert(1, factor + number)]
        return {"answer": json.dumps({"asserts": asserts})}

    def turns(self, problem: Problem, is_worked: bool, chance: random.Random) -> list[ChatMessage]:
        factor, number = problem
        found: list[ChatMessage] = []
        for attempt in range(NUM_TRIES):
            guess = number if is_worked and attempt else chance.choice(_NUMBERS)
            program = f"```python\ndef f(x):\n return x*{factor}+{guess}\n```"
            found.append(ChatMessage("assistant", program))
            if guess == number:
                return found
            wrong = told_assert(_assert(0, number), "AssertionError: ")
            found.append(ChatMessage("user", try_again(wrong)))
        return found[:-1]


def _assert(x: int, wanted: int) -> str:
    return f"assert f({x}) == {wanted}"
