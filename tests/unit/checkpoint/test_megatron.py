"""The comparison of a checkpoint with a model."""

from __future__ import annotations

import pytest

from mcore_rl.checkpoint import megatron

STORED = {"embedding": (132, 64), "layers.norm": (2, 64), "optimizer.state.exp_avg.x": (4,)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"embedding": ((136, 64), True)}, []),  # padding follows from the layout
        ({"embedding": ((132, 65), True)}, ["embedding has shape (132, 64) there and (132, 65)"]),
        ({"layers.norm": ((3, 64), False)}, ["layers.norm has shape (2, 64) there and (3, 64)"]),
        ({"layers.norm": ((2, 64, 1), False)}, ["layers.norm has shape (2, 64) there and"]),
        ({"layers.bias": ((2, 64), False)}, ["it has no layers.bias"]),
        ({"layers.norm": None}, ["the model has no layers.norm"]),
    ],
)
def test_differences_to_another_model_are_names_and_shapes(changes, expected):
    other_model = {"embedding": ((132, 64), True), "layers.norm": ((2, 64), False)} | changes
    other_model = {key: value for key, value in other_model.items() if value is not None}
    problems = megatron.find_differences(STORED, other_model)
    assert len(problems) == len(expected)
    assert all(problem.startswith(start) for problem, start in zip(problems, expected, strict=True))


def test_optimizer_state_may_stay_unread_but_not_be_missing():
    assert megatron.find_differences(STORED, {}) == [
        "the model has no embedding",
        "the model has no layers.norm",
    ]
    expected = {key: (shape, False) for key, shape in STORED.items()}
    expected["optimizer.state.exp_avg_sq.x"] = ((4,), False)
    assert megatron.find_differences(STORED, expected) == ["it has no optimizer.state.exp_avg_sq.x"]
