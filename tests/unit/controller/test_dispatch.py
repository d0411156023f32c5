"""Splitting a call over ranks and joining the results, without Ray."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mypy.api
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.config.schema import Layout
from mcore_rl.controller.dispatch import (
    CallPart,
    Dispatch,
    DispatchMode,
    Execute,
    Registration,
    RemoteMethod,
    get_registered_methods,
    list_by_rank,
    register,
)
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.parallel.mesh import Coordinate, Mesh

ROOT = Path(__file__).resolve().parents[3]


def batch_of(lengths: list[int]) -> Batch:
    rows = [[row] * length for row, length in enumerate(lengths)]
    return Batch(
        {
            "prompt_ids": Jagged.pack([[7]] * len(rows), np.int64),
            "response_ids": Jagged.pack(rows, np.int64),
            "row": np.arange(len(rows)),
        }
    )


def run(parts: list[CallPart], worker: Any) -> dict[int, Any]:
    """Return the result of each rank."""
    return {rank: worker(*part.args, **part.kwargs) for part in parts for rank in part.ranks}


class Base:
    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def compute(self) -> None: ...

    @register()
    def save(self) -> str:
        """Save what there is."""
        return "all"

    def private(self) -> None: ...


class Child(Base):
    def compute(self) -> None: ...

    @register(dispatch_mode=Dispatch.RANK_ZERO, is_start=True)
    def save(self) -> str:
        return f"{super().save()} and more"


class Grandchild(Child):
    def save(self) -> str:
        return f"{super().save()}, twice"


def test_registrations_are_inherited_and_can_be_changed():
    assert get_registered_methods(Base) == {
        "compute": Registration(Dispatch.MEGATRON_COMPUTE, Execute.ALL, False, None, (), False),
        "save": Registration(Dispatch.ONE_TO_ALL, Execute.ALL, False),
    }
    assert get_registered_methods(Child) == {
        "compute": Registration(Dispatch.MEGATRON_COMPUTE, Execute.ALL, False, None, (), False),
        "save": Registration(Dispatch.RANK_ZERO, Execute.ALL, True),
    }


def test_a_registered_method_is_a_function_on_a_worker_and_a_remote_method_on_its_class():
    assert Base().save() == "all"
    assert Child().save() == "all and more"
    assert isinstance(Base.save, RemoteMethod)
    assert (Base.save.name, Base.save.registration.dispatch_mode) == ("save", Dispatch.ONE_TO_ALL)
    assert (Base.save.__name__, Base.save.__doc__) == ("save", "Save what there is.")
    assert Base().save.__func__ is Base.save.__wrapped__
    assert Base().save.__doc__ == "Save what there is."
    assert Base.save is Base.save and Child.save is not Base.save  # as a fake group compares them


def test_an_override_without_register_is_what_runs_under_the_registration_of_its_base():
    assert get_registered_methods(Grandchild) == get_registered_methods(Child)
    assert not isinstance(Grandchild.save, RemoteMethod)
    assert Grandchild().save() == "all and more, twice"


def test_a_method_with_result_bytes_is_another_one_of_the_same_name():
    method = Base.save.with_result_bytes(30)
    assert (method.name, method.registration) == ("save", Base.save.registration)
    assert (method.result_bytes, Base.save.result_bytes) == (30, 0)


# What mypy says of a line stands behind it: the type that is revealed, or the code of its error.
TYPED = """
from collections.abc import Callable, Sequence
from mcore_rl.controller.dispatch import (
    Dispatch, DispatchMode, Joined, OfEachRank, list_by_rank, register, send_to_all,
)
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch, Samples

LISTED: DispatchMode[OfEachRank] = DispatchMode(send_to_all, list_by_rank)
COUNTED: DispatchMode[Joined[int]] = DispatchMode(Dispatch.DP_COMPUTE.scatter, lambda *_: 0)

