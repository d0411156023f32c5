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
from mcore_rl.data.sample import Sample

_WHOLE = re.compile(r"\d+")


@dataclass(frozen=True)
class HideAndGuessSettings:
    high: int = 100  # numbers are from 1 to this
    num_guesses: int = 4

    def __post_init__(self) -> None:
        check_at_least("high", self.high, 2)
        check_at_least("num_guesses", self.num_guesses, 1)


class HideAndGuess:
    """The hider names a number once; the guesser is told whether each guess is too low or too high.

    A guesser that finds it in time earns 1 and its hider 0, else 0 and 1. A hider that names no
    number in the range earns 0, and nobody guesses.
    """

    def __init__(self, agent: Agent, settings: HideAndGuessSettings) -> None:
        self._agent, self._settings = agent, settings

    async def run(self, task: Task) -> list[Sample]:
        hider = self._agent.session(task, role="hider")
        number = _number(await hider.ask(self._told(task, "Name a number that is hard to guess.")))
        if number is None or not 1 <= number <= self._settings.high:
            return self._agent.build_samples(task, hider, "finished", 0.0)
        guesser = self._agent.session(task, role="guesser")
        is_found = await self._guesses(task, guesser, number)
        return [
            *self._agent.build_samples(task, hider, "finished", float(not is_found)),
            *self._agent.build_samples(task, guesser, "finished", float(is_found)),
        ]

    async def _guesses(self, task: Task, guesser: ChatSession, number: int) -> bool:
        messages = self._told(task, "Guess the number.")
        for _ in range(self._settings.num_guesses):
            try:
                guess = _number(await guesser.ask(messages))
            except ContextFullError:
                return False
            if guess == number:
                return True
            if guess is None:
                said = "That is no number."
            else:
                said = f"{guess} is too {'low' if guess < number else 'high'}."
            messages = [ChatMessage("user", said)]
        return False

    def _told(self, task: Task, what: str) -> list[ChatMessage]:
        rules = f"Numbers are from 1 to {self._settings.high}. {what} Answer with a number."
        system = [message for message in task.messages if message.role == "system"]
        return [*system, ChatMessage("user", rules)]


def _number(answer: Answer) -> int | None:
    """The last whole number in what was said."""
    found = _WHOLE.findall(answer.parsed.content)
    return int(found[-1][:9]) if found else None
