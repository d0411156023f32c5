"""Splitting a call over ranks and joining the results, without Ray."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.config.schema import Layout
from mcore_rl.controller.dispatch import (
    CallPart,
    Dispatch,
    Registration,
    gather,
    register,
    registered_methods,
    scatter,
)
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.parallel.mesh import Mesh


def batch_of(lengths: list[int]) -> Batch:
    rows = [[row] * length for row, length in enumerate(lengths)]
    return Batch(
        {
            "prompt_ids": Jagged.of([[7]] * len(rows), np.int64),
            "response_ids": Jagged.of(rows, np.int64),
            "row": np.arange(len(rows)),
        }
    )


def run(parts: list[CallPart], worker: Any) -> dict[int, Any]:
    """What every rank would return."""
    return {rank: worker(*part.args, **part.kwargs) for part in parts for rank in part.ranks}


class Base:
    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def compute(self) -> None: ...

    @register(blocking=False)
    def save(self) -> None: ...

    def private(self) -> None: ...


class Child(Base):
    def compute(self) -> None: ...

    @register(dispatch_mode=Dispatch.RANK_ZERO, is_start=True)
    def save(self) -> None: ...


def test_marks_are_inherited_and_can_be_changed():
    assert registered_methods(Base) == {
        "compute": Registration(Dispatch.DP_COMPUTE, True, False),
        "save": Registration(Dispatch.ONE_TO_ALL, False, False),
    }
    assert registered_methods(Child) == {
        "compute": Registration(Dispatch.DP_COMPUTE, True, False),
        "save": Registration(Dispatch.RANK_ZERO, True, True),
    }


def test_ranks_share_the_cost_of_a_batch_and_not_its_tokens():
    """Pairs of tokens count: the long sample weighs more than as many tokens in short ones."""
    batch = batch_of([40_000] + [1_000] * 100)
    parts = scatter(Dispatch.DP_COMPUTE, Mesh(Layout(dp=2)), (batch,), {})
    tokens = [int(part.args[0].num_tokens.sum()) for part in parts]
    assert parts[0].rows is not None and 0 in parts[0].rows
    costs = [sum(n + n**2 / 24576 / 2 for n in part.args[0].num_tokens) for part in parts]
    assert tokens[0] < 0.75 * tokens[1]
    assert costs[0] == pytest.approx(costs[1], rel=0.02)


@given(
    st.lists(st.integers(0, 50), max_size=30),
    st.sampled_from([Layout(dp=3), Layout(tp=2, dp=2), Layout(dp=4, pp=2), Layout(cp=2, dp=2)]),
)
def test_a_batch_comes_back_in_the_callers_order(lengths: list[int], layout: Layout):
    mesh, batch = Mesh(layout), batch_of(lengths)
    parts = scatter(Dispatch.DP_COMPUTE, mesh, (batch,), {})

    def double(part: Batch) -> Batch:
        values = part.jagged("response_ids")
        return part.with_columns(doubled=values.with_values(values.values * 2)).select(
            "doubled", "row"
        )

    joined = gather(Dispatch.DP_COMPUTE, parts, run(parts, double))
    assert joined.array("row").tolist() == list(range(len(lengths)))
    for row, values in enumerate(joined.jagged("doubled")):
        assert values.tolist() == [2 * row] * lengths[row]


def test_all_ranks_of_a_dp_group_get_the_same_part_and_one_owns_the_output():
    mesh = Mesh(Layout(tp=2, cp=2, dp=2, pp=2))
    parts = scatter(Dispatch.DP_COMPUTE, mesh, (batch_of([3, 9, 4]),), {})
    assert [part.ranks for part in parts] == [tuple(mesh.ranks(dp_rank=d)) for d in (0, 1)]
    for dp_rank, part in enumerate(parts):
        at = mesh.coordinate(part.output_rank)
        assert (at.tp_rank, at.cp_rank, at.dp_rank, at.pp_rank) == (0, 0, dp_rank, 1)


def test_the_split_follows_tokens_not_rows():
    parts = scatter(Dispatch.DP_COMPUTE, Mesh(Layout(dp=2)), (batch_of([100, 10, 10, 10, 10]),), {})
    assert [part.rows for part in parts] == [(0,), (1, 2, 3, 4)]


def test_a_small_batch_leaves_ranks_with_an_empty_batch_that_keeps_its_columns():
    parts = scatter(Dispatch.DP_COMPUTE, Mesh(Layout(dp=3)), (batch_of([5]),), {})
    assert [len(part.args[0]) for part in parts] == [1, 0, 0]
    assert parts[2].args[0]["response_ids"].values.dtype == np.int64
    # What a worker makes of no rows has no say in the dtypes of the whole.
    empty = Batch({"x": np.zeros(0, dtype=np.float64)})
    results = {0: Batch({"x": np.ones(1, dtype=np.float32)}), 1: empty, 2: empty}
    joined = gather(Dispatch.DP_COMPUTE, parts, results)
    assert joined.array("x").dtype == np.float32


def test_batches_in_keywords_are_split_by_the_same_rows_and_the_rest_goes_to_all():
    mesh, batch = Mesh(Layout(dp=2)), batch_of([1, 2, 3])
    parts = scatter(Dispatch.DP_COMPUTE, mesh, (batch, 0.5), {"other": batch.select("row")})
    for part in parts:
        assert part.args[1] == 0.5
        assert part.kwargs["other"].array("row").tolist() == list(part.rows)


def test_a_batch_without_tokens_is_split_by_rows():
    rewards = Batch({"rewards": np.zeros(4, dtype=np.float32)})
    parts = scatter(Dispatch.DP_COMPUTE, Mesh(Layout(dp=2)), (rewards,), {})
    assert [len(part.rows) for part in parts] == [2, 2]


def test_metrics_come_as_a_list_from_the_output_ranks():
    mesh = Mesh(Layout(tp=2, dp=2))
    parts = scatter(Dispatch.DP_COMPUTE, mesh, (batch_of([1, 1]),), {})
    results = {rank: {"loss": float(rank)} for rank in range(4)}
    assert gather(Dispatch.DP_COMPUTE, parts, results) == [{"loss": 0.0}, {"loss": 2.0}]


def test_one_to_all_and_rank_zero():
    mesh = Mesh(Layout(tp=2, dp=2))
    parts = scatter(Dispatch.ONE_TO_ALL, mesh, (3,), {"b": 4})
    assert gather(Dispatch.ONE_TO_ALL, parts, run(parts, lambda a, b: a + b)) == [7] * 4
    parts = scatter(Dispatch.RANK_ZERO, mesh, (3,), {"b": 4})
    assert [part.ranks for part in parts] == [(0,)]
    assert gather(Dispatch.RANK_ZERO, parts, {0: "answer"}) == "answer"


def test_bad_calls_are_refused():
    mesh = Mesh(Layout(dp=2))
    with pytest.raises(TypeError, match="without a Batch"):
        scatter(Dispatch.DP_COMPUTE, mesh, (1,), {})
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        scatter(Dispatch.DP_COMPUTE, mesh, (batch_of([1, 1]), batch_of([1, 1, 1])), {})
    parts = scatter(Dispatch.DP_COMPUTE, mesh, (batch_of([1, 1]),), {})
    with pytest.raises(ValueError, match="rank 0 returned a batch of 2 rows for 1"):
        gather(Dispatch.DP_COMPUTE, parts, {rank: batch_of([1, 1]) for rank in (0, 1)})
