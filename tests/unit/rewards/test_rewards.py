import re
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DataConfig, RewardConfig
from mcore_rl.data.datasets import load_prompts
from mcore_rl.examples.tasks import tiny_model
from mcore_rl.rewards.manager import build_answer_check
from mcore_rl.rewards.registry import get_reward


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
        ("#### 12 ", 1.0, 1.0),
        ("#### 12\n", 1.0, 1.0),
        ("#### 12 \r\n\n", 1.0, 1.0),
        ("#### $12", 1.0, 1.0),
        ("#### \\$12\n", 1.0, 1.0),
        ("#### \N{EURO SIGN}12", 1.0, 1.0),
        ("#### -$12", 0.0, 1.0),
        ("#### $$12", 0.0, 0.0),
        ("#### 12$", 0.0, 0.0),
        ("#### --12", 0.0, 0.0),
        ("#### -$-12", 0.0, 0.0),
        ("#### 12\n.", 0.0, 0.0),
        ("#### -12", 0.0, 1.0),
        ("#### 1,2", 0.0, 0.0),
        ("#### 12.", 0.0, 0.0),
        ("#### ١٢", 0.0, 0.0),  # digits, but not these digits
        ("", 0.0, 0.0),
    ],
)
def test_final_number_reads_exactly_the_last_line(text, reward, format_):
    parts = get_reward("final_number")(text, {"answer": "12"}, "stop")
    assert parts == {"reward": reward, "format": format_}


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("-3", "-3"),
        ("2.5", "2.5"),
        ("-3", "-$3"),
        ("-3", "$-3"),
        ("1234.50", "$1,234.50"),
        ("1,234", "1234"),
        ("1,234", "1,234"),
        ("1234567.5", "1,234,567.5"),
        (" 7 ", "7"),
        (7, "7"),
        (7.0, "7"),
        (2.5, "2.5"),
        (Decimal("7.00"), "7"),
    ],
)
def test_a_final_number_may_be_negative_or_have_decimals_and_commas(answer, number):
    parts = get_reward("final_number")(f"#### {number}", {"answer": answer}, "stop")
    assert parts == {"reward": 1.0, "format": 1.0}


