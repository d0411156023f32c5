"""Agent loops: the contract for loops of users, and the loops `tools`, `environment` and `user`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mcore_rl.agents.chat_template.codec import (
    ChatMessage,
    ContextFullError,
    ParsedCall,
    ToolSpec,
)
from mcore_rl.agents.environments.base import Environment
from mcore_rl.agents.session import ChatSession
from mcore_rl.agents.tools.base import ToolSet
from mcore_rl.config.checks import check_between, check_choice
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.sample import Sample, TrajectoryStatus
from mcore_rl.data.thoughts import find_answer
from mcore_rl.inference.protocol import SamplingParams

READS = ("last", "conversation")
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Task:
    """A trajectory to generate."""

    messages: tuple[ChatMessage, ...]  # the chat of the prompt column
    fields: Mapping[str, Any]  # the other columns of the data source
    group_id: int
    trajectory: int  # number in the group
    row: int  # of the data source
    sampling: SamplingParams  # of each turn; the seed is that of the first
    max_tokens: int  # of the response


@dataclass(slots=True)
class ApiSession:
    """A conversation of a program with the policy over HTTP (docs/endpoint.md).

    The program's requests set the fields below `session`; they are final once it has ended.
    """

    base_url: str  # for clients of OpenAI's API: ends with /v1
    api_key: str = field(repr=False)
    session: ChatSession  # records the turns
    text: str = ""  # content of the last answer, read by rewards
    reward: float | None = None  # posted by the program
    turn_rewards: tuple[float, ...] = ()  # posted: one per turn, or none
    token_rewards: tuple[Sequence[float], ...] = ()  # posted: one list per turn, or none
    status: TrajectoryStatus | None = None  # posted
    is_limited: bool = False  # a limit of the trajectory refused a request
    roles: list[ApiSession] = field(default_factory=list)  # opened by the program

    @property
    def is_cut_off(self) -> bool:
        """True if a limit ended the session: it refused a request, or cut off the last answer."""
        turns = self.session.turns
        return self.is_limited or bool(turns and turns[-1].finish_reason == "length")


class Agent(Protocol):
    """Everything that a loop may use."""

    max_turns: int
    max_context: int  # tokens of a conversation

    def session(self, task: Task, *, model: str = "", role: str = "") -> ChatSession:
        """Begin a conversation with the policy, or with one of `models`. A loop may have several.

        Sessions with the policy without a role are one trajectory with one reward. A session with a
        role is a trajectory of its own, compared with those of the same prompt and role.
        """

    def restart(self, task: Task) -> None:
        """Forget the sessions of a trajectory; the next ones get their seeds, and all of its time.

        None of them may be in use.
        """

    def tools(self) -> AbstractAsyncContextManager[ToolSet]:
        """Set up agent.tools for one trajectory; close them at the end."""

    def environment(self, task: Task) -> AbstractAsyncContextManager[Environment]:
        """Make the agent.environment of one trajectory; close it at the end."""

    def open_api_session(self, task: Task) -> AbstractAsyncContextManager[ApiSession]:
        """Open a session with the policy for a client of OpenAI's API, with a key of its own.

        The client's requests become turns of `ApiSession.session`, for `score_samples` or
        `build_samples`. The key ends with the block. If the server failed meanwhile, the block ends
        with a GenerationError.
        """

    async def score_samples(
        self,
        task: Task,
        session: ChatSession,
        status: TrajectoryStatus,
        text: str,
        helpers: Sequence[ChatSession] = (),
    ) -> list[Sample]:
        """Build the samples of a session, with the reward that config.reward computes for `text`.

        Args:
            helpers: More sessions with the policy. Their samples come first and get the same
                reward.
        """

    def build_samples(
        self,
        task: Task,
        session: ChatSession,
        status: TrajectoryStatus,
        reward: float,
        turn_rewards: Sequence[float] = (),
        token_rewards: Sequence[Sequence[float]] = (),
    ) -> list[Sample]:
        """Build the samples of a session with a reward.

        Args:
            turn_rewards: Share of the reward that each turn earned, or empty. The last turn gets
                what they leave.
            token_rewards: The same per token of each turn.
        """


class AgentLoop(Protocol):
    """A loop, made once per server; `run` is called for many trajectories at the same time."""

    async def run(self, task: Task) -> list[Sample]:
        """Return the samples of one trajectory. An exception fails this trajectory only."""


@dataclass(frozen=True)
class ToolLoopSettings:
    """Settings of `agent.loop=tools`."""

    # Share of the context, data.max_prompt_tokens + rollout.max_response_tokens, beyond which the
    # policy is asked for a summary, and continues from it in a new context; 0: never.
    compact_at: float = 0.0
    compact_prompt: str = (
        "The context is nearly full. Write down all that is needed to go on: "
        "what has been found so far, and what is left to do."
    )

    def __post_init__(self) -> None:
        check_between("compact_at", self.compact_at, 0, 1)


class ToolLoop:
    """ReAct (Yao et al. 2022, arXiv:2210.03629): the policy calls tools until it answers.

    Calls of one turn run at the same time. An invalid call is answered with an error message. The
    reward reads the content of the last turn; it is empty if the trajectory was cut off before a
    turn without calls.

    A summary is a turn like others: it is trained, and counts to agent.max_turns. The turns after
    it are another segment of the trajectory, whose prompt is the task and the summary.
    agent.max_turn_tokens may cut it off.
    """

    def __init__(self, agent: Agent, settings: ToolLoopSettings) -> None:
        self._agent, self._settings = agent, settings

    async def run(self, task: Task) -> list[Sample]:
        """Return the samples of one trajectory."""
        session = self._agent.session(task)
        async with self._agent.tools() as tools:
            status, text = await self._generate(session, task.messages, tools)
        return await self._agent.score_samples(task, session, status, text)

    async def _generate(
        self, session: ChatSession, prompt: Sequence[ChatMessage], tools: ToolSet
    ) -> tuple[TrajectoryStatus, str]:
        """Return how the trajectory ended, and the content of its last turn."""
        specs, messages, is_full = list_tool_specs(tools), prompt, False
        for _ in range(self._agent.max_turns):
            if is_full:
                messages = [*messages, ChatMessage("user", self._settings.compact_prompt)]
            try:
                answer = await session.ask(messages, specs)
            except ContextFullError:
                return "truncated", ""
            if is_full and answer.finish_reason != "abort":
                messages, is_full = add_summary(prompt, answer.parsed.content), False
                session.clear_context()
                continue
            if answer.finish_reason != "stop":
                return "truncated", answer.parsed.content
            calls = answer.parsed.calls
            if not calls:
                return "finished", answer.parsed.content
            messages = await asyncio.gather(*(_call_tool(tools, call) for call in calls))
            is_full = self._is_full(session, messages, specs)
        return "truncated", ""

    def _is_full(
        self, session: ChatSession, messages: Sequence[ChatMessage], specs: Sequence[ToolSpec]
    ) -> bool:
        share = self._settings.compact_at
        max_tokens = share * self._agent.max_context
        return share > 0 and session.count_prompt_tokens(messages, specs) > max_tokens


def list_tool_specs(tools: ToolSet) -> list[ToolSpec]:
    """Return the specs of tools, as codecs render them."""
    return [ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools.tools.values()]


def add_summary(prompt: Sequence[ChatMessage], summary: str) -> list[ChatMessage]:
    """Add a summary of earlier turns to the last message of a prompt.

    In one message, since many templates have users and assistants take turns.
    """
    text = f"What was done so far:\n{summary}"
    if prompt and prompt[-1].role == "user":
        return [*prompt[:-1], replace(prompt[-1], content=f"{prompt[-1].content}\n\n{text}")]
    return [*prompt, ChatMessage("user", text)]


async def _call_tool(tools: ToolSet, call: ParsedCall) -> ChatMessage:
    if call.status in ("ok", "unknown_tool"):
        answer = await tools.call(call.name, call.arguments)
    else:
        answer = tools.refuse(f"the call is {call.status}: {call.text}")
    return ChatMessage(
        "tool", answer.text, tool_call_id=call.id, name=call.name, images=answer.images
    )


class EnvironmentLoop:
    """The policy acts by its turns, and an environment answers until it is done.

    The reward is the sum of the rewards of all steps, each earned by its turn. A turn that
    agent.max_turn_tokens cuts off is a turn like others; a trajectory that is cut off keeps the
    rewards of its steps.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        """Return the samples of one trajectory."""
        session = self._agent.session(task)
        async with self._agent.environment(task) as environment:
            status, rewards = await self._generate(session, environment, task)
        return self._agent.build_samples(task, session, status, sum(rewards, 0.0), rewards)

    async def _generate(
        self, session: ChatSession, environment: Environment, task: Task
    ) -> tuple[TrajectoryStatus, list[float]]:
        """Return how the trajectory ended, and the reward of each turn."""
        messages: Sequence[ChatMessage] = [*task.messages, *await environment.reset()]
        specs, rewards, state = environment.tools, list[float](), _join_contents(messages)
        for _ in range(self._agent.max_turns):
            try:
                answer = await session.ask(messages, specs, state=state)
            except ContextFullError:
                return "truncated", rewards
            step = await environment.step(answer.parsed)
            rewards.append(step.reward)
            if step.is_done:
                return "finished", rewards
            if answer.finish_reason == "abort":
                return "aborted", rewards
            messages = step.messages
            state = _join_contents(messages) if step.state is None else step.state
        return "truncated", rewards


