"""The contract of an environment that the policy acts in by its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """What came of a turn."""

    messages: tuple[ChatMessage, ...] = ()  # what the policy is told, unless it is done
    reward: float = 0.0
    is_done: bool = False
    # A name of the state that it leads to, for advantages that compare turns in the same state;
    # None: what the policy is told.
    state: str | None = None


class Tries:
    """Of a policy that tries until it is right.

    A right try earns 1 - penalty * (tries before it), at least 0.
    """

    def __init__(self, penalty: float) -> None:
        self._penalty, self._wrong = penalty, 0

    def step(self, told: str) -> EnvironmentStep:
        """`told`: what the policy hears of a wrong try; empty for a right one."""
        if not told:
            return EnvironmentStep(reward=max(1.0 - self._penalty * self._wrong, 0.0), is_done=True)
        self._wrong += 1
        state = f"{self._wrong} {told}"  # the reward depends on both
        return EnvironmentStep((ChatMessage("user", told),), state=state)


def try_again(problem: str) -> str:
    """What the policy is told of a problem with its try."""
    return f"{problem} Try again." if problem else ""


class Environment(Protocol):
    """One trajectory's; made with the fields of its row and, where it has any, its settings.

    A static method `check(settings)`, if there is one, is called before a run: it raises
    ConfigError where the environment cannot work on this machine.
    """

    tools: Sequence[ToolSpec]  # that the chat template shows; calls are the environment's to answer

    async def reset(self) -> Sequence[ChatMessage]:
        """What the policy is told first, after the messages of the row."""

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        """What a turn of the policy leads to."""

    async def close(self) -> None:
        """Called in the end, however the trajectory ends."""
