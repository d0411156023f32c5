import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.rewards.base import get_reward


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
    with pytest.raises(
        ConfigError, match=r"reward\.name='nope'.*allowed: choice, code, cosine, final_n"
    ):
        get_reward("nope")
