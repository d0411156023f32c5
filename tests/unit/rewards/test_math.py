"""Equal and different answers, written by hand."""

import asyncio
import time

import pytest

from mcore_rl.config.schema import RewardConfig
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import RewardError
from tests.unit.rewards.judging import compute_rewards, compute_rewards_with, response

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
    ("0.001", "1e-3"),
    (r"6.02\times 10^{23}", "6.02e23"),
    ("1000", "1.0E3"),
    ("0.0025", "2.5 x 10^-3"),
    ("2.5*10**-3", r"2.5\cdot10^{-3}"),
    ("602000000000000000000000", r"6.02\times 10^{23}"),
    ("90", "90\N{DEGREE SIGN}"),
    (r"90^{\circ}", r"90\degree"),
    (r"20^\circ\text{C}", "20\N{DEGREE SIGN}C"),
    ("5 sec", "5"),
    (r"\emptyset", r"\varnothing"),
    (r"\varnothing", r"\{\}"),
    (r"\varnothing", "\N{EMPTY SET}"),
    (r"\frac{\pi}{2}", "pi/2"),
    ("2*pi", r"2\pi"),
    (r"2\pi r", "2\N{GREEK SMALL LETTER PI}r"),
    (r"\theta", "theta"),
    (r"\sin(x)", "sin(x)"),
    ("sqrt(2)/2", r"\frac{1}{\sqrt2}"),
    ("\N{SQUARE ROOT}2", r"\sqrt{2}"),
    (r"-\infty", "-infinity"),
    ("x\N{SUPERSCRIPT TWO}", "x^2"),
    ("3\N{VULGAR FRACTION ONE HALF}", "3.5"),
    ("2\N{MIDDLE DOT}3", "6"),
    (r"\mathbb{R}", r"\mathbb R"),
    ("1011_2", "1011_{2}"),
    ("1011_2", "(1011)_2"),
    (r"\text{1011}_2", "1011_2"),
    ("1011_2", "1011"),  # the question says in which base
    (r"2F_{16}", "2F_{16}"),
    (r"\frac{1}{2^{99}}", "2^{-99}"),
    (r"\frac{1}{2^{99}}", "1.57772e-30"),
    (r"\frac{1}{20!}", r"\frac{1}{20 \cdot 19!}"),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
    (r"\frac{1}{30}", "0.033333"),
    ("0.1x", r"\frac{x}{10}"),
    (r"\lbrace 1,2\rbrace", "{1,2}"),
    (r"\{1,2\}", r"\lbrace 2, 1 \rbrace"),
    (r"\{1,2\}", r"\left\lbrace 2, 1 \right\rbrace"),
    ("[0,1]", r"\lbrack 0,1\rbrack"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"0.\overline{3}", "1/3"),
    (r"0.1\overline{6}", "1/6"),
    (r"0.\overline{142857}", "1/7"),
    (r"1.\overline{3}", "4/3"),
    (r"0.\bar{3}", "1/3"),
    (r"0.\overline3", "1/3"),
    (r"0.\dot{3}", "1/3"),
    (r"0.\dot{1}4285\dot{7}", r"\frac17"),
    (r"0.\overline{9}", "1"),
    (r"12.3\overline{45}", r"\frac{679}{55}"),
    (r"-0.\overline{3}", r"-\frac13"),
    (r".\overline{3}", r"\frac13"),
    (r"33.\overline{3}\%", r"\frac13"),
    (r"1,234.\overline{5}", r"\frac{11111}{9}"),
    (r"2\cdot 0.\overline{3}", r"\frac23"),
    ("0.5", r"\sin 30^\circ"),
    (r"\frac12", r"\sin 30^\circ"),
    ("1", r"\tan 45^\circ"),
    (r"\tan 45^\circ", "1"),
    (r"\cos 60^\circ", "1/2"),
    (r"\cos(60^\circ)", "1/2"),
    (r"2\sin 30^\circ", "1"),
    (r"\sin 30^{\circ}", "1/2"),
    (r"\cot 45^\circ", "1"),
    (r"\sin\left(30^\circ\right)", "1/2"),
    (r"\sin^2 30^\circ", "1/4"),
    (r"\sin^{2}(30^\circ)", "1/4"),
    ("\\sin 30\N{DEGREE SIGN}", "1/2"),
    (r"\sin30^\circ", "1/2"),
    (r"\sin{30^\circ}", "1/2"),
    ("sin 30\N{DEGREE SIGN}", "1/2"),
    (r"\sin(90^\circ - 60^\circ)", "1/2"),
    (r"\cos 22.5^\circ", r"\frac{\sqrt{2+\sqrt2}}{2}"),
    (r"\frac{\sin 30^\circ}{\cos 60^\circ}", "1"),
    (r"\tan\frac{45}{2}^\circ", r"\sqrt2-1"),
    (r"\sin x^\circ", r"\sin \frac{x \pi}{180}"),
    (r"\sin 20^\circ", r"\cos 70^\circ"),
    (r"\sec 60^\circ", "2"),
    ("-1", r"e^{i\pi}"),
    ("-1", r"e^{\pi i}"),
    ("i", r"e^{i\pi/2}"),
    (r"e^{i\pi}", "-1"),
    (r"2e^{i\pi/2}", "2i"),
    (r"\exp(i\pi)", "-1"),
    ("-1", "i^2"),
    (r"\mathrm{e}^{\mathrm{i}\pi}", "-1"),
    (r"\frac{\sqrt3}{2}+\frac{i}{2}", r"e^{i\pi/6}"),
    ("2i", "(1+i)^2"),
    (r"\{i,-i\}", r"\pm i"),
    ("7", r"7\pmod{12}"),
    (r"7\pmod{12}", "7"),
    (r"x \equiv 7 \pmod{12}", "7"),
    ("7", r"x \equiv 7 \pmod{12}"),
    (r"7 \bmod 12", "7"),
    (r"7 \mod 12", "7"),
    (r"7\pmod{12}", r"7 \pmod {12}"),
    ("7", r"7 (\bmod 12)"),
    ("7", r"7\ (\text{mod }12)"),
    ("7", "7 (mod 12)"),
    ("7", r"7 \pmod 5"),
    ("3,7", r"3, 7\pmod{12}"),
    ("3", r"\log_2 8"),
    (r"\log_2 8", "3"),
    (r"\log_{2} 8", "3"),
    (r"\log_{2}{8}", "3"),
    (r"\log_2(8)", "3"),
    (r"\log_{10} 100", "2"),
    (r"\log_10 100", "2"),
    (r"\log_3 81", "4"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"\lg 100", "2"),
    (r"\log_2\frac{1}{8}", "-3"),
    ("log_2 8", "3"),
    (r"2\log_2 8", "6"),
    (r"\frac 1 2", "0.5"),
    (r"\frac1 2", "0.5"),
    (r"\binom 5 2", "10"),
    (r"\dfrac 3 4", "0.75"),
    (r"\langle 1,2\rangle", "(1,2)"),
    (r"\[ 3 \]", "3"),
    ("3", r"\(3\)"),
    (r"\[ \frac{1}{2} \]", "0.5"),
    ("3", r"\[3.\]"),
    (r"\begin{pmatrix}1&2\\[2pt]3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    ("x=2i", "2i"),
    ("2i", "x=2i"),
    ("z = 1+i", "1+i"),
    ("z=1+i", "z=i+1"),
    ("y = 2x+1", "y=1+2x"),
    (r"1 \pm i", "1+i, 1-i"),
    (r"\sum_{i=1}^{3} i", "6"),
    ("i", "i"),
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
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\frac{1}{2^{99}}", "0"),
    (r"\frac{1}{2^{99}}", "0.000000"),
    (r"1-\frac{1}{2^{99}}", "1"),
    (r"10^{-20}", r"10^{-21}"),
    (r"e^{-40}", r"e^{-41}"),
    (r"1-e^{-98}", r"1-e^{-99}"),
    (r"x+2^{-99}", r"x+2^{-98}"),
    (r"\{1, 2^{-99}\}", r"\{1, 2^{-98}\}"),
    (r"[0, 2^{-99}]", r"[0, 2^{-98}]"),
    (r"\frac{1}{20!}", r"\frac{1}{21!}"),
    (r"\frac{1}{\binom{60}{30}}", r"\frac{1}{\binom{60}{29}}"),
    (r"2.5\times 10^{-20}", r"2.5\times 10^{-21}"),
    ("2.5e-8", "2.6e-8"),
    ("0.0000001", "0.0000002"),
    (r"6.626\times 10^{-34}", "6.63e-34"),
    ("1e-3", "1e-4"),
    (r"1\times 10^-3", r"2\times 10^-3"),
    ("1011_2", "1101_2"),
    ("1011_2", "1011_3"),
    ("11_{8}", "11_{9}"),
    ("1011_2", "11"),  # as large, in another base
    (r"1A_{16}", r"1A_{15}"),
    ("10_2, 11_3", "10_3, 11_2"),
    ("7", "?? 7"),
    ("2pi", "2ip"),
    ("1/3", r"0.\overline{4}"),
    ("0.3", r"0.\overline{3}"),
    ("1/6", r"0.\overline{16}"),
    ("30", r"\sin 30^\circ"),
    ("1", r"\sin 45^\circ"),
    ("8", r"\log_2 8"),
    ("2", r"\log_2 8"),
    ("2,8", r"\log_2 8"),
    (r"\sin 30", r"\sin 30^\circ"),
    ("1", r"e^{i\pi}"),
    ("i", "-i"),
    ("1", "i"),
    (r"7\pmod{12}", "12"),
    (r"7\pmod{12}", r"5\pmod{12}"),
    (r"7\pmod{12}", r"7\pmod{13}"),
    ("7", "19"),
    (r"\cos 60", "1/2"),
    (r"\log_2 8", r"\log_3 8"),
    ("45", r"\tan 45^\circ"),
    (r"\{1,2\}", r"\lbrace 1,3\rbrace"),
    ("3i+2j", "3i-2j"),
    ("a_i", "a_j"),
    (r"\frac 1 2", "1,2"),
    ("x+i", "x-i"),
    ("2i", "-2"),
    ("2i", "2"),
    ("0", ""),
]


