"""Rewards of turns and tokens, set by a reward function or by a loop of a user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mcore_rl.agents.chat_template.codec import ChatMessage
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.config.schema import AgentConfig, RewardConfig
from mcore_rl.data.sample import Sample
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import RewardError
from tests.unit.agents.test_loops import TOKENIZER, TOOLS, call, run
from tests.unit.rewards.judging import compute_rewards, response

STEPS = """
def steps(text, fields, finish_reason, messages, turns):
    assert messages == [{"role": "user", "content": "How much is 6 * 7?"}], messages
    assert [turn.startswith("<tool_call>") for turn in turns] == [True, False], turns
    return {"reward": 1.0, "turn_rewards": [0.25, float(text == turns[-1] == "42") / 2]}

def too_many(text, fields, finish_reason):
    return {"reward": 1.0, "turn_rewards": [0.25] * 3}
"""


def test_a_reward_may_say_what_each_turn_has_earned(tmp_path):
    (tmp_path / "own.py").write_text(STEPS)
    judge = RewardManager(RewardConfig(f"{tmp_path}/own.py:steps"))
    [sample], _ = run([call("6 * 7"), "42"], TOOLS, reward=judge)
    first, last = (span.end - 1 for span in sample.turn_spans)
    paid = {position: reward for position, reward in enumerate(sample.process_rewards) if reward}
    assert (paid, sample.reward) == ({first: 0.25, last: 0.5}, 1.0)
    judge = RewardManager(RewardConfig(f"{tmp_path}/own.py:too_many"))
    with pytest.raises(RewardError, match="returned 3 numbers for 'turn_rewards' of 2 turns"):
        run([call("6 * 7"), "42"], TOOLS, reward=judge)


TOKENS = """
def tokens(text, fields, finish_reason, turns, turn_token_ids):
    assert len(turns) == len(turn_token_ids)
    earned = [[float(token) for token in ids] for ids in turn_token_ids]
    return {"reward": 1.0, "token_rewards": earned}

def both(text, fields, finish_reason, turns, turn_token_ids):
    found = tokens(text, fields, finish_reason, turns, turn_token_ids)
    return {**found, "turn_rewards": [0.5] * len(turns)}

def one(text, fields, finish_reason):
    return {"reward": 1.0, "token_rewards": [[0.5]]}
"""


def test_a_reward_may_say_what_each_token_has_earned(tmp_path):
    # The reward of a token is its own id, so each has to be at its token, and none at tools'.
    (tmp_path / "own.py").write_text(TOKENS)
    judge = RewardManager(RewardConfig(f"{tmp_path}/own.py:both"))
    [sample], _ = run([call("6 * 7"), "42"], TOOLS, reward=judge)
    ends = {span.end - 1 for span in sample.turn_spans}
    chosen = zip(sample.response_ids, sample.response_mask, strict=True)
    expected = [
        token * mask + 0.5 * (position in ends) for position, (token, mask) in enumerate(chosen)
    ]
    assert sample.process_rewards == expected
    judge = RewardManager(RewardConfig(f"{tmp_path}/own.py:one"))
    with pytest.raises(RewardError, match="returned 1 lists for 'token_rewards' of 2 turns"):
        run([call("6 * 7"), "42"], TOOLS, reward=judge)


def test_a_response_without_an_agent_is_one_turn_and_terms_add_up(tmp_path):
    (tmp_path / "own.py").write_text(TOKENS)
    name = f"{tmp_path}/own.py:tokens"
    terms = {"a": {"name": name, "weight": 2.0}, "b": {"name": name, "weight": -0.5}}
    sample = response(num_tokens=3)
    sample.response_ids = [4, 8, 2]
    [scored] = compute_rewards(RewardConfig(terms=terms), ["#### 7"], [sample])
    assert (scored.reward, scored.process_rewards) == (1.5, [6.0, 12.0, 3.0])
    assert scored.reward_parts == {"a": 1.0, "b": 1.0}
    reason = "returned 1 numbers for 'token_rewards' of turn 0, of 3 tokens"
    with pytest.raises(RewardError, match=reason):
        compute_rewards(
            RewardConfig(f"{tmp_path}/own.py:one"), ["#### 7"], [response(num_tokens=3)]
        )


@pytest.mark.parametrize("value", [0.5, [0.5], [["x"]], [[float("nan")]], None])
def test_token_rewards_are_lists_of_finite_numbers(value, tmp_path):
    source = f"""
from math import nan

def own(text, fields, finish_reason):
    return {{"reward": 1.0, "token_rewards": {value!r}}}
"""
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(RewardError, match="'token_rewards', which is no list of lists of numbers"):
        compute_rewards(
            RewardConfig(f"{tmp_path}/own.py:own"), ["#### 7"], [response(num_tokens=1)]
        )


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
        [sample] = await self._agent.score_samples(task, session, "finished", answer.parsed.content)
        span, length = sample.turn_spans[0], len(sample.response_ids)
        sample.cross_entropy_mask = [
            int(span.start <= position < span.end) for position in range(length)
        ]
        sample.cross_entropy_mask += self.extra
        return [sample]


class SaysTooMuch(SaysOfTokens):
    extra = (1,)


def test_a_loop_of_ones_own_says_what_tokens_earn_and_have_a_cross_entropy():
    [sample], _ = run(["40", "42"], AgentConfig(f"{__file__}:SaysOfTokens"))
    num, length = len(TOKENIZER.encode("40")) + 1, len(sample.response_ids)
    assert sample.process_rewards == [0.5, *[0.0] * (length - 1)] and sample.reward == 1
    assert sample.cross_entropy_mask == [1] * num + [0] * (length - num)
    with pytest.raises(RewardError, match=r"a cross_entropy_mask of .* it has to have 0 or 1"):
        run(["40", "42"], AgentConfig(f"{__file__}:SaysTooMuch"))