class Worker:
    @register()
    def default(self, word: str) -> int: ...
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, word: str, *, times: int = 1) -> float: ...
    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, batch: Batch, scale: int) -> int: ...
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, word: str) -> bytes: ...
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def measure(self, batch: Batch) -> dict[str, float]: ...
    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, batch: Batch, factor: int) -> Batch: ...
    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def megatron_compute(self, batch: Batch, *, temperature: float) -> Batch | None: ...
    @register(dispatch_mode=Dispatch.MINI_BATCHES)
    def mini_batches(self, batch: Batch, *, sizes: Sequence[int]) -> list[float]: ...
    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP)
    def pp_as_dp(self, batch: Batch) -> str: ...
    @register(dispatch_mode=Dispatch.DP_COMPUTE_WITH_FUNC)
    def with_func(self, function: Callable[[Batch], int], batch: Batch) -> int: ...
    @register(dispatch_mode=LISTED)
    def listed(self, word: str) -> str: ...
    @register(dispatch_mode=COUNTED)
    def counted(self, batch: Batch) -> Batch: ...
    @register(dispatch_mode=Dispatch.DP_COMPUTE)  # arg-type
    def split_without_batch(self, word: str) -> Batch: ...

def check(group: WorkerGroup, worker: Worker, samples: Samples) -> None:
    reveal_type(group.call(Worker.default, "a"))  # list[int]
    reveal_type(group.call(Worker.one_to_all, "a", times=2))  # list[float]
    reveal_type(group.call(Worker.all_to_all, [samples], [3]))  # Any
    reveal_type(group.call(Worker.rank_zero, "a"))  # bytes
    reveal_type(group.call(Worker.measure, samples))  # dict[str, float]
    reveal_type(group.call(Worker.dp_compute, samples, 3))  # Samples
    reveal_type(group.call(Worker.megatron_compute, samples, temperature=1.0))  # Samples
    reveal_type(group.call(Worker.mini_batches, samples, sizes=[3]))  # list[list[float]]
    reveal_type(group.call(Worker.pp_as_dp, samples))  # list[str]
    reveal_type(group.call(Worker.with_func, len, samples))  # Any
    reveal_type(group.call(Worker.listed, "a"))  # list[str]
    reveal_type(group.call(Worker.counted, samples))  # int
    reveal_type(group.submit(Worker.one_to_all, "a"))  # PendingCall[list[float]]
    reveal_type(group.submit(Worker.rank_zero.with_result_bytes(9), "a"))  # PendingCall[bytes]
    reveal_type(worker.one_to_all("a"))  # float
    group.call(Worker.one_to_all, 3)  # arg-type
    group.call(Worker.one_to_all)  # call-arg
    group.call(Worker.one_to_all, "a", time=2)  # call-arg
    group.call(Worker.dp_compute, "a", 3)  # arg-type
    group.submit(Worker.megatron_compute, samples)  # call-arg
    group.submit(Worker.rank_zero.with_result_bytes(9), 3)  # arg-type
    group.call(Worker.two_to_all, "a")  # attr-defined
    worker.dp_compute(samples, 3)  # arg-type
