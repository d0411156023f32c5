"""One-line functions with a number that only the tests know, in up to two programs.

The first program leaves the number out; the failure of its test tells it. *Worked* conversations
add it; *stubborn* ones say the same program again. Supervised training on a mixture leaves a model
that does either; reinforcement learning with the rewards of the environment `code` learns to read
what has failed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ToolSpec
from mcore_rl.agents.environments.base import try_again
from mcore_rl.agents.environments.coding import told_assert

Problem = tuple[int, int]  # f(x) = x * factor + number

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
        first, right = (_program(f"x*{factor}{added}") for added in ("", f"+{number}"))
        wrong = told_assert(_assert(0, number), "AssertionError: ")
        told = ChatMessage("user", try_again(wrong))
        return [first, told, right if is_worked else first]


def _program(value: str) -> ChatMessage:
    return ChatMessage("assistant", f"```python\ndef f(x):\n return {value}\n```")


def _assert(x: int, wanted: int) -> str:
    return f"assert f({x}) == {wanted}"
