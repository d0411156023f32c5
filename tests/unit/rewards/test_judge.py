"""Several rewards with weights, functions of every kind, limits on time, and what errors do."""

import re

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RewardConfig
from mcore_rl.rewards import registry
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import RewardError
from tests.unit.rewards.judging import compute_rewards, response

USER_FILE = """
import asyncio
import math
import time
from dataclasses import dataclass

from mcore_rl.rewards.registry import run_in_process, run_in_thread

@dataclass(frozen=True)
class Settings:
    per_token: float = 1.0

def words(text, fields, finish_reason, settings: Settings):
    return {"reward": settings.per_token * len(text.split())}

def text_only(text):
    return len(text)

def text_and_fields(text, fields):
    return float(len(text))

def batched_texts(texts):
    return [len(text) for text in texts]

def takes_nothing():
    return 0.0

together = []

async def meets(text, fields, finish_reason, num_tokens):
    together.append(text)
    while len(together) < 3:
        await asyncio.sleep(0)
    return {"reward": num_tokens, "letters": len(text)}

def batched(texts, fields, finish_reasons, num_tokens, max_tokens):
    mean = sum(num_tokens) / len(texts)
    return [{"reward": (n - mean) / max_tokens} for n in num_tokens]

async def batched_later(texts, fields, finish_reasons, rewards):
    await asyncio.sleep(0)
    return [{"reward": len(texts) * part["words"]} for part in rewards]

def raises_or_sleeps(text, fields, finish_reason):
    if text == "raises":
        raise KeyError("solution")
    if text == "stops":
        next(iter(()))
    if text == "exits":
        raise SystemExit(3)
    if text == "sleeps":
        time.sleep(20)
    if text == "prints":
        print("no answer")
    return {"reward": math.nan if text == "nan" else 2.0, "length": len(text)}

async def waits(text, fields, finish_reason):
    if text == "times out":
        raise TimeoutError
    await asyncio.sleep(20)

@run_in_process()
def apart(text, fields, finish_reason):
    return raises_or_sleeps(text, fields, finish_reason)

@run_in_thread
def in_a_thread(text, fields, finish_reason):
    return raises_or_sleeps(text, fields, finish_reason)

def too_few(texts, fields, finish_reasons):
    return [{"reward": 1.0}]

def fails(texts, fields, finish_reasons):
    raise ValueError("no server")

def some_fail(texts, fields, finish_reasons):
    return [KeyError(text) if text == "raises" else {"reward": 2.0} for text in texts]
"""


@pytest.fixture
def user_path(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    return "own.py:{}".format


def judge(monkeypatch, *answers):
    left = iter(answers)

    def given(text, fields, finish_reason):
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(registry._REWARDS._functions, "for_tests", given)
    return compute_rewards(RewardConfig("for_tests"), ["so #### 12" * 100 for _ in answers])


def test_numbers_of_any_kind_come_back_as_floats(monkeypatch):
    [sample] = judge(monkeypatch, {"reward": np.float32(0.5), "right": True, "length": np.int64(3)})
    assert (sample.reward, sample.reward_parts) == (0.5, {"right": 1.0, "length": 3.0})
    assert {type(value) for value in sample.reward_parts.values()} == {float}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (float("nan"), "returned nan for 'reward', which is no finite number"),
        (None, "returned None, which is no number and no dict but NoneType"),
        ("text", "returned 'text', which is no number and no dict but str"),
        ({"score": 1.0}, "returned a dict without 'reward', with the keys ['score']"),
        ({"reward": float("nan")}, "returned nan for 'reward', which is no finite number"),
        ({"reward": 1.0, "x": -np.inf}, "returned -inf for 'x', which is no finite number"),
        ({"reward": "1.0"}, "returned '1.0' for 'reward', which is no finite number"),
        (
            {"reward": 1.0, "turn_rewards": [0.5, np.nan]},
            "returned [0.5, nan] for 'turn_rewards', which is no list of finite numbers",
        ),
        ({"reward": 1.0, "turn_rewards": []}, "returned 0 numbers for 'turn_rewards' of 1 turns"),
        ({"reward": 1.0, 3: 2.0}, "returned the key 3, which is no text"),
        (KeyError("solution"), "raised KeyError: 'solution'"),
        (ConfigError("a field\nis missing"), "raised ConfigError: a field is missing"),
    ],
)
def test_a_wrong_answer_names_the_reward_the_row_and_what_must_come_back(
    monkeypatch, answer, message
):
    with pytest.raises(RewardError) as raised:
        judge(monkeypatch, answer)
    line = str(raised.value)
    line = re.sub(r" \(test_judge\.py:\d+: [^)]+\)", "", line, count=1)  # where it raised
    assert line.startswith(f"reward.name='for_tests' {message}; it must return a finite number")
    assert "with 'reward' and the same keys for every response." in line
    assert "about row 3 of the data, with the fields {'answer': '7'} and the response" in line
    assert "'so #### 12so" in line and len(line) < 700


