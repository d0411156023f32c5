"""Answers in boxes of solutions and responses."""

import pytest

from mcore_rl.data.latex import find_last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{1\right.} and }", r"\left\{1\right."),
        (r"\boxed{\text{(A)} \} 3}", r"\text{(A)} \} 3"),
        (r"\boxed{}", ""),
        (r"\boxed {42}", "42"),
        ("\\boxed\n{x^{2}}", "x^{2}"),
        (r"\fbox{42}", "42"),
        (r"\boxed{1} and then \fbox {2}", "2"),
        (r"$\boxed 5$.", "5"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxedsize{3}", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_box_has_the_answer(text, answer):
    assert find_last_boxed(text) == answer