UNEARNABLE = [
    ("final_number", {}, "1/2", "'1/2'; allowed with reward.name='final_number': a number such as"),
    ("final_number", {}, "#### 7", "'#### 7'; allowed with reward.name='final_number': a number"),
    ("final_number", {}, ["7"], "['7']; allowed with reward.name='final_number': text or a number"),
    ("math", {}, {"value": "7"}, "{'value': '7'}; allowed with reward.name='math': text or a num"),
    ("math", {}, " $ $ ", "' $ $ '; allowed with reward.name='math': what can be in a \\boxed{}"),
    ("math", {}, r"\frac{1}{2", "allowed with reward.name='math': what can be in a \\boxed{}"),
    ("math", {}, r"\boxed{1", "allowed with reward.name='math': what can be in a \\boxed{}"),
    ("math", {}, r"\[ . \]", "allowed with reward.name='math': what can be in a \\boxed{}"),
    ("math", {}, "\frac{1}{2}", "a backslash in place of '\\x0c', which an escape sequence"),
    ("math", {}, "so \boxed{3}", "a backslash in place of '\\x08', which an escape sequence"),
    ("math", {}, "2\times 3", "a backslash in place of '\\times', which an escape sequence"),
    ("math", {}, "\neq 3", "a backslash in place of '\\neq', which an escape sequence"),
    ("choice", {}, "7", "'7'; allowed with reward.name='choice': one of A, B, C, D"),
    ("choice", {"letters": "AB"}, "C", "'C'; allowed with reward.name='choice': one of A, B"),
    ("choice", {}, b"A", "b'A'; allowed with reward.name='choice': text or a number"),
    ("substring", {}, " ", "' '; allowed with reward.name='substring': a text"),
    ("substring", {}, ["Paris", "Lyon"], "allowed with reward.name='substring': text or a number"),
    ("code", {}, {"asserts": []}, "code needs an object"),
    ("code", {}, {"asserts": ["assert f(1 == 1"]}, "the test 'assert f(1 == 1' is no Python: "),
    (
        "code",
        {"output_kb": 1},
        {"inputs": [""], "outputs": ["x" * 1025]},
        "an expected output has 1025 bytes; allowed: up to 1024 (output_kb)",
    ),
    ("code", {}, '{"asserts": ["\\ud800"]}', "not empty, of whole characters"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_model.train_tokenizer(["user\nA or B?", "assistant\n"] * 20)


@pytest.mark.parametrize(("name", "settings", "answer", "message"), UNEARNABLE)
def test_an_answer_that_no_response_can_earn_is_refused_by_its_row(
    name, settings, answer, message, tokenizer, tmp_path
):
    (tmp_path / "rows.py").write_text(
        "def rows():\n    message = {'role': 'user', 'content': 'A or B?'}\n"
        f"    return [{{'messages': [message], 'answer': answer}} for answer in [{answer!r}]]\n"
    )
    check = build_answer_check(RewardConfig(terms={"own": {"name": name, "settings": settings}}))
    with pytest.raises(ConfigError) as raised:
        load_prompts(f"{tmp_path}/rows.py:rows", DataConfig(), tokenizer, check_answer=check)
    assert "row 0 has an answer that no response can earn: " in str(raised.value)
    assert message in str(raised.value)
    metric = {"name": name, "settings": settings, "weight": 0.0}
    build_answer_check(RewardConfig(terms={"own": metric}))(
        answer
    )  # its metric may be 0 everywhere
    # `final_number` compares texts, and `code` runs any tests.
    if name not in ("final_number", "code") or not isinstance(answer, str | dict):
        with pytest.raises(ValueError, match=re.escape(message)):
            get_reward(name, settings)("```\n```", {"answer": answer}, "stop")


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_a_number_of_a_short_float_is_what_it_was_written_as(kind, tokenizer, tmp_path):
    message = {"role": "user", "content": "A or B?"}
    answers = np.array([0.1, -2.25, 7, 0.3], kind.to_pandas_dtype())
    table = pa.table({"messages": [[message]] * 4, "answer": pa.array(answers)})
    pq.write_table(table, tmp_path / "rows.parquet")
    check = build_answer_check(RewardConfig("final_number"))
    prompts = load_prompts(tmp_path / "rows.parquet", DataConfig(), tokenizer, check_answer=check)
    reward = get_reward("final_number")
    for prompt, number in zip(prompts.take(range(4)), ["0.1", "-2.25", "7", "0.3"], strict=True):
        assert reward(f"#### {number}", prompt.fields, "stop")["reward"] == 1.0


def test_accents_of_either_form_are_equal():
    composed, decomposed = "caf\xe9 Z\xfcrich", "cafe\u0301 Zu\u0308rich"
    for answer, text in ((composed, decomposed), (decomposed, composed)):
        assert get_reward("substring")(f"In {text}.", {"answer": answer}, "stop")["reward"] == 1.0
        assert get_reward("substring")("In cafe Zurich.", {"answer": answer}, "stop") == {
            "reward": 0.0
        }


@pytest.mark.parametrize("name", ["format", "overlong", "pattern"])
def test_rewards_that_read_no_answer_take_any(name):
    settings = {"overlong": {"buffer_tokens": 5}, "pattern": {"pattern": "."}}.get(name, {})
    assert build_answer_check(RewardConfig(name, settings)) is None


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


def score_words(completions, prompts, answer, **columns):
    """Score as rewards of TRL do: a list of all completions, and lists of columns."""
    are_questions = [prompt[0]["content"] == "how many?" for prompt in prompts]
    lengths = [
        len(text.split()) == number for text, number in zip(completions, answer, strict=True)
    ]
    return [float(score) for score in map(min, are_questions, lengths)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score as rewards of verl do: one response."""
    return float(data_source == "math" and solution_str == ground_truth == extra_info["answer"])


@pytest.mark.parametrize(
    ("function", "framework", "arguments", "result"),
    [
        (
            score_words,
            "TRL",
            (["two words", "three words here"], [{"answer": 2}, {"answer": 2}], ["stop"] * 2),
            [1.0, 0.0],
        ),
        (compute_score, "verl", ("7", {"answer": "7", "data_source": "math"}), 1.0),
    ],
)
def test_a_reward_of_another_framework_is_refused_with_a_call_that_works(
    function, framework, arguments, result
):
    name = f"{__file__}:{function.__name__}"
    with pytest.raises(ConfigError, match=f"as rewards of {framework}; allowed: ") as raised:
        get_reward(name)
    written = re.search(r"allowed: (lambda .*\)) \(docs/", str(raised.value))[1]
    call = eval(written, {function.__name__: function})
    messages = [[{"role": "user", "content": "how many?"}]] * 2
    more = {"messages": messages} if framework == "TRL" else {}
    assert call(*arguments, **more) == result