def test_parts_that_come_and_go_are_refused(monkeypatch):
    with pytest.raises(
        RewardError, match=r"the keys \['reward'\], and \['reward', 'right'\] for an"
    ):
        judge(monkeypatch, {"reward": 1.0, "right": 1.0}, {"reward": 0.0})


def test_a_reward_outside_of_the_package_has_settings_and_is_checked_alike(user_path):
    [sample] = compute_rewards(
        RewardConfig(user_path("words"), {"per_token": 0.5}), ["three words here"]
    )
    assert (sample.reward, sample.reward_parts) == (1.5, {})
    with pytest.raises(RewardError, match=r"own.py:words' returned inf for 'reward'"):
        compute_rewards(RewardConfig(user_path("words"), {"per_token": 1e308}), ["a word"])
    with pytest.raises(ConfigError, match=r"reward.settings.per_word is no setting of rew"):
        RewardManager(RewardConfig(user_path("words"), {"per_word": 0.5}))
    with pytest.raises(
        ConfigError, match=r"takes \(\); allowed: \(text, fields, finish_reason\) or"
    ):
        RewardManager(RewardConfig(user_path("takes_nothing")))


@pytest.mark.parametrize("name", ["text_only", "text_and_fields", "batched_texts"])
def test_a_reward_may_take_the_text_alone_and_return_a_number(user_path, name):
    [sample] = compute_rewards(RewardConfig(user_path(name)), ["seven"])
    assert (sample.reward, sample.reward_parts) == (5.0, {})


def test_async_calls_are_made_at_the_same_time(user_path):
    samples = compute_rewards(
        RewardConfig(user_path("meets")),
        ["a", "bc", "def"],
        [response(num_tokens=n) for n in (4, 5, 6)],
    )
    assert [(s.reward, s.reward_parts) for s in samples] == [
        (4.0, {"letters": 1.0}),
        (5.0, {"letters": 2.0}),
        (6.0, {"letters": 3.0}),
    ]


def test_a_weighted_sum_has_its_terms_and_their_parts_as_metrics(user_path):
    # By hand: 2 * words - 0.5 * right + 0 * batched_later; math of 7 and 8 against 7.
    terms = {
        "words": {"name": user_path("words"), "weight": 2.0, "settings": {"per_token": 3.0}},
        "right": {"name": "final_number", "weight": -0.5},
        "spread": {"name": user_path("batched"), "weight": 16.0},
        "later": {"name": user_path("batched_later"), "weight": 0.0},
    }
    samples = [response(num_tokens=2), response(num_tokens=6)]
    first, second = compute_rewards(
        RewardConfig(terms=terms), ["#### 7", "so it is\n#### 8"], samples
    )
    assert first.reward == pytest.approx(2.0 * 6 - 0.5 - 2)
    assert second.reward == pytest.approx(2.0 * 15 + 2)
    assert first.reward_parts == {
        "words": 6.0, "right": 1.0, "right/format": 1.0, "spread": -0.125, "later": 12.0
    }  # fmt: skip
    assert second.reward_parts == {
        "words": 15.0, "right": 0.0, "right/format": 1.0, "spread": 0.125, "later": 30.0
    }  # fmt: skip


def test_what_turns_have_earned_is_weighted_and_added_up(tmp_path):
    source = """
def half(text, fields, finish_reason, turns):
    return {"reward": 1.0, "turn_rewards": [0.5] * len(turns)}

def first(texts, fields, finish_reasons, turns):
    return [{"reward": 1.0, "turn_rewards": [1, *[0] * (len(of) - 1)]} for of in turns]
"""
    (tmp_path / "own.py").write_text(source)
    terms = {
        "half": {"name": f"{tmp_path}/own.py:half", "weight": 2.0},
        "first": {"name": f"{tmp_path}/own.py:first", "weight": -0.5},
        "right": {"name": "final_number"},
    }
    sample = response()
    sample.turn_texts, sample.turn_token_ids = ["a call", "#### 7"], [[1], [2]]
    [result] = compute_rewards(RewardConfig(terms=terms), ["#### 7"], [sample])
    assert (result.reward, result.turn_rewards) == (2.5, [0.5, 1.0])
    assert sorted(result.reward_parts) == ["first", "half", "right", "right/format"]


TEXTS = ["fine", "raises", "stops", "exits", "sleeps", "nan", "prints"]
ERRORS = [
    "",
    "raised KeyError: 'solution'",
    "raised StopIteration:",
    "raised SystemExit: 3",
    "took longer than 2 s (reward.timeout_s)",
    "returned nan for 'reward', which is no finite number",
    "",
]


