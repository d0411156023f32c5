"""What turns and tokens have earned, as a reward says it."""

from __future__ import annotations

import pytest

from mcore_rl.config.schema import RewardConfig
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import RewardError
from tests.unit.agents.test_loops import TOOLS, call, run
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
    paid = {at: reward for at, reward in enumerate(sample.process_rewards) if reward}
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
    """Here: its own id, so that each is at its token, and nothing at tokens of tools."""
    (tmp_path / "own.py").write_text(TOKENS)
    judge = RewardManager(RewardConfig(f"{tmp_path}/own.py:both"))
    [sample], _ = run([call("6 * 7"), "42"], TOOLS, reward=judge)
    ends = {span.end - 1 for span in sample.turn_spans}
    chosen = zip(sample.response_ids, sample.response_mask, strict=True)
    expected = [token * mask + 0.5 * (at in ends) for at, (token, mask) in enumerate(chosen)]
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
    [found] = compute_rewards(RewardConfig(terms=terms), ["#### 7"], [sample])
    assert (found.reward, found.process_rewards) == (1.5, [6.0, 12.0, 3.0])
    assert found.reward_parts == {"a": 1.0, "b": 1.0}
    told = "returned 1 numbers for 'token_rewards' of turn 0, of 3 tokens"
    with pytest.raises(RewardError, match=told):
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
