"""Loops between the policy and what answers it: a user's own is a class like these."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mcore_rl.agents.codec import ChatMessage, ContextFullError, ParsedCall, ToolSpec
from mcore_rl.agents.environment import Environment
from mcore_rl.agents.session import Answer, ChatSession
from mcore_rl.agents.tools.base import ToolSet
from mcore_rl.config.checks import check_between
from mcore_rl.data.sample import Sample, TrajectoryStatus
from mcore_rl.inference.protocol import SamplingParams


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
    token_rewards: tuple[Sequence[float], ...] = ()  # the same, a list a turn; or none
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
    max_context: int  # tokens that a conversation may have

    def session(self, task: Task, *, model: str = "", role: str = "") -> ChatSession:
        """A new conversation with the policy, or with one of `models`; a loop may have several.

        Those of the policy without a role are one trajectory together, with one reward. One with a
        role is a trajectory of its own, compared with those of the same prompt and role.
        """

    def begin_anew(self, task: Task) -> None:
        """The trajectory begins again: its sessions are forgotten, and the next have their seeds.

        None of them may be in use. It has the whole of its time again.
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
        self,
        task: Task,
        session: ChatSession,
        status: TrajectoryStatus,
        text: str,
        helpers: Sequence[ChatSession] = (),
    ) -> list[Sample]:
        """The samples of a session, with the rewards that config.reward finds for a text.

        Those of `helpers` come first, and have the same reward. All are sessions of the policy;
        others are not trained.
        """

    def rewarded(
        self,
        task: Task,
        session: ChatSession,
        status: TrajectoryStatus,
        reward: float,
        turn_rewards: Sequence[float] = (),
        token_rewards: Sequence[Sequence[float]] = (),
    ) -> list[Sample]:
        """The samples of a session with a reward that is known.

        `turn_rewards`: how much of it each turn has earned; the last one, what they leave.
        `token_rewards`: the same for each token of each turn.
        """


class AgentLoop(Protocol):
    """Made once a server; `run` is called for many trajectories at the same time."""

    async def run(self, task: Task) -> list[Sample]:
        """The samples of one trajectory. What it raises is of this trajectory alone."""


def specs_of(tools: ToolSet) -> list[ToolSpec]:
    return [ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools.tools.values()]


@dataclass(frozen=True)
class ToolLoopSettings:
    """Settings of `agent.loop=tools`."""

    # Share of the context, data.max_prompt_tokens + rollout.max_response_tokens, beyond which the
    # policy is asked for a summary, and goes on from it in a new context; 0: never.
    compact_at: float = 0.0
    compact_prompt: str = (
        "The context is nearly full. Write down all that is needed to go on: "
        "what has been found so far, and what is left to do."
    )

    def __post_init__(self) -> None:
        check_between("compact_at", self.compact_at, 0, 1)


class ToolLoop:
    """ReAct (Yao et al. 2022, arXiv:2210.03629): the policy calls tools until it answers.

    Calls of one turn run at the same time. What is wrong with a call is told to the policy as the
    tool's answer. The reward reads the content of the last turn; it is empty where the trajectory
    was cut off before one without calls.

    A summary is a turn like others: it is trained, and counts to agent.max_turns. What follows it
    is another segment of the trajectory, whose prompt is the task and the summary, which may be cut
    off by agent.max_turn_tokens.
    """

    def __init__(self, agent: Agent, settings: ToolLoopSettings) -> None:
        self._agent, self._settings = agent, settings

    async def run(self, task: Task) -> list[Sample]:
        session = self._agent.session(task)
        async with self._agent.tools() as tools:
            status, text = await self._talk(session, task.messages, tools)
        return await self._agent.judged(task, session, status, text)

    async def _talk(
        self, session: ChatSession, asked: Sequence[ChatMessage], tools: ToolSet
    ) -> tuple[TrajectoryStatus, str]:
        specs, messages, is_full = specs_of(tools), asked, False
        for _ in range(self._agent.max_turns):
            if is_full:
                messages = [*messages, ChatMessage("user", self._settings.compact_prompt)]
            try:
                answer = await session.ask(messages, specs)
            except ContextFullError:
                return "truncated", ""
            if is_full and answer.finish_reason != "abort":
                messages, is_full = with_summary(asked, answer.parsed.content), False
                session.begin_anew()
                continue
            if answer.finish_reason != "stop":
                return "truncated", answer.parsed.content
            calls = answer.parsed.calls
            if not calls:
                return "finished", answer.parsed.content
            messages = await asyncio.gather(*(_called(tools, call) for call in calls))
            is_full = self._is_full(session, messages, specs)
        return "truncated", ""

    def _is_full(
        self, session: ChatSession, messages: Sequence[ChatMessage], specs: Sequence[ToolSpec]
    ) -> bool:
        at = self._settings.compact_at
        return at > 0 and session.num_tokens(messages, specs) > at * self._agent.max_context


def with_summary(asked: Sequence[ChatMessage], summary: str) -> list[ChatMessage]:
    """The messages of a task, the last one with a summary of what was done so far.

    In one message, since many templates have users and assistants take turns.
    """
    told = f"What was done so far:\n{summary}"
    if asked and asked[-1].role == "user":
        return [*asked[:-1], replace(asked[-1], content=f"{asked[-1].content}\n\n{told}")]
    return [*asked, ChatMessage("user", told)]


async def _called(tools: ToolSet, call: ParsedCall) -> ChatMessage:
    if call.status in ("ok", "unknown_tool"):
        text = (await tools.call(call.name, call.arguments)).text
    else:
        text = tools.refuse(f"the call is {call.status}: {call.text}").text
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
        specs, earned, state = environment.tools, list[float](), _told(messages)
        for _ in range(self._agent.max_turns):
            try:
                answer: Answer = await session.ask(messages, specs, state=state)
            except ContextFullError:
                return "truncated", earned
            step = await environment.step(answer.parsed)
            earned.append(step.reward)
            if step.is_done:
                return "finished", earned
            if answer.finish_reason == "abort":
                return "aborted", earned
            messages = step.messages
            state = _told(messages) if step.state is None else step.state
        return "truncated", earned


def _told(messages: Sequence[ChatMessage]) -> str:
    return "\n".join(message.content for message in messages)
