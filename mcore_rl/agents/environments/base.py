"""The contract of an environment that the policy acts in by its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """The result of a turn."""

    messages: tuple[ChatMessage, ...] = ()  # shown to the policy, unless it is done
    reward: float = 0.0
    is_done: bool = False
    # Name of the next state, for advantages that compare turns in the same state; None: the
    # contents of `messages`.
    state: str | None = None


class Environment(Protocol):
    """The environment of one trajectory; made with the fields of its row and any settings.

    A static method `check(settings)`, if there is one, is called before a run: it raises
    ConfigError if the environment cannot work on this machine.
    """

    tools: Sequence[ToolSpec]  # shown by the chat template; `step` gets the calls

    async def reset(self) -> Sequence[ChatMessage]:
        """Return the first messages, shown after those of the row."""

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        """Act by a turn of the policy."""

    async def close(self) -> None:
        """Clean up; called in the end, however the trajectory ends."""


class Attempts:
    """Count the attempts of a policy that tries until it is right.

    A right attempt earns 1 - penalty * (attempts before it), at least 0.
    """

    def __init__(self, penalty: float) -> None:
        self._penalty, self._num_wrong = penalty, 0

    def record(self, feedback: str) -> EnvironmentStep:
        """Return the step of an attempt; `feedback` is empty if it is right."""
        if not feedback:
            reward = max(1.0 - self._penalty * self._num_wrong, 0.0)
            return EnvironmentStep(reward=reward, is_done=True)
        self._num_wrong += 1
        state = f"{self._num_wrong} {feedback}"  # the reward depends on both
        return EnvironmentStep((ChatMessage("user", feedback),), state=state)


def format_feedback(problem: str) -> str:
    """Return the message for an attempt with a problem; empty if there is none."""
    return f"{problem} Try again." if problem else ""