def compute(pairs, settings=None, form=r"hence \boxed{%s}"):
    samples = [response(answer=gold) for gold, _ in pairs]
    return compute_rewards(
        RewardConfig("math", settings or {"timeout_s": 60.0}, num_processes=1),
        [form % answer for _, answer in pairs],
        samples,
    )


def test_equal_and_different_answers():
    rows = [(*pair, 1.0) for pair in EQUAL] + [(*pair, 0.0) for pair in DIFFERENT]
    results = compute([row[:2] for row in rows])
    wrong = [row for row, s in zip(rows, results, strict=True) if s.reward != row[2]]
    assert wrong == []
    assert {s.reward_parts["unchecked"] for s in results} == {0.0}
    assert [
        row[1] for row, s in zip(rows, results, strict=True) if not s.reward_parts["answered"]
    ] == [""]


def test_without_a_box_the_last_number_counts_only_without_boxed_only():
    texts = [("7", "6 + 1 = 7"), ("7", "It is 8, not 7, so 9.")]
    assert [s.reward_parts["answered"] for s in compute(texts, form="%s")] == [0.0, 0.0]
    settings = {"timeout_s": 60.0, "boxed_only": False}
    assert [s.reward for s in compute(texts, settings, form="%s")] == [1.0, 0.0]


