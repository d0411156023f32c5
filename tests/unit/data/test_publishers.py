"""Where the answer is in what a publisher writes."""

import pytest

from mcore_rl.data.publishers import boxed


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"$\boxed 5$.", "5"),
        (r"$\boxed {x^{2}}$", "x^{2}"),
        (r"\boxed{\text{(A)} \} 3}", r"\text{(A)} \} 3"),
        (r"\boxed{1", ""),
        ("none", ""),
    ],
)
def test_the_last_box_is_the_answer(solution, answer):
    assert boxed(solution) == answer
