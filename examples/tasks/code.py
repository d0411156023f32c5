"""The task `code`: one-line functions with a number that only the tests have, in two attempts.

The first program leaves the number out; the failure of its test shows it. *Worked* conversations
add it; *stubborn* ones repeat the program. Supervised training on a mixture leaves a model that
does either; reinforcement learning with the rewards of the environment `code` learns to read the
feedback.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ToolSpec
from mcore_rl.agents.environments.base import format_feedback
from mcore_rl.agents.environments.coding import describe_failed_assert

Problem = tuple[int, int]  # f(x) = x * factor + number

_FACTORS, _NUMBERS = range(10, 40), range(10, 60)


class CodeTask:
    """Write a linear function."""

    name = "code"
    tools: Sequence[ToolSpec] = ()

    def problems(self) -> list[Problem]:
        """Return all pairs of factor and number, shuffled."""
        pairs = list(product(_FACTORS, _NUMBERS))
        random.Random(0).shuffle(pairs)
        return pairs

    def question(self, problem: Problem) -> str:
        """Return the user's question."""
        return f"Write f(x): x times {problem[0]}, plus a number."

    def fields(self, problem: Problem) -> Mapping[str, Any]:
        """Return the tests."""
        factor, number = problem
        asserts = [_write_assert(0, number), _write_assert(1, factor + number)]
        return {"answer": json.dumps({"asserts": asserts})}

    def turns(self, problem: Problem, is_worked: bool, chance: random.Random) -> list[ChatMessage]:
        """Return two programs; the second has the number if the conversation is worked."""
        factor, number = problem
        first, right = (_make_program(f"x*{factor}{added}") for added in ("", f"+{number}"))
        wrong = describe_failed_assert(_write_assert(0, number), "AssertionError: ")
        feedback = ChatMessage("user", format_feedback(wrong))
        return [first, feedback, right if is_worked else first]


def _make_program(value: str) -> ChatMessage:
    return ChatMessage("assistant", f"```python\ndef f(x):\n return {value}\n```")


def _write_assert(x: int, expected: int) -> str:
    return f"assert f({x}) == {expected}"
