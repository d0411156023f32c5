"""The loop `user`: the policy talks with a user whom a frozen model plays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.codec import ChatMessage, ContextFullError
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.agents.session import ChatSession
from mcore_rl.config.checks import check_choice
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.sample import Sample, TrajectoryStatus

READS = ("last", "conversation")
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class UserSettings:
    """`prompt` tells the model whom it plays; {NAME} is the column NAME of the row."""

    prompt: str
    model: str = "user"  # in `models`
    stop: str = "###STOP###"  # ends the conversation where the user says it
    greeting: str = "Hello! How can I help you?"  # what the user answers with the first message
    reads: str = "last"  # by the reward: the policy's last turn, or the whole conversation

    def __post_init__(self) -> None:
        check_choice("reads", self.reads, READS)
        if not self.stop:
            raise ConfigError("stop=''; allowed: a text that ends the conversation")


class UserLoop:
    """The policy answers the user until the user says `stop` or the policy has had max_turns turns.

    The user speaks first: what the row's chat ends with, where that is of the user, or what the
    model says to the greeting. It sees nothing of a system message of the row. Only the policy's
    turns are trained; the reward is that of config.reward.
    """

    def __init__(self, agent: Agent, settings: UserSettings) -> None:
        self._agent, self._settings = agent, settings

    async def run(self, task: Task) -> list[Sample]:
        policy = self._agent.session(task)
        user = self._agent.session(task, model=self._settings.model)
        talk = [m for m in task.messages if m.role in ("user", "assistant")]
        status = await self._talk(task, policy, user, talk)
        if not policy.turns:
            return []
        said = [message for message in talk if message.role == "assistant"]
        text = said[-1].content
        if self._settings.reads == "conversation":
            text = "\n\n".join(f"{message.role}: {message.content}" for message in talk)
        return await self._agent.judged(task, policy, status, text)

    async def _talk(
        self, task: Task, policy: ChatSession, user: ChatSession, talk: list[ChatMessage]
    ) -> TrajectoryStatus:
        """Adds to `talk` what both say."""
        prompt = filled(self._settings.prompt, task.fields)
        to_user = [ChatMessage("system", prompt)]
        if not talk or talk[0].role == "user":
            to_user.append(ChatMessage("user", self._settings.greeting))
        to_user += [_from_the_other_side(message) for message in talk]
        to_policy = list(task.messages)
        try:
            if not talk or talk[-1].role == "assistant":
                said, has_stopped = await self._heard(user, to_user)
                if has_stopped:
                    return "finished"
                to_user = []
                talk.append(said)
                to_policy.append(said)
            for turn in range(self._agent.max_turns):
                answer = await policy.ask(to_policy)
                talk.append(ChatMessage("assistant", answer.parsed.content))
                if answer.finish_reason == "abort":
                    return "aborted"
                if turn + 1 == self._agent.max_turns:
                    break
                to_user.append(ChatMessage("user", answer.parsed.content))
                said, has_stopped = await self._heard(user, to_user)
                if has_stopped:
                    return "finished"
                to_user = []
                talk.append(said)
                to_policy = [said]
        except ContextFullError:
            pass
        return "truncated"

    async def _heard(
        self, user: ChatSession, messages: list[ChatMessage]
    ) -> tuple[ChatMessage, bool]:
        """What the user says, and whether that ends the conversation."""
        content = (await user.ask(messages)).parsed.content
        return ChatMessage("user", content), self._settings.stop in content


def filled(template: str, fields: Mapping[str, Any]) -> str:
    """
    >>> filled('You want {item}: {"a": 1}', {"item": "tea"})
    'You want tea: {"a": 1}'
    """

    def of_row(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise ConfigError(
                f"agent.settings.prompt has {match[0]}, and the row no such column; it has "
                f"{', '.join(fields)}"
            )
        return str(fields[match[1]])

    return _FIELD.sub(of_row, template)


def _from_the_other_side(message: ChatMessage) -> ChatMessage:
    return ChatMessage("user" if message.role == "assistant" else "assistant", message.content)