@pytest.mark.parametrize("function", ["raises_or_sleeps", "apart", "in_a_thread"])
@pytest.mark.parametrize("on_error", ["drop", "zero"])
def test_an_error_marks_its_sample_and_no_other(user_path, function, on_error):
    # Whether in a thread or in a process; a call that goes on does not delay those after it.
    config = RewardConfig(user_path(function), on_error=on_error, timeout_s=2.0)
    samples = compute_rewards(config, TEXTS)
    expected = list(ERRORS)
    if function != "in_a_thread":  # it ends its process
        expected[3] = "ended its process with status 3"
    for sample, text, error in zip(samples, TEXTS, expected, strict=True):
        message = f"reward.name={user_path(function)!r} {error}".strip() if error else ""
        assert re.sub(r" \(own\.py:\d+: .*\)$", "", sample.reward_error).strip() == message
        assert ("(own.py:" in sample.reward_error) == ("raised" in error)
        assert sample.reward == (0.0 if error else 2.0)
        assert sample.reward_parts == ({} if error else {"length": len(text)})


@pytest.mark.parametrize("text", ["raises", "sleeps"])
def test_with_stop_an_error_is_raised(user_path, text):
    with pytest.raises(RewardError, match=r"raises_or_sleeps' (raised Key|took longer than 0.2 s)"):
        compute_rewards(RewardConfig(user_path("raises_or_sleeps"), timeout_s=0.2), ["fine", text])


def test_an_async_call_has_a_limit_and_may_raise_a_time_out_of_its_own(user_path):
    config = RewardConfig(user_path("waits"), on_error="zero", timeout_s=0.2)
    first, second = compute_rewards(config, ["times out", "waits"])
    assert "raised TimeoutError: (own.py:59: raise TimeoutError)" in first.reward_error
    assert second.reward_error.endswith("took longer than 0.2 s (reward.timeout_s)")


@pytest.mark.parametrize(
    ("function", "message"),
    [("too_few", "returned [{'reward': 1.0}] for 2 responses"), ("fails", "ValueError: no server")],
)
def test_an_error_of_a_batch_is_that_of_all_its_samples(user_path, function, message):
    samples = compute_rewards(RewardConfig(user_path(function), on_error="zero"), ["a", "b"])
    assert [message in sample.reward_error for sample in samples] == [True, True]


def test_a_batch_may_have_errors_in_the_place_of_results(user_path):
    samples = compute_rewards(
        RewardConfig(user_path("some_fail"), on_error="zero"), ["a", "raises", "b"]
    )
    assert [sample.reward for sample in samples] == [2.0, 0.0, 2.0]
    assert samples[1].reward_error.endswith("some_fail' raised KeyError: 'raises'")


def test_a_sample_with_an_error_is_not_evaluated_again(user_path):
    terms = {
        "first": {"name": user_path("raises_or_sleeps")},
        "words": {"name": user_path("words")},
        "later": {"name": user_path("batched_later")},
    }
    config = RewardConfig(terms=terms, on_error="zero")
    samples = compute_rewards(config, ["raises", "all is well"])
    assert samples[0].reward_error.startswith(
        "reward.terms.first.name='own.py:raises_or_sleeps' raised KeyError: 'solution' (own.py:"
    )
    assert samples[1].reward_parts["later"] == 3.0  # one response, of three words
    assert compute_rewards(config, ["raises"])[0].reward_parts == {}


WRONG = {
    "reward.terms.maths.name='maths' is unknown; allowed: choice, code, cosine,": {"maths": {}},
    "reward.terms.math.settings.digit is no setting of reward.terms.math.name='math'": {
        "math": {"settings": {"digit": 3}}
    },
    "reward.terms.math.settings.timeout_s=0.0; allowed: above 0": {
        "math": {"settings": {"timeout_s": 0}}
    },
    "reward.terms.cosine.settings.term='math' is no term before it in reward.terms; allowed: x": {
        "x": {"name": "final_number"},
        "cosine": {"settings": {"term": "math"}},
        "math": {},
    },
    "reward.terms.overlong.settings.buffer_tokens=17; allowed: 1 to 16": {
        "overlong": {"settings": {"buffer_tokens": 17}}
    },
    "reward.terms.format.settings.tags='<a>'; allowed: names with commas between them": {
        "format": {"settings": {"tags": "<a>"}}
    },
    "reward.terms.pattern.settings.pattern='(a'": {"pattern": {"settings": {"pattern": "(a"}}},
    "reward.terms.choice.settings.letters='abc'; allowed: two or more of A to Z": {
        "choice": {"settings": {"letters": "abc"}}
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_is_refused_before_a_run(message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        RewardManager(RewardConfig(terms=WRONG[message]), max_tokens=16)
