"""The answers that rewards find in responses, which majority votes count."""

from __future__ import annotations

import asyncio

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RewardConfig
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import get_answer_finder
from tests.unit.rewards.judging import compute_rewards, compute_rewards_with, response


@pytest.mark.parametrize(
    ("name", "settings", "text", "result"),
    [
        ("final_number", {}, "1+1=2\n#### 2", "2"),
        ("final_number", {}, "#### 2\nor 3", None),
        ("math", {}, r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("math", {}, r"\boxed{$ 1\, 000 $.}", "1000"),
        ("math", {}, r"\boxed{1.5}", "1.5"),
        ("math", {}, r"\boxed{ }", None),
        ("math", {}, "it is 2", None),
        ("choice", {}, "The answer is (B).", "B"),
        ("choice", {}, r"\boxed{\text{C}}", "C"),
        ("choice", {"letters": "AB"}, "The answer is (C).", None),
    ],
)
def test_the_answer_is_the_one_that_the_reward_reads(name, settings, text, result):
    assert get_answer_finder("reward", name, settings)(text, "stop") == result


def test_a_response_that_was_cut_off_has_no_final_number():
    assert get_answer_finder("reward", "final_number", {})("#### 2", "length") is None


@pytest.mark.parametrize(
    ("name", "settings"), [("substring", {}), ("math", {"boxed_only": False}), ("overlong", {})]
)
def test_rewards_without_one_answer_have_none(name, settings):
    assert get_answer_finder("reward", name, settings | _needed(name)) is None


def _needed(name: str) -> dict[str, object]:
    return {"buffer_tokens": 5} if name == "overlong" else {}


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"reward.terms.a.settings.no is no setting"):
        get_answer_finder("reward.terms.a", "choice", {"no": 1})


THOUGHT = "<think>\nThe answer is A? No.\n#### 7\n\\boxed{7}\n```python\nprint(7)\n```\n"
FINAL = "C or rather\n#### 8\n\\boxed{8}\n```python\nprint(8)\n```\nThe answer is C"


@pytest.mark.parametrize(
    ("name", "settings", "thought", "answer"),
    [
        ("choice", {}, "A", "C"),
        ("substring", {}, "No", "rather"),
        ("math", {"timeout_s": 60.0}, "7", "8"),
        ("final_number", {}, "7", "8"),
    ],
)
def test_thoughts_earn_nothing_and_do_not_spoil_the_answer(name, settings, thought, answer):
    final = {"choice": "C", "final_number": "#### 8"}.get(name, FINAL)
    cut_off = [f"{THOUGHT}</think>", THOUGHT]
    texts = [f"{THOUGHT}</think>\n\n{final}"] * 2 + cut_off
    samples = [response(gold) for gold in (answer, thought, thought, thought)]
    compute_rewards(RewardConfig(name, settings, num_processes=1), texts, samples)
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.0, 0.0]


def test_all_of_the_response_is_read_if_the_setting_says_so():
    texts = ["<think>The answer is A.</think>C"] * 2
    samples = [response("A"), response("C")]
    compute_rewards(RewardConfig("choice", text="response"), texts, samples)
    assert [sample.reward for sample in samples] == [1.0, 0.0]


READS = """
def words(text, fields, finish_reason, turns):
    return {"reward": len(text.split()), "all": len(turns[-1].split())}

async def batched(texts, fields, finish_reasons, turns):
    return [{"reward": len(t.split()), "all": len(u[-1].split())} for t, u in zip(texts, turns)]
"""


@pytest.mark.parametrize("function", ["words", "batched"])
def test_a_function_of_a_user_reads_the_answer_as_text_and_all_as_its_turn(function, tmp_path):
    (tmp_path / "own.py").write_text(READS)
    texts = ["<think> a b </think> c", "c", "<think> a"]
    samples = compute_rewards(RewardConfig(f"{tmp_path}/own.py:{function}"), texts)
    assert [sample.reward for sample in samples] == [1.0, 1.0, 0.0]
    assert [sample.reward_parts["all"] for sample in samples] == [5.0, 1.0, 2.0]


def read(text: str, prompt_end: str, name: str, settings=None, **agent) -> float:
    """Return the reward of a response after a prompt, whose tokens are characters."""
    sample = response("C")
    sample.prompt_ids = [*map(ord, prompt_end)]
    for field, value in agent.items():
        setattr(sample, field, value)
    config = RewardConfig(name, settings or {})

    async def run() -> None:
        manager = RewardManager(config, decode=lambda ids: "".join(map(chr, ids)))
        await compute_rewards_with(manager, [text], [sample])
        await manager.close()

    asyncio.run(run())
    return sample.reward


@pytest.mark.parametrize(
    ("text", "prompt_end", "reward"),
    [
        ("The answer is A? No.\n</think>\n\nC", "<|im_start|>assistant\n<think>\n", 1.0),
        ("The answer is C", "<|im_start|>assistant\n<think>\n", 0.0),  # cut off
        ("C", "<|im_start|>assistant\n<think>\n\n</think>\n\n", 1.0),
        ("C", "<think>?<|im_end|>\n<|im_start|>assistant\n", 1.0),
    ],
)
def test_the_prompt_may_have_opened_or_closed_the_thoughts(text, prompt_end, reward):
    assert read(text, prompt_end, "choice") == reward


@pytest.mark.parametrize(
    ("text", "last_turn", "prompt_end", "reward"),
    [
        ("C", "A?</think>C", "<think>", 1.0),  # a codec has split the turn
        ("C", "C</think>C", "<think>", 1.0),
        ("", "The answer is C", "<think>", 0.0),
        ("The answer is C", "The answer is C", "<think>", 0.0),  # none has: it was cut off
        ("<think>A?</think>C", "<think>A?</think>C", "", 1.0),
        ("C", "something else", "<think>", 1.0),  # a text of the loop
    ],
)
def test_an_agent_is_read_behind_the_thoughts_of_its_last_turn(text, last_turn, prompt_end, reward):
    turns = {"turn_texts": ["a call", last_turn], "turn_token_ids": [[1], [1]]}
    assert read(text, prompt_end, "choice", **turns) == reward


def test_a_pattern_is_that_of_the_response_with_its_thoughts():
    pattern = {"pattern": "<think>.*</think>C", "timeout_s": 20.0}
    assert read("<think>A?</think>C", "", "pattern", pattern) == 1.0
    assert read("C", "", "pattern", pattern) == 0.0
