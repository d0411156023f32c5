"""Self-play: the policy hides a number, and guesses those that it has hidden; both are trained.

    mcore-rl rl ... agent.loop=examples/self_play.py:HideAndGuess agent.settings.num_guesses=4

The two roles are sessions of one policy. Each is a group of its own among the responses to a
prompt: a hider is compared with hiders. Their rewards are opposite.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mcore_rl.agents.chat_template.codec import ChatMessage, ContextFullError
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.agents.session import Answer, ChatSession
from mcore_rl.config.checks import check_at_least
from mcore_rl.data.sample import Sample, TrajectoryStatus

_INTEGER = re.compile(r"\d+")


@dataclass(frozen=True)
class HideAndGuessSettings:
    high: int = 100  # numbers are from 1 to this
    num_guesses: int = 4

    def __post_init__(self) -> None:
        check_at_least("high", self.high, 2)
        check_at_least("num_guesses", self.num_guesses, 1)


class HideAndGuess:
    """The hider names a number; the guesser learns whether each guess is too low or too high.

    A guesser that finds it in time earns 1 and its hider 0, else 0 and 1. A hider that names no
    number in the range earns 0, and nobody guesses.
    """

    def __init__(self, agent: Agent, settings: HideAndGuessSettings) -> None:
        self._agent, self._settings = agent, settings

    async def run(self, task: Task) -> list[Sample]:
        """Play one game; return the samples of both roles."""
        hider = self._agent.session(task, role="hider")
        number = _read_number(
            await hider.ask(self._build_messages(task, "Name a number that is hard to guess."))
        )
        if number is None or not 1 <= number <= self._settings.high:
            return self._agent.build_samples(task, hider, "finished", 0.0)
        guesser = self._agent.session(task, role="guesser")
        is_right, status = await self._play(task, guesser, number)
        return [
            *self._agent.build_samples(task, hider, "finished", float(not is_right)),
            *self._agent.build_samples(task, guesser, status, float(is_right)),
        ]

    async def _play(
        self, task: Task, guesser: ChatSession, number: int
    ) -> tuple[bool, TrajectoryStatus]:
        """Return whether the guesser names the number in time, and how its trajectory ended."""
        messages = self._build_messages(task, "Guess the number.")
        for _ in range(self._settings.num_guesses):
            try:
                guess = _read_number(await guesser.ask(messages))
            except ContextFullError:
                return False, "truncated"
            if guess == number:
                return True, "finished"
            if guess is None:
                feedback = "That is no number."
            else:
                feedback = f"{guess} is too {'low' if guess < number else 'high'}."
            messages = [ChatMessage("user", feedback)]
        return False, "finished"

    def _build_messages(self, task: Task, request: str) -> list[ChatMessage]:
        rules = f"Numbers are from 1 to {self._settings.high}. {request} Answer with a number."
        system = [message for message in task.messages if message.role == "system"]
        return [*system, ChatMessage("user", rules)]


def _read_number(answer: Answer) -> int | None:
    """Return the last whole number of an answer; None without one."""
    numbers = _INTEGER.findall(answer.parsed.content)
    return int(numbers[-1][:9]) if numbers else None
