"""The task `calculator`: products that are too hard for a tiny model without its calculator.

*Worked* conversations call the tool and repeat its result; *direct* ones give a number at once,
which a model of this size does not get right. Supervised training on a mixture leaves a model that
mostly guesses; reinforcement learning with nothing but an exact-match reward learns to call.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ToolCall, ToolSpec
from mcore_rl.agents.tools.built_in import calculator

Problem = tuple[int, int]  # to be multiplied

_FACTORS = range(32, 100)  # products have four digits


class CalculatorTask:
    """Multiply two numbers."""

    name = "calculator"
    tools: Sequence[ToolSpec] = (
        ToolSpec(
            calculator.tool.name,  # type: ignore[attr-defined]
            calculator.tool.description,  # type: ignore[attr-defined]
            calculator.tool.parameters,  # type: ignore[attr-defined]
        ),
    )

    def problems(self) -> list[Problem]:
        """Return all pairs of factors, shuffled."""
        pairs = list(product(_FACTORS, _FACTORS))
        random.Random(0).shuffle(pairs)
        return pairs

    def question(self, problem: Problem) -> str:
        """Return the user's question."""
        return f"What is {_format_expression(problem)}?"

    def fields(self, problem: Problem) -> Mapping[str, Any]:
        """Return the product."""
        return {"answer": _compute_answer(problem)}

    def turns(self, problem: Problem, is_worked: bool, chance: random.Random) -> list[ChatMessage]:
        """Return an answer, with a call of the calculator before it if it is worked."""
        answer = ChatMessage("assistant", f"#### {_compute_answer(problem)}")
        if not is_worked:
            return [answer]
        call = ToolCall("calculator", {"expression": _format_expression(problem)})
        result = ChatMessage("tool", _compute_answer(problem), name="calculator")
        return [ChatMessage("assistant", tool_calls=(call,)), result, answer]


def _format_expression(problem: Problem) -> str:
    return f"{problem[0]}*{problem[1]}"


def _compute_answer(problem: Problem) -> str:
    return str(problem[0] * problem[1])
