"""Feedback and rewards of the environments of the package."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from mcore_rl.agents.chat_template.codec import ParsedTurn
from mcore_rl.agents.environments.coding import Coding, CodingSettings
from mcore_rl.config.errors import ConfigError
from mcore_rl.examples.environments.countdown import Countdown, CountdownSettings, find_expression
from mcore_rl.examples.environments.guessing import Guessing, GuessingSettings
from mcore_rl.sandbox.sandbox import SandboxError


def played(environment, *says: str) -> list[tuple[str, float, bool]]:
    """Play turns; return per turn the text, the reward, and whether it is done."""
    results = []
    for text in says:
        step = asyncio.run(environment.step(ParsedTurn(text, "", ())))
        results.append(("".join(m.content for m in step.messages), step.reward, step.is_done))
    return results


def countdown(**settings) -> Countdown:
    return Countdown({"nums": [3, 8, 8, 2], "target": 24}, CountdownSettings(**settings))


@pytest.mark.parametrize(
    ("text", "feedback"),
    [
        ("8 * 3", ""),
        ("So it is 8 * 3 = 24.", ""),
        ("I tried 8 + 8.\n<answer>(8 - 2) * (8 / 2)</answer>", "(8 - 2) * (8 / 2) uses 2 more"),
        ("8 + 8 + 8", "8 + 8 + 8 uses 8 more often than it is there. Try again."),
        ("12 * 2", "12 * 2 uses 12 more often than it is there. Try again."),
        ("8 + 8", "8 + 8 is 16, not 24. Try again."),
        ("8 / (2 - 2)", "8 / (2 - 2) uses 2 more"),
        ("8 * (3", "8 * (3 has no value"),
        ("I do not know", "There is no expression in your answer. Try again."),
        ("(8 + 8 / 2) * 2 ** 1", "(8 + 8 / 2) * 2 ** 1 uses"),
        ("0.5 * 8", "0.5 * 8 uses 0.5 more"),
        ("-8 * -3", ""),
        ("<think>8 * 2?</think>8 * 3", ""),
        ("<think>8 * 3", "There is no expression in your answer. Try again."),
    ],
)
def test_an_attempt_of_countdown_is_right_or_gets_feedback(text, feedback):
    [(message, reward, is_done)] = played(countdown(), text)
    assert message.startswith(feedback) and (reward, is_done) == (
        (0.0, False) if feedback else (1.0, True)
    )


@pytest.mark.parametrize("text", ["(" * 10**6, "<answer>" * 10**5, "3 " + "=" * 10**6])
def test_a_long_try_keeps_no_server_waiting(text):
    # A search that starts anew at each position would take hours.
    started = time.monotonic()
    assert find_expression(text) in (None, "3")
    assert time.monotonic() - started < 30


def test_the_last_answer_that_is_closed_counts():
    text = "<answer>8</answer> 3</answer> <answer>2 * 3 = 6</answer> 7 <answer>9"
    assert find_expression(text) == "2 * 3"
    assert find_expression("<answer>8 <answer>2</answer>") == "8"


def test_attempts_before_the_right_one_cost_and_all_numbers_may_be_required():
    assert played(countdown(), "8 + 8", "no", "3 * 8")[-1] == ("", pytest.approx(0.8), True)
    assert played(countdown(try_penalty=0.7), "8", "8", "3 * 8")[-1] == ("", 0.0, True)
    environment = countdown(uses_all=True)
    [(feedback, _, _), (_, reward, _)] = played(environment, "3 * 8", "(8 + 8) * 3 / 2")
    assert feedback == "3 * 8 does not use 2. Try again."
    assert reward == pytest.approx(0.9)


def test_an_expression_is_the_left_side_of_the_last_line_with_one():
    assert find_expression("1 + 1\nno numbers\n2 * (3 + 4) = 14 is it") == "2 * (3 + 4)"
    assert find_expression("<answer> 3 + 4 </answer> and 5") == "3 + 4"
    assert find_expression("none") is None


ASSERTS = {"asserts": ["assert double(2) == 4", "assert double(-3) == -6, 'negative'"]}
OUTPUTS = {"inputs": ["2\n", "-3\n"], "outputs": ["4\n", "-6\n"]}
READS = "n = int(input())"
RIGHT, WRONG = "def double(n): return 2 * n", "def double(n): return abs(2 * n)"


def block(program: str) -> str:
    return f"So:\n```python\n{program}\n```\n"


def coding(tests: dict, **settings) -> Coding:
    return Coding({"answer": json.dumps(tests)}, CodingSettings(**settings))


@pytest.mark.parametrize(
    ("tests", "program", "feedback"),
    [
        (ASSERTS, RIGHT, ""),
        (
            ASSERTS,
            WRONG,
            r"""The test "assert double(-3) == -6, 'negative'" fails: 'AssertionError: """,
        ),
        (ASSERTS, "def double(n): return n +", "The test 'assert double(2) == 4' fails: 'SyntaxE"),
        (ASSERTS, "while True: pass", "The test 'assert double(2) == 4' fails: 'timeout'."),
        (OUTPUTS, f"{READS}\nprint(2 * n)", ""),
        (OUTPUTS, f"{READS}\nprint(abs(2 * n))", "For the input '-3' it prints '6', not '-6'."),
        (OUTPUTS, f"{READS}\nprint(1 / 0)", "For the input '2' it ends with 'Traceback"),
    ],
)
def test_a_program_passes_or_gets_the_first_test_that_fails(tests, program, feedback):
    environment = coding(tests, cpu_s=2.0)
    [(message, reward, is_done)] = played(environment, block(program))
    assert message.startswith(feedback) and (reward, is_done) == (
        (0.0, False) if feedback else (1.0, True)
    )


def test_programs_before_the_right_one_cost_and_tests_may_be_hidden():
    results = played(coding(ASSERTS, shows_tests=False), "no", block(WRONG), block(RIGHT))
    assert results == [
        ("There is no ```python block in your answer. Try again.", 0.0, False),
        ("A test fails. Try again.", 0.0, False),
        ("", pytest.approx(0.8), True),
    ]


def test_programs_without_a_sandbox_are_refused_before_a_run(monkeypatch):
    def none(settings):
        raise SandboxError("no sandbox works here")

    monkeypatch.setattr("mcore_rl.agents.environments.coding._make_sandbox", none)
    with pytest.raises(ConfigError, match=r"agent\.environment='code': no sandbox works here"):
        Coding.check(CodingSettings())


def test_guesses_get_higher_and_lower():
    game = Guessing({"answer": "37"}, GuessingSettings())
    assert played(game, "50?", "well", "from 1 to 20: 20", "37") == [
        ("50 is too high.", 0.0, False),
        ("Guess a whole number from 1 to 100.", 0.0, False),
        ("20 is too low.", 0.0, False),
        ("", pytest.approx(0.85), True),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Countdown({"nums": 3}, CountdownSettings()), "reads the columns nums"),
        (lambda: coding({"asserts": []}), "environment='code': the field 'answer'.*not empty"),
        (lambda: Guessing({"answer": "x"}, GuessingSettings()), "needs a whole number"),
        (lambda: Guessing({"answer": 7}, GuessingSettings(high=5)), "7 is not from 1 to 5"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
