import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.rewards import base
from mcore_rl.rewards.base import Judge, RewardError, get_reward


@pytest.mark.parametrize(
    ("text", "reward", "format_"),
    [
        ("#### 12", 1.0, 1.0),
        ("5+7=12\n#### 12", 1.0, 1.0),
        ("#### 3\n#### 12", 1.0, 1.0),  # the last line counts
        ("#### 3", 0.0, 1.0),
        ("#### 012", 0.0, 1.0),
        ("#### 12\n#### 3", 0.0, 1.0),
        ("12", 0.0, 0.0),
        ("so #### 12", 0.0, 0.0),
        ("#### 12.", 0.0, 0.0),
        ("#### 12 ", 0.0, 0.0),
        ("#### 12\n", 0.0, 0.0),
        ("#### -12", 0.0, 0.0),
        ("#### ١٢", 0.0, 0.0),  # digits, but not these digits
        ("", 0.0, 0.0),
    ],
)
def test_final_number_reads_exactly_the_last_line(text, reward, format_):
    parts = get_reward("final_number")(text, {"answer": "12"}, "stop")
    assert parts == {"reward": reward, "format": format_}


def test_a_response_that_was_cut_off_earns_nothing():
    parts = get_reward("final_number")("#### 12", {"answer": "12"}, "length")
    assert parts == {"reward": 0.0, "format": 0.0}


def test_a_missing_answer_names_the_column_setting():
    with pytest.raises(ConfigError, match=r"data\.answer_column.*sample has source"):
        get_reward("final_number")("#### 12", {"source": "x"}, "stop")


def test_an_unknown_reward_names_the_setting_and_what_is_allowed():
    with pytest.raises(ConfigError, match=r"reward\.name='nope'.*allowed: final_number"):
        get_reward("nope")


def judge(monkeypatch, *answers):
    left = iter(answers)

    def given(text, fields, finish_reason):
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(base._REWARDS._functions, "for_tests", given)
    ask = Judge("for_tests")
    return [ask("so #### 12" * 100, {"answer": "7"}, "stop", "row 3 of the data") for _ in answers]


def test_numbers_of_any_kind_come_back_as_floats(monkeypatch):
    [found] = judge(monkeypatch, {"reward": np.float32(0.5), "right": True, "length": np.int64(3)})
    assert found == {"reward": 0.5, "right": 1.0, "length": 3.0}
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (0.5, "returned 0.5, which is no dict but float"),
        (None, "returned None, which is no dict but NoneType"),
        ({"score": 1.0}, "returned a dict without 'reward', with the keys ['score']"),
        ({"reward": float("nan")}, "returned nan for 'reward', which is no finite number"),
        ({"reward": 1.0, "x": -np.inf}, "returned -inf for 'x', which is no finite number"),
        ({"reward": "1.0"}, "returned '1.0' for 'reward', which is no finite number"),
        ({"reward": 1.0, 3: 2.0}, "returned the key 3, which is no text"),
        (KeyError("solution"), "raised KeyError: 'solution'"),
        (ConfigError("a field\nis missing"), "raised ConfigError: a field is missing"),
    ],
)
def test_a_wrong_answer_names_the_reward_the_row_and_what_must_come_back(monkeypatch, answer, said):
    with pytest.raises(RewardError) as raised:
        judge(monkeypatch, answer)
    line = str(raised.value)
    assert line.startswith(f"reward.name='for_tests' {said}; it must return a dict of finite")
    assert "with 'reward' and the same keys for every response." in line
    assert "about row 3 of the data, with the fields {'answer': '7'} and the response" in line
    assert "'so #### 12so" in line and len(line) < 700


def test_parts_that_come_and_go_are_refused(monkeypatch):
    with pytest.raises(
        RewardError, match=r"the keys \['reward'\], and \['reward', 'right'\] for an"
    ):
        judge(monkeypatch, {"reward": 1.0, "right": 1.0}, {"reward": 0.0})


OWN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Settings:
    per_token: float = 1.0

def words(text, fields, finish_reason, settings: Settings):
    return {"reward": settings.per_token * len(text.split())}

def text_only(text):
    return {"reward": 0.0}
"""


def test_a_reward_outside_of_the_package_has_settings_and_is_checked_alike(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    judge = Judge(f"{path}:words", {"per_token": 0.5})
    assert judge("three words here", {}, "stop", "row 0") == {"reward": 1.5}
    with pytest.raises(RewardError, match=r"own.py:words' returned nan for 'reward'"):
        Judge(f"{path}:words", {"per_token": float("nan")})("a", {}, "stop", "row 0")
    with pytest.raises(ConfigError, match=r"reward.settings.per_word is no setting of rew"):
        Judge(f"{path}:words", {"per_word": 0.5})
    with pytest.raises(ConfigError, match=r"takes \(text\); allowed: \(text, fields, fin"):
        Judge(f"{path}:text_only")
