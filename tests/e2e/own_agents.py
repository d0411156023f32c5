"""A loop and an environment that a user may write; jobs name them by import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import EnvironmentStep
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.data.sample import Sample


class AsksOnce:
    """A loop of one turn, whose reward is that of the run."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        session = self._agent.session(task)
        answer = await session.ask(task.messages)
        return await self._agent.score_samples(task, session, "finished", answer.parsed.content)


class Twice:
    """Asks again after the first turn; rewards are lengths, so that they differ."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._answer, self._turns = str(fields["answer"]), 0

    async def reset(self) -> Sequence[ChatMessage]:
        return []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        self._turns += 1
        reward = len(turn.content) % 5 + (self._answer in turn.content)
        again = ChatMessage("user", "1+1?")
        return EnvironmentStep((again,), reward=float(reward), is_done=self._turns == 2)

    async def close(self) -> None:
        pass
