"""A batch by reference against the same operation on a plain batch; what it takes to travel."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.controller import object_columns
from mcore_rl.controller.dispatch import Dispatch, register, registered_methods
from mcore_rl.controller.object_columns import (
    MOST_PIECES,
    NUM_PIECES,
    LostColumnsError,
    fetch,
    num_pieces,
    pieces,
    store,
)
from mcore_rl.controller.rank_actor import by_reference
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.data.batch import FILL_VALUES, Array, Batch, Jagged


@dataclass(frozen=True)
class Reference:
    number: int


class Store:
    """`ray.put` and `ray.get`."""

    def __init__(self) -> None:
        self.objects: list[bytes] = []

    def put(self, value: Any) -> Reference:
        self.objects.append(pickle.dumps(value))
        return Reference(len(self.objects) - 1)

    def get(self, references: list[Reference], timeout: float | None) -> list[Any]:
        return [pickle.loads(self.objects[one.number]) for one in references]


@pytest.fixture(autouse=True)
def objects(monkeypatch: pytest.MonkeyPatch) -> Store:
    """An object has about three samples."""
    made = Store()
    monkeypatch.setattr(object_columns, "ray", made)
    monkeypatch.setattr(object_columns, "_object_bytes", lambda: 300)
    return made


def batch_of(rng: np.random.Generator, num_rows: int, *filled: str) -> Batch:
    def along(lengths: Array, dtype: str, *entry: int) -> Jagged:
        rows = [rng.integers(0, 100, (length, *entry)).astype(dtype) for length in lengths]
        if not rows:
            return Jagged(np.empty((0, *entry), dtype), np.zeros(1, np.int64))
        return Jagged.pack(rows, dtype)

    prompts, responses = rng.integers(0, 9, (2, num_rows))
    return Batch(
        {
            "prompt_ids": along(prompts, "int64"),
            "response_ids": along(responses, "int64"),
            "log_probs": along(responses, "float32"),
            "routed_experts": along(prompts + responses, "int16", 2, 3),
            "seen/first": along(responses, "uint8", 4),
            "seen/none": along(responses, "uint8", 0),
            **{name: along(responses, FILL_VALUES[name].dtype.str) for name in filled},
            "rewards": rng.random(num_rows).astype(np.float32),
            "group_ids": rng.integers(-3, 1 << 40, num_rows),
            "finish_reasons": rng.choice(np.array(["stop", "length", ""]), num_rows),
        }
    )


def assert_same(found: Batch, expected: Batch) -> None:
    names = {name for name in found.columns if name not in ("prompt_tokens", "response_tokens")}
    assert names == {*expected.columns}
    for name, column in expected.columns.items():
        other = found[name]
        if isinstance(column, Jagged):
            assert isinstance(other, Jagged)
            assert other.offsets.tolist() == column.offsets.tolist(), name
            assert (other.values.dtype, other.values.shape) == (
                column.values.dtype,
                column.values.shape,
            ), name
            np.testing.assert_array_equal(other.values, column.values, err_msg=name)
        else:
            assert not isinstance(other, Jagged)
            if len(column):
                assert other.dtype == column.dtype or column.dtype.kind == "U", name
            np.testing.assert_array_equal(other, column, err_msg=name)


Pair = tuple[RemoteBatch, Batch]


def take(rng: np.random.Generator, pair: Pair) -> Pair:
    rows = rng.integers(0, max(len(pair[1]), 1), rng.integers(0, 9) if len(pair[1]) else 0)
    return pair[0].take(rows.tolist()), pair[1].take(rows.tolist())


def sliced(rng: np.random.Generator, pair: Pair) -> Pair:
    first, end = sorted(rng.integers(0, len(pair[1]) + 1, 2).tolist())
    rows = range(first, end)
    return pair[0].take(rows), pair[1].take(rows)


def concat(rng: np.random.Generator, pair: Pair) -> Pair:
    """With one that may lack or have a column of FILLED, before and after."""
    filled = ["state_ids"] if rng.random() < 0.5 else []
    other = batch_of(rng, int(rng.integers(1, 6)), *filled)
    other = other.select(*[n for n in other.columns if n in pair[1] or n in FILL_VALUES])
    remote = store(other)
    if not len(pair[1]):  # what has no rows says nothing of columns
        return remote, other
    missing = [name for name in pair[1].columns if name not in other and name not in FILL_VALUES]
    mine, theirs = pair[0].drop_columns(*missing), pair[1]
    theirs = theirs.select(*[name for name in theirs.columns if name not in missing])
    both = RemoteBatch.concat([mine, remote, mine]), Batch.concat([theirs, other, theirs])
    return both


def union(rng: np.random.Generator, pair: Pair) -> Pair:
    """With a column of one value a sample and one along tokens, in other objects."""
    responses = pair[1].jagged("response_ids")
    new = responses.with_values(rng.random(len(responses.values)))
    made = Batch({"values": new, "rewards": rng.random(len(pair[1])).astype(np.float32)})
    return pair[0].union(store(made)), pair[1].with_columns(**made.columns)


def travel(rng: np.random.Generator, pair: Pair) -> Pair:
    return pickle.loads(pickle.dumps(pair[0])), pair[1]


def parts(rng: np.random.Generator, pair: Pair) -> Pair:
    """In parts, some of them empty, and joined again."""
    return RemoteBatch.concat(pair[0].chunk(4)), pair[1]


STEPS: list[Callable[[np.random.Generator, Pair], Pair]] = [
    take, sliced, concat, union, travel, parts,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_any_operations_in_a_row_give_what_they_give_on_a_plain_batch(seed: int):
    rng = np.random.default_rng(seed)
    plain = batch_of(rng, int(rng.integers(0, 12)), *(["process_rewards"] if seed % 2 else []))
    pair = store(plain), plain
    assert_same(fetch(pair[0]), plain)
    for _ in range(6):
        pair = STEPS[rng.integers(len(STEPS))](rng, pair)
        remote, plain = pair
        assert len(remote) == len(plain)
        assert_same(fetch(remote), plain)
        for name in ("prompt_ids", "response_ids"):
            assert remote.lengths(name).tolist() == plain.lengths(name).tolist()
        assert remote.num_tokens.tolist() == plain.num_tokens.tolist()


def test_a_column_that_some_samples_lack_is_filled_where_it_is_fetched():
    rng = np.random.default_rng(0)
    with_states, without = batch_of(rng, 3, "state_ids"), batch_of(rng, 2)
    expected = Batch.concat([without, with_states, without])
    joined = RemoteBatch.concat([store(one) for one in (without, with_states, without)])
    assert_same(fetch(joined), expected)
    assert set(fetch(joined).jagged("state_ids").values[:1].tolist()) <= {-1}
    # In the last, a row that lacks it comes before the second of an object.
    for rows in ([6, 0, 3, 3, 2], [0, 4]):
        sent = joined.take(rows).select("state_ids", "rewards").to_read()
        found = fetch(pickle.loads(pickle.dumps(sent)))
        assert_same(found, expected.take(rows).select("state_ids", "rewards"))


def test_select_renamed_and_without_choose_columns():
    batch = batch_of(np.random.default_rng(1), 5)
    remote = store(batch)
    chosen = fetch(remote.select("response_ids", "rewards"))
    assert_same(chosen, batch.select("response_ids", "rewards"))
    renamed = fetch(remote.rename_columns(log_probs="reference_log_probs"))
    assert "log_probs" not in renamed
    values = renamed.jagged("reference_log_probs").values
    np.testing.assert_array_equal(values, batch.jagged("log_probs").values)
    fewer = remote.drop_columns("log_probs", "group_ids")
    assert {"log_probs", "group_ids"}.isdisjoint(fewer.names)
    with pytest.raises(KeyError, match="no column 'advantage'"):
        remote.select("advantage")
    with pytest.raises(TypeError, match="'response_ids' is along tokens"):
        remote.array("response_ids")


def test_batches_of_other_rows_are_refused():
    rng = np.random.default_rng(2)
    three, two = store(batch_of(rng, 3)), store(batch_of(rng, 2))
    with pytest.raises(ValueError, match="3 and 2 rows"):
        three.union(two)
    with pytest.raises(ValueError, match="of 2 rows"):
        RemoteBatch(two.own, three.remote)
    with pytest.raises(KeyError, match="'log_probs'"):
        RemoteBatch.concat([three, two.drop_columns("log_probs")])


def test_take_drops_references_that_no_row_is_left_of(objects: Store):
    remote = store(batch_of(np.random.default_rng(3), 12))
    places = remote.remote["response_ids"].places
    together = [column for name, column in remote.remote.items() if "/" not in name]
    assert len(objects.objects) > len(places.references) > 2
    assert {id(column.places) for column in together} == {id(places)}
    row = int(np.flatnonzero(places.objects == 1)[0])
    kept = remote.take([row, 0])
    taken = kept.remote["response_ids"].places
    assert [one.number for one in taken.references] == [0, 1]
    assert taken.objects.tolist() == [1, 0]
    together = [column for name, column in kept.remote.items() if "/" not in name]
    assert {id(column.places) for column in together} == {id(taken)}
    assert not remote.take([]).remote["log_probs"].places.references


def test_what_is_let_go_of_has_its_columns_and_lengths_and_no_references():
    """And is joined with what has them, which loses nothing."""
    batch, other = (batch_of(np.random.default_rng(seed), 4) for seed in (0, 1))
    gone = store(batch).let_go()
    assert gone.names == store(batch).names
    assert all(not column.places.references for column in gone.remote.values())
    assert gone.num_tokens.tolist() == batch.num_tokens.tolist()
    both = RemoteBatch.concat([gone, store(other), gone])
    np.testing.assert_array_equal(both.array("rewards")[4:8], other.array("rewards"))
    assert_same(fetch(both.take(range(4, 8))), other)


def test_a_reader_of_a_part_fetches_the_objects_of_that_part_and_of_what_all_read(objects: Store):
    batch = batch_of(np.random.default_rng(3), 12)
    remote = store(batch)
    read = remote.of_part("first")
    assert {*remote.names} - {*read.names} == {"seen/none"}
    assert_same(fetch(read), batch.drop_columns("seen/none"))
    assert "rewards/style" in remote.with_columns(**{"rewards/style": np.zeros(12)}).of_part("").own
    references = {
        name: {one.number for one in column.places.references}
        for name, column in remote.remote.items()
    }
    assert len(references["seen/none"]) == 1  # of no bytes
    common = references["response_ids"]
    assert common.isdisjoint(references["seen/first"] | references["seen/none"])
    assert references["log_probs"] == common
    assert references["seen/first"].isdisjoint(references["seen/none"])
    assert sorted(common.union(*references.values())) == list(range(len(objects.objects)))


@pytest.mark.parametrize("lengths", [[1] * 40, [9] * 9, [1] * 8 + [90], [90] + [1] * 8, [7, 0] * 9])
def test_new_samples_take_as_many_objects_as_their_call_returns(objects: Store, lengths: list[int]):
    """Also where each is larger than an object is to be, but for one."""
    rows = [np.full((length, 4, 10), row, np.int64) for row, length in enumerate(lengths)]
    ids = Jagged.pack([[row] * length for row, length in enumerate(lengths)], np.int64)
    batch = Batch({"response_ids": ids, "seen/first": Jagged.pack(rows, np.int64)})
    found, made = pieces(batch, NUM_PIECES, 1)
    assert len(made) == 2 * NUM_PIECES
    sizes = [one["seen/first"].values.nbytes for one in made if one and "seen/first" in one]
    whole = batch.jagged("seen/first").values.nbytes
    assert len(sizes) <= NUM_PIECES
    assert max(sizes) <= whole // NUM_PIECES + whole * max(lengths) // sum(lengths)
    if set(lengths) == {1}:
        assert set(sizes) == {whole // NUM_PIECES}
    assert_same(fetch(found.at([objects.put(one) for one in made])), batch)


def test_more_parts_than_a_group_was_started_for_are_refused(objects: Store):
    batch = batch_of(np.random.default_rng(3), 12)
    told = r"parts \['seen/first', 'seen/none'\]; allowed: 1, the num_parts of their WorkerGroup"
    with pytest.raises(ValueError, match=told):
        pieces(batch, NUM_PIECES, 1)
    assert len(pieces(batch, NUM_PIECES, 2)[1]) == 3 * NUM_PIECES


def test_a_call_that_may_return_more_returns_more_objects_and_none_is_larger(objects: Store):
    """Here an object has 300 bytes, or up to a sample more."""
    ids = Jagged.pack([[row] * 10 for row in range(90)], np.int64)
    batch = Batch({"response_ids": ids})
    sizes = {}
    for num_bytes in (0, ids.values.nbytes):
        found, made = pieces(batch, num_pieces(num_bytes))
        sizes[num_bytes] = [one["response_ids"].values.nbytes for one in made if one]
        assert_same(fetch(found.at([objects.put(one) for one in made])), batch)
    assert len(sizes[0]) == NUM_PIECES and max(sizes[0]) > 800
    assert max(sizes[ids.values.nbytes]) <= 300 + 80
    assert num_pieces(1 << 40) == MOST_PIECES


@pytest.mark.parametrize(
    "column",
    [
        np.array([], np.int64),
        np.array([7], np.int64),
        np.array([5, 5, 5, 5], np.int32),
        np.array([3, 1, -1, -3], np.int64),
        np.array([-128, 127, 0], np.int64),
        np.array([-129, 7, 0], np.int64),
        np.array([1 << 40, -(1 << 62), 3], np.int64),
        np.array([-(1 << 63), (1 << 63) - 1], np.int64),
        np.array([True, False, True]),
        np.array([0.1, np.nan, -np.inf], np.float32),
        np.array([0.1, 0.0, -0.0, np.nan] * 3, np.float32),
        np.array([[0.5, 0.5]] * 5),
        np.array([1.5] * 5, np.float16),
        np.array([[1, 2], [3, 4000]], np.int64),
        np.array(["", "stop", "stop"]),
        np.array(["ä" * 40]),
        np.array([], "<U4"),
        np.array([{"a": 1}, None], object),
    ],
    ids=str,
)
def test_a_column_travels_with_its_dtype(column: Array):
    found = pickle.loads(pickle.dumps(RemoteBatch(Batch({"x": column}), {}))).array("x")
    assert found.dtype == column.dtype
    assert found.shape == column.shape
    np.testing.assert_array_equal(found, column)
    if column.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(found), np.signbit(column))


def test_numbers_travel_in_as_few_bytes_as_they_need():
    def size(column: Array) -> int:
        return len(pickle.dumps(RemoteBatch(Batch({"x": column}), {})))

    rng = np.random.default_rng(4)
    empty = size(np.zeros(0, np.int64))
    assert size(np.arange(10_000)) < empty + 20
    assert size(rng.integers(0, 100, 10_000)) < 10_000 + empty + 20
    assert size(rng.integers(0, 30_000, 10_000)) < 20_000 + empty + 20
    few, many = (rng.integers(0, high, 10_000).astype(np.float32) for high in (100, 1000))
    assert size(few) < 10_000 + 400 + empty + 60
    assert size(many) < 40_000 + empty + 60
    assert size(rng.choice(np.array(["stop", "length"]), 10_000)) < 10_000 + empty + 40


class Worker:
    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=("response_ids",), writes=("values",))
    def score(self, batch: Batch) -> Batch: ...


MARKS = registered_methods(Worker)


def test_a_worker_sees_what_it_reads_and_gives_back_what_it_writes():
    batch = batch_of(np.random.default_rng(5), 4)
    selected = MARKS["score"].selected(store(batch))
    given = fetch(selected.to_read())
    assert {*given.columns} == {"response_ids"}
    values = given.jagged("response_ids")
    back = by_reference(given.with_columns(values=values), [given], "score", MARKS["score"])
    assert back.names == ["values"]
    assert_same(fetch(store(batch).union(back)), batch.with_columns(values=values))
    pair = by_reference((given.with_columns(values=values), 3), [given], "score", MARKS["score"])
    assert (pair[0].names, pair[1]) == (["values"], 3)


def test_a_column_that_is_not_declared_is_refused():
    given = fetch(store(batch_of(np.random.default_rng(6), 2)))
    extra = given.with_columns(entropy=given["log_probs"])
    with pytest.raises(ValueError, match="score returned the column 'entropy'; it writes values"):
        by_reference(extra, [given], "score", MARKS["score"])
    changed = given.with_columns(log_probs=given.jagged("response_ids"))
    with pytest.raises(ValueError, match="the column 'log_probs'"):
        by_reference(changed, [given], "score", MARKS["score"])


def test_what_is_lost_or_late_is_one_error(monkeypatch: pytest.MonkeyPatch):
    from ray.exceptions import GetTimeoutError, OwnerDiedError

    batch = store(batch_of(np.random.default_rng(7), 2))

    def failing(error: Exception) -> Any:
        def get(*_: object, **__: object) -> None:
            raise error

        return SimpleNamespace(get=get)

    monkeypatch.setattr(object_columns, "ray", failing(OwnerDiedError("00" * 28, b"", "")))
    with pytest.raises(LostColumnsError, match="process that had stored them has died"):
        fetch(batch)
    monkeypatch.setattr(object_columns, "ray", failing(GetTimeoutError()))
    with pytest.raises(TimeoutError, match="objects have not arrived in 5 s"):
        fetch(batch, 5)
