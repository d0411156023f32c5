"""A loop of two agents: a solver that hands questions to helpers, all of them the policy.

    agent.loop=examples/delegating.py:Delegating

A helper sees its question and nothing else. All that the solver and its helpers say is trained with
the reward of the solver's answer, and a trajectory with helpers counts once in its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.agents.chat_template.codec import ChatMessage, ContextFullError, ParsedCall, ToolSpec
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.agents.session import ChatSession
from mcore_rl.data.sample import Sample, TrajectoryStatus

DELEGATE = ToolSpec(
    "delegate",
    "Has a helper answer a question. It knows nothing but the question.",
    {
        "type": "object",
        "properties": {"question": {"type": "string"}},
        "required": ["question"],
    },
)


@dataclass(frozen=True)
class DelegatingSettings:
    max_helpers: int = 4  # of a trajectory


class Delegating:
    """Lets the solver call helpers as a tool."""

    def __init__(self, agent: Agent, settings: DelegatingSettings) -> None:
        self._agent, self._settings = agent, settings

    async def run(self, task: Task) -> list[Sample]:
        """Let the solver answer; return the samples of all agents."""
        solver, helpers = self._agent.session(task), list[ChatSession]()
        status, text = await self._solve(task, solver, helpers)
        return await self._agent.score_samples(task, solver, status, text, helpers)

    async def _solve(
        self, task: Task, solver: ChatSession, helpers: list[ChatSession]
    ) -> tuple[TrajectoryStatus, str]:
        messages: Sequence[ChatMessage] = task.messages
        for _ in range(self._agent.max_turns):
            try:
                answer = await solver.ask(messages, [DELEGATE])
            except ContextFullError:
                return "truncated", ""
            if answer.finish_reason != "stop":
                return "truncated", answer.parsed.content
            if not answer.parsed.calls:
                return "finished", answer.parsed.content
            answers = [self._call_helper(task, call, helpers) for call in answer.parsed.calls]
            messages = await asyncio.gather(*answers)  # helpers answer at the same time
        return "truncated", ""

    async def _call_helper(
        self, task: Task, call: ParsedCall, helpers: list[ChatSession]
    ) -> ChatMessage:
        """Return the answer to a call."""
        question = call.arguments.get("question")
        if call.status != "ok" or not isinstance(question, str):
            text = "Error: the call has no question."
        elif len(helpers) == self._settings.max_helpers:
            text = "Error: there is no helper left."
        else:
            helpers.append(helper := self._agent.session(task))
            try:
                text = (await helper.ask([ChatMessage("user", question)])).parsed.content
            except ContextFullError as error:
                text = f"Error: the question is too long: {error}"
        return ChatMessage("tool", text, tool_call_id=call.id, name=call.name)
