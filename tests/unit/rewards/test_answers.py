"""The answers that rewards find in responses, which majority votes count."""

from __future__ import annotations

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.rewards.registry import get_answer_finder


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
