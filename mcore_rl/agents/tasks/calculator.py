"""Products too long for a tiny model, which has a calculator and seldom takes it.

*Worked* conversations call the tool and say what it has found; *direct* ones say a number at once,
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
    name = "calculator"
    tools: Sequence[ToolSpec] = (
        ToolSpec(
            calculator.tool.name,  # type: ignore[attr-defined]
            calculator.tool.description,  # type: ignore[attr-defined]
            calculator.tool.parameters,  # type: ignore[attr-defined]
        ),
    )

    def problems(self) -> list[Problem]:
        found = list(product(_FACTORS, _FACTORS))
        random.Random(0).shuffle(found)
        return found

    def question(self, problem: Problem) -> str:
        return f"What is {_expression(problem)}?"

    def fields(self, problem: Problem) -> Mapping[str, Any]:
        return {"answer": _answer(problem)}

    def turns(self, problem: Problem, is_worked: bool, chance: random.Random) -> list[ChatMessage]:
        said = ChatMessage("assistant", f"#### {_answer(problem)}")
        if not is_worked:
            return [said]
        call = ToolCall("calculator", {"expression": _expression(problem)})
        answered = ChatMessage("tool", _answer(problem), name="calculator")
        return [ChatMessage("assistant", tool_calls=(call,)), answered, said]


def _expression(problem: Problem) -> str:
    return f"{problem[0]}*{problem[1]}"


def _answer(problem: Problem) -> str:
    return str(problem[0] * problem[1])