def _join_contents(messages: Sequence[ChatMessage]) -> str:
    return "\n".join(message.content for message in messages)


@dataclass(frozen=True)
class UserSettings:
    """Settings of `agent.loop=user`. In `prompt`, {NAME} is the column NAME of the row."""

    prompt: str  # system message of the model: whom it plays
    model: str = "user"  # in `models`
    stop: str = "###STOP###"  # in the user's text: ends the conversation
    greeting: str = "Hello! How can I help you?"  # answered by the user's first message
    reads: str = "last"  # read by the reward: the policy's last turn, or the whole conversation

    def __post_init__(self) -> None:
        check_choice("reads", self.reads, READS)
        if not self.stop:
            raise ConfigError("stop=''; allowed: a text that ends the conversation")


class UserLoop:
    """The policy talks with a user whom a frozen model plays.

    It ends when the user says `stop`, or after max_turns turns of the policy. The user speaks
    first: with the last message of the row's chat if that is a user's, else the model answers the
    greeting. The model does not see system messages of the row. Only the policy's turns are
    trained; the reward is that of config.reward.
    """

    def __init__(self, agent: Agent, settings: UserSettings) -> None:
        self._agent, self._settings = agent, settings

    async def run(self, task: Task) -> list[Sample]:
        """Return the samples of one trajectory; none if the user stopped before the first turn."""
        policy = self._agent.session(task)
        user = self._agent.session(task, model=self._settings.model)
        conversation = [m for m in task.messages if m.role in ("user", "assistant")]
        status = await self._generate(task, policy, user, conversation)
        if not policy.turns:
            return []
        text = [message for message in conversation if message.role == "assistant"][-1].content
        if self._settings.reads == "conversation":
            text = "\n\n".join(f"{m.role}: {find_answer(m.content)}" for m in conversation)
        return await self._agent.score_samples(task, policy, status, text)

    async def _generate(
        self, task: Task, policy: ChatSession, user: ChatSession, conversation: list[ChatMessage]
    ) -> TrajectoryStatus:
        """Append the messages of both sides to `conversation`."""
        to_user = [ChatMessage("system", fill_template(self._settings.prompt, task.fields))]
        if not conversation or conversation[0].role == "user":
            to_user.append(ChatMessage("user", self._settings.greeting))
        to_user += [_swap_role(message) for message in conversation]
        to_policy = list(task.messages)
        try:
            if not conversation or conversation[-1].role == "assistant":
                message, has_stopped = await self._ask_user(user, to_user)
                if has_stopped:
                    return "finished"
                to_user = []
                conversation.append(message)
                to_policy.append(message)
            for turn in range(self._agent.max_turns):
                answer = await policy.ask(to_policy)
                conversation.append(ChatMessage("assistant", answer.parsed.content))
                if answer.finish_reason == "abort":
                    return "aborted"
                if turn + 1 == self._agent.max_turns:
                    break
                to_user.append(ChatMessage("user", answer.parsed.content))
                message, has_stopped = await self._ask_user(user, to_user)
                if has_stopped:
                    return "finished"
                to_user = []
                conversation.append(message)
                to_policy = [message]
        except ContextFullError:
            pass
        return "truncated"

    async def _ask_user(
        self, user: ChatSession, messages: list[ChatMessage]
    ) -> tuple[ChatMessage, bool]:
        """Return the user's message, and whether it ends the conversation."""
        content = (await user.ask(messages)).parsed.content
        return ChatMessage("user", content), self._settings.stop in content


def fill_template(template: str, fields: Mapping[str, Any]) -> str:
    """Replace each {NAME} by the column NAME of a row.

    >>> fill_template('You want {item}: {"a": 1}', {"item": "tea"})
    'You want tea: {"a": 1}'

    Raises:
        ConfigError: The row has no such column.
    """

    def look_up(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise ConfigError(
                f"agent.settings.prompt has {match[0]}, and the row no such column; it has "
                f"{', '.join(fields)}"
            )
        return str(fields[match[1]])

    return _FIELD.sub(look_up, template)


def _swap_role(message: ChatMessage) -> ChatMessage:
    return ChatMessage("user" if message.role == "assistant" else "assistant", message.content)
