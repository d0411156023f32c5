"""Form, choices and texts: what counts and what only looks like it."""

import asyncio
import time

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RewardConfig
from mcore_rl.data.sample import TurnSpan
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import RewardError, get_reward
from tests.unit.rewards.judging import compute_rewards, compute_rewards_with, response


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na < b\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> end", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a<answer>b</answer></think><answer>b</answer>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("<thinking>a</thinking><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(text, reward):
    assert get_reward("format")(text, {}, "stop") == {"reward": reward}


@pytest.mark.parametrize(
    ("text", "prompt_end", "reward"),
    [
        ("a</think><answer>b</answer>", "<|im_start|>assistant\n<think>\n", 1.0),
        ("\na</think>\n<answer>b</answer>", "Why <think> so?\n<think>", 1.0),
        ("<think>a</think><answer>b</answer>", "<think>\n", 0.0),  # it would be there twice
        ("a</think><answer>b</answer>", "<think>\n\n</think>\n\n", 0.0),
        ("<think>a</think><answer>b</answer>", "<think>\n\n</think>\n\n", 1.0),
        ("<answer>b</answer>", "<think>\n\n</think>\n\n", 1.0),  # thoughts are switched off
        ("b <answer>b</answer>", "<think>\n\n</think>\n\n", 0.0),
        ("<answer>b</answer>", "<think>\n", 0.0),
        ("<answer>b</answer>", "", 0.0),
        ("a</think><answer>b</answer>", "", 0.0),
        ("b</answer>", "<answer>", 0.0),
    ],
)
def test_a_tag_that_the_prompt_opens_is_of_the_format(text, prompt_end, reward):
    # As templates of reasoning models do; the reward is told of it by the tokens of the prompt.
    sample = response()
    sample.prompt_ids = [*range(100), *map(ord, prompt_end)]

    async def run():
        judge = RewardManager(RewardConfig("format"), decode=lambda ids: "".join(map(chr, ids)))
        await compute_rewards_with(judge, [text], [sample])

    asyncio.run(run())
    assert sample.reward == reward


def test_an_agent_has_the_format_in_its_last_turn_with_its_reasoning_or_without():
    sample = response(num_tokens=40)
    sample.turn_texts = ["<think>a</think>call", "b</think><answer>c</answer>"]
    sample.turn_token_ids = [[1] * 5, [1] * 5]
    sample.turn_spans = (TurnSpan("0", 0, 5), TurnSpan("1", 35, 40))
    sample.response_ids = [1] * 5 + [2] * 23 + [*map(ord, "<think>")] + [1] * 5

    async def run(tags):
        judge = RewardManager(
            RewardConfig("format", {"tags": tags}), decode=lambda ids: "".join(map(chr, ids))
        )
        await compute_rewards_with(judge, ["<answer>c</answer>"], [sample])

    for tags, reward in {"think,answer": 1.0, "answer": 1.0, "answer,think": 0.0}.items():
        asyncio.run(run(tags))
        assert sample.reward == reward


def test_format_has_the_tags_of_its_settings():
    reward = get_reward("format", {"tags": "plan, code"})
    assert reward("<plan>a</plan><code>b</code>", {}, "stop") == {"reward": 1.0}
    assert reward("<think>a</think><answer>b</answer>", {}, "stop") == {"reward": 0.0}


def test_pattern_has_to_match_the_whole_response_in_time():
    # (a|aa)+ tries every way to split the letters, more than there are atoms.
    settings = {"pattern": r"(a|aa)+b.*", "timeout_s": 2.0}
    texts = ["aab\nand more", "so aab", "a" * 400]
    started = time.monotonic()
    samples = compute_rewards(RewardConfig("pattern", settings), texts)
    assert [(s.reward, s.reward_parts["unchecked"]) for s in samples] == [(1, 0), (0, 0), (0, 1)]
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("text", "reward", "answered"),
    [
        (r"so \boxed{B}", 1.0, 1.0),
        (r"so \boxed{\text{(B)}}", 1.0, 1.0),
        (r"\boxed{10B}", 0.0, 0.0),
        (r"\boxed{B} or rather \boxed{C}", 0.0, 1.0),
        (r"The answer is B, hence \boxed{C}", 0.0, 1.0),
        (r"\boxed {B}", 1.0, 1.0),
        (r"\fbox{B}", 1.0, 1.0),
        (r"\boxed{\textbf{(B)}\ 7}", 1.0, 1.0),
        (r"\boxed{$B$}", 1.0, 1.0),
        (r"\boxed{B\text{ is right}}", 1.0, 1.0),
        (r"\boxed{B\text{erlin}}", 0.0, 0.0),
        ("Answer: $B$", 1.0, 1.0),
        (r"Answer: \(B\)", 1.0, 1.0),
        (r"The answer is $\mathrm{(B)}$.", 1.0, 1.0),
        (r"**Answer:** \text{B}", 1.0, 1.0),
        ("$B$", 1.0, 1.0),
        ("Answer: $BC$", 0.0, 0.0),
        ("The answer is (B).", 1.0, 1.0),
        ("Answer: **B**", 1.0, 1.0),
        ("**Answer:** B", 1.0, 1.0),
        ("The answer is A. No, the answer is B", 1.0, 1.0),
        ("The answer is Berlin", 0.0, 0.0),
        ("The answer is not B", 0.0, 0.0),
        ("B", 1.0, 1.0),
        ("(B)\n", 1.0, 1.0),
        ("B is wrong", 0.0, 0.0),
        ("A", 0.0, 1.0),
        ("E", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_choice(text, reward, answered):
    result = get_reward("choice")(text, {"answer": "(b)"}, "stop")
    assert result == {"reward": reward, "answered": answered}


@pytest.mark.parametrize(
    "text",
    ["answer" + "*" * 2000, r"\boxed{" + r"\text{" * 10**5 + "\n" + "}" * (10**5 + 1)],
)
def test_a_choice_among_many_marks_does_not_keep_the_server_waiting(text):
    # Each takes minutes where each way to share the marks out is tried.
    started = time.monotonic()
    result = get_reward("choice")(text, {"answer": "B"}, "stop")
    assert result == {"reward": 0.0, "answered": 0.0}
    assert time.monotonic() - started < 20


def test_choice_needs_an_answer_that_is_one_of_the_letters():
    assert get_reward("choice", {"letters": "ABCDE"})("E", {"answer": "E"}, "stop")["reward"] == 1
    with pytest.raises(
        RewardError, match=r"data.answer_column has '7'; allowed with .* A, B, C, D"
    ):
        compute_rewards(RewardConfig("choice"), ["A"])


@pytest.mark.parametrize(
    ("text", "settings", "reward"),
    [
        ("It is New\nYork.", {}, 1.0),
        ("it is new york", {}, 1.0),
        ("it is new york", {"ignore_case": False}, 0.0),
        ("New Yorkers", {}, 0.0),
        ("New Yorkers", {"whole_words": False}, 1.0),
        ("York, New", {}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_substring(text, settings, reward):
    result = get_reward("substring", settings)(text, {"answer": "New  York"}, "stop")
    assert result == {"reward": reward}


def test_a_number_is_not_in_a_longer_one():
    reward = get_reward("substring")
    assert reward("it is 123", {"answer": "12"}, "stop") == {"reward": 0.0}
    assert reward("it is (12)", {"answer": "12"}, "stop") == {"reward": 1.0}
    with pytest.raises(ConfigError, match=r"data.answer_column has ' '"):
        reward("it is 123", {"answer": " "}, "stop")
    assert reward("it costs a+b.", {"answer": "a+b"}, "stop") == {"reward": 1.0}
