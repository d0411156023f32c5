"""Which answers are equal is written by hand here."""

import asyncio
import time

import pytest

from mcore_rl.config.schema import RewardConfig
from mcore_rl.rewards.base import RewardError
from mcore_rl.rewards.judge import Judge
from mcore_rl.rewards.rules_math import last_boxed
from tests.unit.rewards.judging import judged, judged_by, response

EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    ("1/2", r"\dfrac12"),
    ("0.5", r"\tfrac{2}{4}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("1 2/3", r"\frac53"),
    (r"1\frac{2}{3}", "5/3"),
    ("3", "3.0"),
    ("7", "7."),
    (r"\frac{1}{3}", "0.333333"),
    ("1,234", "1234"),
    ("1234", "1,234"),
    ("1234567", "1 234 567"),
    ("1000", r"1\,000"),
    ("1000", "1{,}000"),
    ("50%", "0.5"),
    (r"50\%", "50%"),
    ("50", r"50\%"),
    ("0.5", "50 percent"),
    (r"\{1,2,3\}", "{3, 2, 1}"),
    ("1,2,3", "3,2,1"),
    (r"3\text{ or }4", "4, 3"),
    (r"\pm 3", "3, -3"),
    (r"\emptyset", r"\{\}"),
    ("[1,2)", r"\left[1, 2\right)"),
    (r"(0,1)\cup(2,3)", r"(2,3) \cup (0,1)"),
    ("[0,1]", r"0 \le x \le 1"),
    ("x < 3", r"(-\infty, 3)"),
    ("5 cm", "5"),
    ("5", r"5 \text{ cm}"),
    (r"90^\circ", "90"),
    (r"\$5", "5"),
    ("$5$", "5"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    (r"\sqrt{8}", r"2\sqrt2"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    (r"2^{10}", "1024"),
    ("1000000", "10^6"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    ("x = 3", "3"),
    ("3", "x = 3"),
    ("y = 2x + 1", "y = 1 + 2x"),
    ("2+3i", "3i+2"),
    ("No solution", r"\text{no solution}"),
    (r"\text{(C)}", "C"),
    (r"so it is \boxed{12}", "12"),  # the column may have a whole solution
]
DIFFERENT = [
    (r"\frac{1}{2}", "2"),
    ("1/2", "2/1"),
    ("1 2/3", "1"),
    ("1 2/3", "3"),
    ("3", "-3"),
    ("12", "21"),
    ("10", "100"),
    ("3", "1 2"),
    ("46", "12 34"),
    ("34", "12 34"),
    (r"\frac{1}{3}", "0.33"),
    ("1", "1.00001"),
    ("1,234", "1,235"),
    ("1.234", "1,234"),
    ("0.5", "5%"),
    ("3", "3,4"),
    ("3,4", "3"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    ("(1,2)", "[1,2]"),
    ("[1,2)", "(1,2]"),
    ("(1,2)", "(2,1)"),
    (r"(-\infty, 3)", r"(-\infty, 3]"),
    (r"x \le 3", "x < 3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    (r"\sqrt{8}", r"4\sqrt2"),
    (r"2\pi", "6.28"),
    ("2x", "2y"),
    ("x = 3", "x = 4"),
    ("(x+1)^2", "x^2 + 1"),
    (r"\infty", r"-\infty"),
    ("2+3i", "3+2i"),
    ("tea", "eat"),
    ("no solution", "one solution"),
    ("B", "C"),
    ("7", "seven"),
    ("0", ""),
]


def found(pairs, settings=None, form=r"hence \boxed{%s}"):
    samples = [response(answer=gold) for gold, _ in pairs]
    return judged(
        RewardConfig("math", settings or {"timeout_s": 60.0}, num_processes=1),
        [form % answer for _, answer in pairs],
        samples,
    )


def test_equal_and_different_answers():
    rows = [(*pair, 1.0) for pair in EQUAL] + [(*pair, 0.0) for pair in DIFFERENT]
    results = found([row[:2] for row in rows])
    wrong = [row for row, s in zip(rows, results, strict=True) if s.reward != row[2]]
    assert wrong == []
    assert {s.reward_parts["unchecked"] for s in results} == {0.0}
    assert [
        row[1] for row, s in zip(rows, results, strict=True) if not s.reward_parts["answered"]
    ] == [""]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{1\right.} and }", r"\left\{1\right."),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{2", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_box_is_the_answer(text, answer):
    assert last_boxed(text) == answer


def test_without_a_box_the_last_number_counts_only_if_asked_for():
    texts = [("7", "6 + 1 = 7"), ("7", "It is 8, not 7, so 9.")]
    assert [s.reward_parts["answered"] for s in found(texts, form="%s")] == [0.0, 0.0]
    settings = {"timeout_s": 60.0, "boxed_only": False}
    assert [s.reward for s in found(texts, settings, form="%s")] == [1.0, 0.0]


def test_digits_are_those_of_numbers_with_a_decimal_point():
    settings = {"timeout_s": 60.0, "digits": 2}
    assert [s.reward for s in found([("1/3", "0.33"), ("1/3", "0.32")], settings)] == [1.0, 0.0]


def test_an_answer_of_the_data_that_cannot_be_read_is_an_error():
    with pytest.raises(RewardError, match="the answer '' of the data cannot be read as mathem"):
        found([("", "1")])


@pytest.mark.parametrize("text", [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{%s}" % ("(" * 3000)], ids=len)
def test_a_check_that_never_ends_is_killed_and_the_next_one_works(text):
    """Powers that fill the memory of no machine, and a parser's depth: wrong answers, no errors."""

    async def run():
        judge = Judge(RewardConfig("math", {"timeout_s": 2.0}, num_processes=1))
        await judged_by(judge, [r"\boxed{7}"])  # now a process is there
        started = time.monotonic()
        [endless] = await judged_by(judge, [text])
        assert time.monotonic() - started < 2.0 + 10.0
        assert (endless.reward, endless.reward_error) == (0.0, "")
        [next_one] = await judged_by(judge, [r"\boxed{7}"])
        assert next_one.reward == 1.0
        await judge.close()
        return endless

    endless = asyncio.run(run())
    if "^" in text:
        assert endless.reward_parts == {"answered": 1.0, "unchecked": 1.0}