def test_digits_are_those_of_numbers_with_a_decimal_point():
    settings = {"timeout_s": 60.0, "digits": 2}
    assert [s.reward for s in compute([("1/3", "0.33"), ("1/3", "0.32")], settings)] == [1.0, 0.0]


def test_an_answer_of_the_data_that_cannot_be_read_is_an_error():
    with pytest.raises(RewardError, match=r"the answer '.*' of the data cannot be read as mathem"):
        compute([(r"\text{ }", "1")])


@pytest.mark.job
@pytest.mark.parametrize("text", [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{%s}" % ("(" * 3000)], ids=len)
def test_a_check_that_never_ends_is_killed_and_the_next_one_works(text):
    # Powers that fill the memory of no machine, and a parser's depth: wrong answers, no errors.

    async def run():
        judge = RewardManager(RewardConfig("math", {"timeout_s": 2.0}, num_processes=1))
        await compute_rewards_with(judge, [r"\boxed{7}"])  # now a process is there
        started = time.monotonic()
        [endless] = await compute_rewards_with(judge, [text])
        assert time.monotonic() - started < 2.0 + 10.0
        assert (endless.reward, endless.reward_error) == (0.0, "")
        [next_one] = await compute_rewards_with(judge, [r"\boxed{7}"])
        assert next_one.reward == 1.0
        await judge.close()
        return endless

    endless = asyncio.run(run())
    if "^" in text:
        assert endless.reward_parts == {"answered": 1.0, "unchecked": 1.0}