"""


@pytest.mark.nightly  # mypy reads numpy and the standard library, too: half a minute
def test_calls_of_a_group_have_the_types_of_the_methods_as_their_modes_change_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "typed.py").write_text(TYPED)
    monkeypatch.chdir(ROOT)  # where mypy looks for the package
    options = ["--config-file", "pyproject.toml", "--cache-dir", str(tmp_path / "cache")]
    options += ["--disable-error-code", "empty-body"]
    output, problems, _ = mypy.api.run([*options, str(tmp_path / "typed.py")])
    assert not problems
    messages = {
        int(number): re.sub(r"mcore_rl\.[\w.]*\.", "", revealed or code)
        for number, revealed, code in re.findall(
            r'typed\.py:(\d+): (?:note: Revealed type is "(.*)"|error: .*\[([\w-]+)\])$',
            output,
            re.MULTILINE,
        )
    }
    lines = dict(enumerate(TYPED.splitlines(), 1))
    assert messages == {n: line.partition("  # ")[2] for n, line in lines.items() if "  # " in line}


def test_ranks_share_the_cost_of_a_batch_and_not_its_tokens():
    # Pairs of tokens count: the long sample costs more than as many tokens in short ones.
    batch = batch_of([40_000] + [1_000] * 100)
    parts = Dispatch.MEGATRON_COMPUTE.scatter(Mesh(Layout(dp=2)), (batch,), {})
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
    parts = Dispatch.MEGATRON_COMPUTE.scatter(mesh, (batch,), {})

    def double(part: Batch) -> Batch:
        values = part.jagged("response_ids")
        return part.with_columns(doubled=values.with_values(values.values * 2)).select(
            "doubled", "row"
        )

    joined = Dispatch.MEGATRON_COMPUTE.gather(parts, run(parts, double))
    assert joined.array("row").tolist() == list(range(len(lengths)))
    for row, values in enumerate(joined.jagged("doubled")):
        assert values.tolist() == [2 * row] * lengths[row]


def test_all_ranks_of_a_dp_group_get_the_same_part_and_one_owns_the_output():
    mesh = Mesh(Layout(tp=2, cp=2, dp=2, pp=2))
    parts = Dispatch.MEGATRON_COMPUTE.scatter(mesh, (batch_of([3, 9, 4]),), {})
    assert [part.ranks for part in parts] == [tuple(mesh.get_ranks(dp_rank=d)) for d in (0, 1)]
    for dp_rank, part in enumerate(parts):
        c = mesh.get_coordinate(part.output_rank)
        assert (c.tp_rank, c.cp_rank, c.dp_rank, c.pp_rank) == (0, 0, dp_rank, 1)


def test_the_split_follows_tokens_not_rows():
    parts = Dispatch.MEGATRON_COMPUTE.scatter(
        Mesh(Layout(dp=2)), (batch_of([100, 10, 10, 10, 10]),), {}
    )
    assert [part.rows for part in parts] == [(0,), (1, 2, 3, 4)]


def test_a_small_batch_leaves_ranks_with_an_empty_batch_that_keeps_its_columns():
    parts = Dispatch.MEGATRON_COMPUTE.scatter(Mesh(Layout(dp=3)), (batch_of([5]),), {})
    assert [len(part.args[0]) for part in parts] == [1, 0, 0]
    assert parts[2].args[0]["response_ids"].values.dtype == np.int64
    # What a worker makes of no rows has no say in the dtypes of the whole.
    empty = Batch({"x": np.zeros(0, dtype=np.float64)})
    results = {0: Batch({"x": np.ones(1, dtype=np.float32)}), 1: empty, 2: empty}
    joined = Dispatch.MEGATRON_COMPUTE.gather(parts, results)
    assert joined.array("x").dtype == np.float32


def test_batches_in_keywords_are_split_by_the_same_rows_and_the_rest_goes_to_all():
    mesh, batch = Mesh(Layout(dp=2)), batch_of([1, 2, 3])
    parts = Dispatch.MEGATRON_COMPUTE.scatter(mesh, (batch, 0.5), {"other": batch.select("row")})
    for part in parts:
        assert part.args[1] == 0.5
        assert part.kwargs["other"].array("row").tolist() == list(part.rows)


def test_a_batch_without_tokens_is_split_by_rows():
    rewards = Batch({"rewards": np.zeros(4, dtype=np.float32)})
    parts = Dispatch.MEGATRON_COMPUTE.scatter(Mesh(Layout(dp=2)), (rewards,), {})
    assert [len(part.rows) for part in parts] == [2, 2]


def test_metrics_come_as_a_list_from_the_output_ranks():
    mesh = Mesh(Layout(tp=2, dp=2))
    parts = Dispatch.MEGATRON_COMPUTE.scatter(mesh, (batch_of([1, 1]),), {})
    results = {rank: {"loss": float(rank)} for rank in range(4)}
    assert Dispatch.MEGATRON_COMPUTE.gather(parts, results) == [{"loss": 0.0}, {"loss": 2.0}]


LENGTHS = [100, 40, 30, 20, 10]  # in two equal parts, and in four that are as equal as can be
TWO, FOUR = [(0,), (1, 2, 3, 4)], [(0,), (1,), (2,), (3, 4)]
TP2_DP2, CP2_DP2, DP2_PP2 = Layout(tp=2, dp=2), Layout(cp=2, dp=2), Layout(dp=2, pp=2)
TP2_PP2, CP2_PP2 = Layout(tp=2, pp=2), Layout(cp=2, pp=2)
EACH = [(0,), (1,), (2,), (3,)]
SPLITS = [  # mode, layout, ranks of each part, which of them returns its result, rows of each part
    ("DP_COMPUTE", TP2_DP2, EACH, [0, 1, 2, 3], FOUR),
    ("DP_COMPUTE", DP2_PP2, EACH, [0, 1, 2, 3], FOUR),
    ("DP_COMPUTE_WITH_FUNC", CP2_DP2, EACH, [0, 1, 2, 3], FOUR),
    ("MEGATRON_COMPUTE", TP2_DP2, [(0, 1), (2, 3)], [0, 2], TWO),
    ("MEGATRON_COMPUTE", CP2_DP2, [(0, 1), (2, 3)], [0, 2], TWO),
    ("MEGATRON_COMPUTE", DP2_PP2, [(0, 2), (1, 3)], [2, 3], TWO),
    ("MEGATRON_COMPUTE", CP2_PP2, [(0, 1, 2, 3)], [2], [(0, 1, 2, 3, 4)]),
    ("MEGATRON_PP_AS_DP", TP2_DP2, [(0, 1), (2, 3)], [0, 2], TWO),
    ("MEGATRON_PP_AS_DP", TP2_PP2, [(0, 1), (2, 3)], [0, 2], TWO),
    ("MEGATRON_PP_AS_DP", CP2_PP2, [(0, 1), (2, 3)], [0, 2], TWO),
    ("MEGATRON_PP_AS_DP", DP2_PP2, [(0,), (2,), (1,), (3,)], [0, 2, 1, 3], FOUR),
]


@pytest.mark.parametrize(("mode", "layout", "ranks", "outputs", "rows"), SPLITS)
def test_each_mode_splits_an_uneven_batch_as_worked_out_by_hand(
    mode: str, layout: Layout, ranks: list, outputs: list, rows: list
):
    dispatch: DispatchMode = getattr(Dispatch, mode)
    first = [int] if mode == "DP_COMPUTE_WITH_FUNC" else []
    parts = dispatch.scatter(Mesh(layout), (*first, batch_of(LENGTHS), "word"), {"scale": 2})
    assert [part.ranks for part in parts] == ranks
    assert [part.output_rank for part in parts] == outputs
    assert [part.rows for part in parts] == rows
    for part in parts:
        *function, batch, word = part.args
        assert (function, word, part.kwargs) == (first, "word", {"scale": 2})
        assert batch.array("row").tolist() == list(part.rows or ())
    # Each rank writes its number; what ranks without an output return is dropped.
    results = {
        rank: Batch({"writer": part.args[-2].array("row") * 10 + rank})
        for part in parts
        for rank in part.ranks
    }
    expected = {
        row: 10 * row + rank
        for rank, rank_rows in zip(outputs, rows, strict=True)
        for row in rank_rows
    }
    joined = dispatch.gather(parts, results)
    assert joined.array("writer").tolist() == [expected[row] for row in range(len(LENGTHS))]
    words = {rank: f"rank {rank}" for rank in range(4)}
    assert dispatch.gather(parts, words) == [f"rank {rank}" for rank in outputs]


@pytest.mark.parametrize(
    ("layout", "ranks", "outputs"),
    [(TP2_DP2, [(0, 1), (2, 3)], [0, 2]), (DP2_PP2, [(0, 2), (1, 3)], [2, 3])],
)
def test_each_mini_batch_is_split_by_itself_as_worked_out_by_hand(layout, ranks, outputs):
    # The first has the uneven rows from above; the second as much in its last as in both others.
    # The third has a row, which one rank gets.
    batch, mode = batch_of([*LENGTHS, 10, 40, 50, 5]), Dispatch.MINI_BATCHES
    parts = mode.scatter(Mesh(layout), (batch,), {"sizes": [5, 3, 1], "temperature": 0.5})
    assert [part.ranks for part in parts] == ranks
    assert [part.output_rank for part in parts] == outputs
    assert [part.args[0].array("row").tolist() for part in parts] == [[0, 5, 6, 8], [1, 2, 3, 4, 7]]
    assert [part.kwargs for part in parts] == [
        {"sizes": sizes, "temperature": 0.5} for sizes in ([1, 2, 1], [4, 1, 0])
    ]
    assert mode.gather(parts, {rank: [rank, rank] for rank in range(4)}) == [
        [r, r] for r in outputs
    ]


def test_without_sizes_or_on_one_data_parallel_rank_mini_batches_stay_as_they_are():
    batch, mode = batch_of(LENGTHS), Dispatch.MINI_BATCHES
    parts = mode.scatter(Mesh(TP2_DP2), (batch,), {})
    assert [part.rows for part in parts] == TWO
    [part] = mode.scatter(Mesh(CP2_PP2), (batch,), {"sizes": [2, 3]})
    assert part.args[0] is batch and part.kwargs == {"sizes": [2, 3]}
    with pytest.raises(ValueError, match=r"mini-batches of \[2, 2\] rows of a batch of 5"):
        mode.scatter(Mesh(CP2_PP2), (batch,), {"sizes": [2, 2]})
    with pytest.raises(TypeError, match="mini-batches of a list; allowed: a Batch"):
        mode.scatter(Mesh(CP2_PP2), ([batch],), {"sizes": [5]})


def test_one_to_all_and_rank_zero():
    mesh = Mesh(TP2_DP2)
    parts = Dispatch.ONE_TO_ALL.scatter(mesh, (3,), {"b": 4})
    assert Dispatch.ONE_TO_ALL.gather(parts, run(parts, lambda a, b: a + b)) == [7] * 4
    parts = Dispatch.RANK_ZERO.scatter(mesh, (3,), {"b": 4})
    assert [part.ranks for part in parts] == [(0,)]
    assert Dispatch.RANK_ZERO.gather(parts, {0: "answer"}) == "answer"


def test_all_to_all_gives_each_rank_its_own_entry_whatever_its_length():
    batches = [batch_of(lengths) for lengths in ([3, 1], [], [2], [1, 1, 1])]
    mode = Dispatch.ALL_TO_ALL
    parts = mode.scatter(Mesh(DP2_PP2), (batches,), {"scale": (1, 10, 100, 1000)})
    assert [part.ranks for part in parts] == EACH
    scaled = run(parts, lambda batch, scale: len(batch) * scale)
    assert mode.gather(parts, scaled) == [2, 0, 100, 3000]
    for value, problem in (([1, 2], "has 2"), (batches[0], "is a Batch")):
        with pytest.raises(ValueError, match=f"argument 'scale' {problem}; it must be a list of 4"):
            mode.scatter(Mesh(DP2_PP2), (), {"scale": value})


def registration(mode: DispatchMode, execute: str = "all") -> Registration:
    class Worker:
        @register(dispatch_mode=mode, execute=execute)
        def method(self) -> None: ...

    return get_registered_methods(Worker)["method"]


def test_on_rank_zero_a_mode_does_what_it_would_in_a_group_of_one_rank():
    batch, mesh = batch_of(LENGTHS), Mesh(TP2_DP2)
    for mode in (Dispatch.DP_COMPUTE, Dispatch.MEGATRON_COMPUTE, Dispatch.MEGATRON_PP_AS_DP):
        [part] = registration(mode, "rank_zero").scatter(mesh, (batch,), {})
        assert (part.ranks, part.rows) == ((0,), (0, 1, 2, 3, 4))
        assert mode.gather([part], {0: part.args[0]}).array("row").tolist() == [0, 1, 2, 3, 4]
    for mode, value in ((Dispatch.ONE_TO_ALL, 7), (Dispatch.ALL_TO_ALL, [7])):
        [part] = registration(mode, "rank_zero").scatter(mesh, (value,), {})
        assert (part.ranks, part.args) == ((0,), (7,))
        assert mode.gather([part], {0: "answer"}) == ["answer"]


def send_to_odd_ranks(mesh: Mesh, args: tuple, kwargs: dict) -> list[CallPart]:
    odd = tuple(range(1, mesh.world_size, 2))
    return [CallPart(odd, odd[-1], args, kwargs)]


def get_last_result(parts: Sequence[CallPart], results: Mapping[int, Any]) -> Any:
    return results[parts[0].output_rank]


def test_a_custom_mode_is_declared_like_the_built_in_ones():
    custom = registration(DispatchMode(scatter=send_to_odd_ranks, gather=get_last_result))
    parts = custom.scatter(Mesh(TP2_DP2), ("text",), {})
    assert parts == [CallPart((1, 3), 3, ("text",), {})]
    assert custom.dispatch_mode.gather(parts, {1: "one", 3: "three"}) == "three"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([CallPart((0, 4), None, (), {})], "calls rank 4 in a group of 4 ranks"),
        ([CallPart((0, 1), None, (), {}), CallPart((1,), None, (), {})], "calls rank 1 twice"),
        ([CallPart((0, 1), 2, (), {})], r"result of rank 2, which is not among .* \[0, 1\]"),
        ([], "calls no rank"),
    ],
)
def test_parts_of_a_custom_mode_that_no_group_can_run_are_refused(parts: list, message: str):
    custom = registration(DispatchMode(scatter=lambda *_: parts, gather=list_by_rank))
    with pytest.raises(ValueError, match=message):
        custom.scatter(Mesh(TP2_DP2), (), {})


def test_bad_registrations_are_refused():
    with pytest.raises(TypeError, match="dispatch_mode is 'one_to_all'; allowed: an attribute of"):
        register(dispatch_mode="one_to_all")
    with pytest.raises(ValueError, match="'rank_one' is not a valid Execute"):
        register(execute="rank_one")


def test_scatter_looks_at_each_of_thousands_of_ranks_once(
    monkeypatch: pytest.MonkeyPatch,
):
    looks, coordinate = Counter(), Mesh.get_coordinate

    def count_looks(mesh: Mesh, rank: int) -> Coordinate:
        looks[mesh.world_size] += 1
        return coordinate(mesh, rank)

    monkeypatch.setattr(Mesh, "get_coordinate", count_looks)
    for dp in (128, 512):
        mesh = Mesh(Layout(tp=8, dp=dp))
        parts = Dispatch.MEGATRON_COMPUTE.scatter(mesh, (batch_of([1] * dp),), {})
        assert [part.ranks[0] for part in parts] == list(range(0, 8 * dp, 8))
    assert looks[4096] == 4 * looks[1024]


def test_bad_calls_are_refused():
    mesh = Mesh(Layout(dp=2))
    with pytest.raises(TypeError, match="the first argument is a Batch; it must be a function"):
        Dispatch.DP_COMPUTE_WITH_FUNC.scatter(mesh, (batch_of([1]),), {})
    with pytest.raises(TypeError, match="without a Batch"):
        Dispatch.MEGATRON_COMPUTE.scatter(mesh, (1,), {})
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        Dispatch.MEGATRON_COMPUTE.scatter(mesh, (batch_of([1, 1]), batch_of([1, 1, 1])), {})
    parts = Dispatch.MEGATRON_COMPUTE.scatter(mesh, (batch_of([1, 1]),), {})
    with pytest.raises(ValueError, match="rank 0 returned a batch of 2 rows for 1"):
        Dispatch.MEGATRON_COMPUTE.gather(parts, {rank: batch_of([1, 1]) for rank in (0, 1)})
