"""Loops between the policy and what answers it: a user's own is a class like these."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcore_rl.agents.codec import ChatMessage, ParsedCall, ToolSpec
from mcore_rl.agents.environment import Environment
from mcore_rl.agents.session import Answer, ChatSession, ContextFullError
from mcore_rl.agents.tools.base import ToolSet
from mcore_rl.data.sample import Sample, TrajectoryStatus
from mcore_rl.rollout.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class Task:
    """One trajectory to be made."""

    messages: tuple[ChatMessage, ...]  # the chat of the prompt column
    fields: Mapping[str, Any]  # the other columns of the data source
    group_id: int
    trajectory: int  # its number in the group
    row: int  # of the data source
    sampling: SamplingParams  # of its turns; with the seed of the first
    max_tokens: int  # that its response may have


@dataclass(slots=True)
class Served:
    """A conversation with the policy that a program has over HTTP, as docs/endpoint.md says.

    What the program does is in the fields behind `session`; they are complete once it has ended.
    """

    base_url: str  # of clients of OpenAI's API: it ends with /v1
    api_key: str = field(repr=False)
    session: ChatSession  # has the turns
    text: str = ""  # the content of the last answer, which a reward reads
    reward: float | None = None  # what the program has posted
    turn_rewards: tuple[float, ...] = ()  # the same, one a turn; or none
    status: TrajectoryStatus | None = None  # how the program has said that it ended
    is_limited: bool = False  # a request was refused by a limit of the trajectory
    roles: list[Served] = field(default_factory=list)  # opened by the program, with their rewards

    @property
    def is_cut_off(self) -> bool:
        """Whether a limit has ended it: one refused a request, or cut off the last answer."""
        turns = self.session.turns
        return self.is_limited or bool(turns and turns[-1].finish_reason == "length")


class Agent(Protocol):
    """What a loop gets to work with."""

    max_turns: int

    def session(self, task: Task, *, model: str = "", role: str = "") -> ChatSession:
        """A new conversation with the policy, or with one of `models`; a loop may have several.

        Those of the policy without a role are one trajectory together, with one reward. One with a
        role is a trajectory of its own, compared with those of the same prompt and role.
        """

    def tools(self) -> AbstractAsyncContextManager[ToolSet]:
        """Those of agent.tools, set up for one trajectory and closed after it."""

    def environment(self, task: Task) -> AbstractAsyncContextManager[Environment]:
        """That of agent.environment, of one trajectory."""

    def served(self, task: Task) -> AbstractAsyncContextManager[Served]:
        """A new session with the policy for any client of OpenAI's API, with a key of its own.

        What the client asks with the key becomes turns of `Served.session`, for `judged` or
        `rewarded`. After the block the key is not known any more. Where the server has failed
        meanwhile, the block ends with a GenerationError.
        """

    async def judged(
        self, task: Task, session: ChatSession, status: TrajectoryStatus, text: str
    ) -> list[Sample]:
        """The samples of a session, with the rewards that config.reward finds for a text.

        The session is one of the policy; others are not trained.
        """

    def rewarded(
        self,
        task: Task,
        session: ChatSession,
        status: TrajectoryStatus,
        reward: float,
        turn_rewards: Sequence[float] = (),
    ) -> list[Sample]:
        """The samples of a session with a reward that is known.

        `turn_rewards`: how much of it each turn has earned; the last one, what they leave.
        """


class AgentLoop(Protocol):
    """Made once a server; `run` is called for many trajectories at the same time."""

    async def run(self, task: Task) -> list[Sample]:
        """The samples of one trajectory. What it raises is of this trajectory alone."""


def specs_of(tools: ToolSet) -> list[ToolSpec]:
    return [ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools.tools.values()]


class ToolLoop:
    """ReAct (Yao et al. 2022, arXiv:2210.03629): the policy calls tools until it answers.

    Calls of one turn run at the same time. What is wrong with a call is told to the policy as the
    tool's answer. The reward reads the content of the last turn; it is empty where the trajectory
    was cut off before one without calls.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        session = self._agent.session(task)
        async with self._agent.tools() as tools:
            status, text = await self._talk(session, task.messages, tools)
        return await self._agent.judged(task, session, status, text)

    async def _talk(
        self, session: ChatSession, messages: Sequence[ChatMessage], tools: ToolSet
    ) -> tuple[TrajectoryStatus, str]:
        specs = specs_of(tools)
        for _ in range(self._agent.max_turns):
            try:
                answer = await session.ask(messages, specs)
            except ContextFullError:
                return "truncated", ""
            if answer.finish_reason != "stop":
                return "truncated", answer.parsed.content
            calls = answer.parsed.calls
            if not calls:
                return "finished", answer.parsed.content
            messages = await asyncio.gather(*(_called(tools, call) for call in calls))
        return "truncated", ""


async def _called(tools: ToolSet, call: ParsedCall) -> ChatMessage:
    if call.status in ("ok", "unknown_tool"):
        text = (await tools.call(call.name, call.arguments)).text
    else:
        text = f"Error: the call is {call.status}: {call.text}"
    return ChatMessage("tool", text, tool_call_id=call.id, name=call.name)


class EnvironmentLoop:
    """The policy acts by its turns, and an environment answers until it is done.

    The reward is the sum of those of all steps, each earned by its turn. A turn that is cut off by
    agent.max_turn_tokens is a turn like others; a trajectory that is cut off keeps what it has
    earned.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        session = self._agent.session(task)
        async with self._agent.environment(task) as environment:
            status, earned = await self._play(session, environment, task)
        return self._agent.rewarded(task, session, status, sum(earned, 0.0), earned)

    async def _play(
        self, session: ChatSession, environment: Environment, task: Task
    ) -> tuple[TrajectoryStatus, list[float]]:
        """How it ended, and what each turn has earned."""
        messages: Sequence[ChatMessage] = [*task.messages, *await environment.reset()]
        specs, earned = environment.tools, list[float]()
        for _ in range(self._agent.max_turns):
            try:
                answer: Answer = await session.ask(messages, specs)
            except ContextFullError:
                return "truncated", earned
            step = await environment.step(answer.parsed)
            earned.append(step.reward)
            if step.is_done:
                return "finished", earned
            if answer.finish_reason == "abort":
                return "aborted", earned
            messages = step.messages
        return "truncated", earned
