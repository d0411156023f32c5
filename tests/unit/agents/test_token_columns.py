"""What a loop of one's own says of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.agents.codec import ChatMessage
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample
from mcore_rl.rewards.base import RewardError
from tests.unit.agents.test_loops import TOKENIZER, run

HERE = Path(__file__)


class SaysOfTokens:
    """Cross entropy on the first turn, half of whose reward is at its first token."""

    extra: Sequence[int] = ()

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        session = self._agent.session(task)
        await session.ask(task.messages)
        answer = await session.ask([ChatMessage("user", "Again.")])
        first = session.turns[0]
        earned = (0.5, *[0.0] * (len(first.token_ids) - 1))
        session.turns[0] = replace(first, token_rewards=earned)
        [sample] = await self._agent.judged(task, session, "finished", answer.parsed.content)
        span, length = sample.turn_spans[0], len(sample.response_ids)
        sample.cross_entropy_mask = [int(span.start <= at < span.end) for at in range(length)]
        sample.cross_entropy_mask += self.extra
        return [sample]


class SaysTooMuch(SaysOfTokens):
    extra = (1,)


def test_a_loop_of_ones_own_says_what_tokens_earn_and_have_a_cross_entropy():
    [sample], _ = run(["40", "42"], AgentConfig(f"{HERE}:SaysOfTokens"))
    num, length = len(TOKENIZER.encode("40")) + 1, len(sample.response_ids)
    assert sample.process_rewards == [0.5, *[0.0] * (length - 1)] and sample.reward == 1
    assert sample.cross_entropy_mask == [1] * num + [0] * (length - num)
    with pytest.raises(RewardError, match=r"a cross_entropy_mask of .* it has to have 0 or 1"):
        run(["40", "42"], AgentConfig(f"{HERE}:SaysTooMuch"))
