"""Batches by reference: operations against those of a plain batch, objects, pickles, dead nodes."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.controller import object_columns
from mcore_rl.controller.dispatch import Dispatch, get_registered_methods, register
from mcore_rl.controller.object_columns import (
    DEFAULT_OBJECTS,
    MAX_OBJECTS,
    LostColumnsError,
    count_objects,
    fetch_columns,
    split_into_objects,
    store_columns,
)
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.worker_process import store_outputs
from mcore_rl.data.batch import FILL_VALUES, Array, Batch, Jagged
from tests.notebook import run_in_cell


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
        return [pickle.loads(self.objects[reference.number]) for reference in references]


@pytest.fixture(autouse=True)
def objects(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Store objects of about three samples in this process."""
    made = Store()
    monkeypatch.setattr(object_columns, "ray", made)
    monkeypatch.setattr(object_columns, "_get_object_bytes", lambda: 300)
    return made


def batch_of(rng: np.random.Generator, num_rows: int, *filled: str) -> Batch:
    def make_column(lengths: Array, dtype: str, *entry: int) -> Jagged:
        rows = [rng.integers(0, 100, (length, *entry)).astype(dtype) for length in lengths]
        if not rows:
            return Jagged(np.empty((0, *entry), dtype), np.zeros(1, np.int64))
        return Jagged.pack(rows, dtype)

    prompts, responses = rng.integers(0, 9, (2, num_rows))
    return Batch(
        {
            "prompt_ids": make_column(prompts, "int64"),
            "response_ids": make_column(responses, "int64"),
            "log_probs": make_column(responses, "float32"),
            "routed_experts": make_column(prompts + responses, "int16", 2, 3),
            "seen/first": make_column(responses, "uint8", 4),
            "seen/none": make_column(responses, "uint8", 0),
            **{name: make_column(responses, FILL_VALUES[name].dtype.str) for name in filled},
            "rewards": rng.random(num_rows).astype(np.float32),
            "group_ids": rng.integers(-3, 1 << 40, num_rows),
            "finish_reasons": rng.choice(np.array(["stop", "length", ""]), num_rows),
        }
    )


def assert_same(batch: Batch, expected: Batch) -> None:
    names = {name for name in batch.columns if name not in ("prompt_tokens", "response_tokens")}
    assert names == {*expected.columns}
    for name, column in expected.columns.items():
        other = batch[name]
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


def slice_rows(rng: np.random.Generator, pair: Pair) -> Pair:
    first, end = sorted(rng.integers(0, len(pair[1]) + 1, 2).tolist())
    rows = range(first, end)
    return pair[0].take(rows), pair[1].take(rows)


def concat(rng: np.random.Generator, pair: Pair) -> Pair:
    """Join with a batch that may lack or have a column of FILL_VALUES, before and after."""
    filled = ["state_ids"] if rng.random() < 0.5 else []
    other = batch_of(rng, int(rng.integers(1, 6)), *filled)
    other = other.select(*[n for n in other.columns if n in pair[1] or n in FILL_VALUES])
    remote = store_columns(other)
    if not len(pair[1]):  # a batch without rows has no say in columns
        return remote, other
    missing = [name for name in pair[1].columns if name not in other and name not in FILL_VALUES]
    first, plain = pair[0].drop_columns(*missing), pair[1]
    plain = plain.select(*[name for name in plain.columns if name not in missing])
    return RemoteBatch.concat([first, remote, first]), Batch.concat([plain, other, plain])


def union(rng: np.random.Generator, pair: Pair) -> Pair:
    """Add a column of one value a sample and one along tokens, in other objects."""
    responses = pair[1].jagged("response_ids")
    new = responses.with_values(rng.random(len(responses.values)))
    made = Batch({"values": new, "rewards": rng.random(len(pair[1])).astype(np.float32)})
    return pair[0].union(store_columns(made)), pair[1].with_columns(**made.columns)


def travel(rng: np.random.Generator, pair: Pair) -> Pair:
    return pickle.loads(pickle.dumps(pair[0])), pair[1]


def split_and_join(rng: np.random.Generator, pair: Pair) -> Pair:
    """Split into parts, some of them empty, and join them again."""
    return RemoteBatch.concat(pair[0].chunk(4)), pair[1]


STEPS: list[Callable[[np.random.Generator, Pair], Pair]] = [
    take, slice_rows, concat, union, travel, split_and_join,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_operations_give_the_same_as_on_a_plain_batch(seed: int):
    rng = np.random.default_rng(seed)
    plain = batch_of(rng, int(rng.integers(0, 12)), *(["process_rewards"] if seed % 2 else []))
    pair = store_columns(plain), plain
    assert_same(fetch_columns(pair[0]), plain)
    for _ in range(6):
        pair = STEPS[rng.integers(len(STEPS))](rng, pair)
        remote, plain = pair
        assert len(remote) == len(plain)
        assert_same(fetch_columns(remote), plain)
        for name in ("prompt_ids", "response_ids"):
            assert remote.lengths(name).tolist() == plain.lengths(name).tolist()
        assert remote.num_tokens.tolist() == plain.num_tokens.tolist()


def test_fetch_fills_a_column_that_some_samples_lack():
    rng = np.random.default_rng(0)
    with_states, without = batch_of(rng, 3, "state_ids"), batch_of(rng, 2)
    expected = Batch.concat([without, with_states, without])
    joined = RemoteBatch.concat([store_columns(batch) for batch in (without, with_states, without)])
    assert_same(fetch_columns(joined), expected)
    assert set(fetch_columns(joined).jagged("state_ids").values[:1].tolist()) <= {-1}
    # In the last, a row that lacks it comes before the second of an object.
    for rows in ([6, 0, 3, 3, 2], [0, 4]):
        sent = joined.take(rows).select("state_ids", "rewards").drop_lengths()
        fetched = fetch_columns(pickle.loads(pickle.dumps(sent)))
        assert_same(fetched, expected.take(rows).select("state_ids", "rewards"))


def test_select_renamed_and_without_choose_columns():
    batch = batch_of(np.random.default_rng(1), 5)
    remote = store_columns(batch)
    chosen = fetch_columns(remote.select("response_ids", "rewards"))
    assert_same(chosen, batch.select("response_ids", "rewards"))
    renamed = fetch_columns(remote.rename_columns(log_probs="reference_log_probs"))
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
    three, two = store_columns(batch_of(rng, 3)), store_columns(batch_of(rng, 2))
    with pytest.raises(ValueError, match="3 and 2 rows"):
        three.union(two)
    with pytest.raises(ValueError, match="of 2 rows"):
        RemoteBatch(two.local, three.remote)
    with pytest.raises(KeyError, match="'log_probs'"):
        RemoteBatch.concat([three, two.drop_columns("log_probs")])


def test_take_drops_references_that_no_row_is_left_of(objects: Store):
    remote = store_columns(batch_of(np.random.default_rng(3), 12))
    locations = remote.remote["response_ids"].locations
    together = [column for name, column in remote.remote.items() if "/" not in name]
    assert len(objects.objects) > len(locations.references) > 2
    assert {id(column.locations) for column in together} == {id(locations)}
    row = int(np.flatnonzero(locations.objects == 1)[0])
    two_rows = remote.take([row, 0])
    taken = two_rows.remote["response_ids"].locations
    assert [reference.number for reference in taken.references] == [0, 1]
    assert taken.objects.tolist() == [1, 0]
    together = [column for name, column in two_rows.remote.items() if "/" not in name]
    assert {id(column.locations) for column in together} == {id(taken)}
    assert not remote.take([]).remote["log_probs"].locations.references


def test_drop_references_leaves_columns_and_lengths():
    # A batch that has them loses nothing when both are joined.
    batch, other = (batch_of(np.random.default_rng(seed), 4) for seed in (0, 1))
    gone = store_columns(batch).drop_references()
    assert gone.names == store_columns(batch).names
    assert all(not column.locations.references for column in gone.remote.values())
    assert gone.num_tokens.tolist() == batch.num_tokens.tolist()
    both = RemoteBatch.concat([gone, store_columns(other), gone])
    np.testing.assert_array_equal(both.array("rewards")[4:8], other.array("rewards"))
    assert_same(fetch_columns(both.take(range(4, 8))), other)


def test_select_part_leaves_objects_of_that_part_and_of_common_columns(objects: Store):
    batch = batch_of(np.random.default_rng(3), 12)
    remote = store_columns(batch)
    read = remote.select_part("first")
    assert {*remote.names} - {*read.names} == {"seen/none"}
    assert_same(fetch_columns(read), batch.drop_columns("seen/none"))
    assert (
        "rewards/style"
        in remote.with_columns(**{"rewards/style": np.zeros(12)}).select_part("").local
    )
    references = {
        name: {reference.number for reference in column.locations.references}
        for name, column in remote.remote.items()
    }
    assert len(references["seen/none"]) == 1  # of no bytes
    common = references["response_ids"]
    assert common.isdisjoint(references["seen/first"] | references["seen/none"])
    assert references["log_probs"] == common
    assert references["seen/first"].isdisjoint(references["seen/none"])
    assert sorted(common.union(*references.values())) == list(range(len(objects.objects)))


@pytest.mark.parametrize("lengths", [[1] * 40, [9] * 9, [1] * 8 + [90], [90] + [1] * 8, [7, 0] * 9])
def test_split_into_objects_stays_within_the_results_of_a_call(objects: Store, lengths: list[int]):
    rows = [np.full((length, 4, 10), row, np.int64) for row, length in enumerate(lengths)]
    ids = Jagged.pack([[row] * length for row, length in enumerate(lengths)], np.int64)
    batch = Batch({"response_ids": ids, "seen/first": Jagged.pack(rows, np.int64)})
    remote, made = split_into_objects(batch, DEFAULT_OBJECTS, 1)
    assert len(made) == 2 * DEFAULT_OBJECTS
    sizes = [o["seen/first"].values.nbytes for o in made if o and "seen/first" in o]
    num_bytes = batch.jagged("seen/first").values.nbytes
    assert len(sizes) <= DEFAULT_OBJECTS
    assert max(sizes) <= num_bytes // DEFAULT_OBJECTS + num_bytes * max(lengths) // sum(lengths)
    if set(lengths) == {1}:
        assert set(sizes) == {num_bytes // DEFAULT_OBJECTS}
    assert_same(fetch_columns(remote.with_references([*map(objects.put, made)])), batch)


def test_more_parts_than_a_group_was_started_for_are_refused(objects: Store):
    batch = batch_of(np.random.default_rng(3), 12)
    message = r"parts \['seen/first', 'seen/none'\]; allowed: 1, the num_parts of their WorkerGroup"
    with pytest.raises(ValueError, match=message):
        split_into_objects(batch, DEFAULT_OBJECTS, 1)
    assert len(split_into_objects(batch, DEFAULT_OBJECTS, 2)[1]) == 3 * DEFAULT_OBJECTS


def test_count_objects_allows_more_objects_of_the_usual_size(objects: Store):
    # An object has 300 bytes here, or up to a sample more.
    ids = Jagged.pack([[row] * 10 for row in range(90)], np.int64)
    batch = Batch({"response_ids": ids})
    sizes = {}
    for num_bytes in (0, ids.values.nbytes):
        remote, made = split_into_objects(batch, count_objects(num_bytes))
        sizes[num_bytes] = [o["response_ids"].values.nbytes for o in made if o]
        assert_same(fetch_columns(remote.with_references([*map(objects.put, made)])), batch)
    assert len(sizes[0]) == DEFAULT_OBJECTS and max(sizes[0]) > 800
    assert max(sizes[ids.values.nbytes]) <= 300 + 80
    assert count_objects(1 << 40) == MAX_OBJECTS


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
    received = pickle.loads(pickle.dumps(RemoteBatch(Batch({"x": column}), {}))).array("x")
    assert received.dtype == column.dtype
    assert received.shape == column.shape
    np.testing.assert_array_equal(received, column)
    if column.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(received), np.signbit(column))


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


MARKS = get_registered_methods(Worker)


def test_a_worker_gets_columns_that_it_reads_and_returns_those_it_writes():
    batch = batch_of(np.random.default_rng(5), 4)
    selected = MARKS["score"].select_columns(store_columns(batch))
    given = fetch_columns(selected.drop_lengths())
    assert {*given.columns} == {"response_ids"}
    values = given.jagged("response_ids")
    back = store_outputs(given.with_columns(values=values), [given], "score", MARKS["score"])
    assert back.names == ["values"]
    assert_same(fetch_columns(store_columns(batch).union(back)), batch.with_columns(values=values))
    pair = store_outputs((given.with_columns(values=values), 3), [given], "score", MARKS["score"])
    assert (pair[0].names, pair[1]) == (["values"], 3)


def test_a_column_that_is_not_declared_is_refused():
    given = fetch_columns(store_columns(batch_of(np.random.default_rng(6), 2)))
    extra = given.with_columns(entropy=given["log_probs"])
    with pytest.raises(ValueError, match="score returned the column 'entropy'; it writes values"):
        store_outputs(extra, [given], "score", MARKS["score"])
    changed = given.with_columns(log_probs=given.jagged("response_ids"))
    with pytest.raises(ValueError, match="the column 'log_probs'"):
        store_outputs(changed, [given], "score", MARKS["score"])


def test_fetch_raises_one_error_for_lost_or_late_columns(monkeypatch: pytest.MonkeyPatch):
    from ray.exceptions import GetTimeoutError, OwnerDiedError

    batch = store_columns(batch_of(np.random.default_rng(7), 2))

    def fail_with(error: Exception) -> Any:
        def get(*_: object, **__: object) -> None:
            raise error

        return SimpleNamespace(get=get)

    monkeypatch.setattr(object_columns, "ray", fail_with(OwnerDiedError("00" * 28, b"", "")))
    with pytest.raises(LostColumnsError, match="process that had stored them has died"):
        fetch_columns(batch)
    monkeypatch.setattr(object_columns, "ray", fail_with(GetTimeoutError()))
    with pytest.raises(TimeoutError, match="objects have not arrived in 5 s"):
        fetch_columns(batch, 5)


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """A port that answers, and one that refuses and that nobody else gets."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        yield listening.getsockname()[1], refusing.getsockname()[1]


class NodesOfRay:
    """Ray, which knows after some looks that node 1 is dead."""

    def __init__(self, ports: tuple[int, int], looks: float) -> None:
        self._ports, self._looks, self.num_looks = ports, looks, 0

    def nodes(self) -> list[dict[str, Any]]:
        self.num_looks += 1
        alive = True, self.num_looks <= self._looks
        return [
            {
                "NodeID": str(number), "NodeName": f"n{number}", "Alive": alive[number],
                "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port,
            }
            for number, port in enumerate(self._ports)
        ]  # fmt: skip


@pytest.fixture(autouse=True)
def reset_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_columns, "_unreachable", set())


def test_check_nodes_waits_for_a_silent_node_until_ray_knows(monkeypatch, ports):
    ray = NodesOfRay(ports, looks=2)
    monkeypatch.setattr(object_columns, "ray", ray)
    assert object_columns.check_nodes() == {"0": True, "1": False}
    assert ray.num_looks == 3
    nodes = run_in_cell(object_columns.check_nodes)  # the driver of a notebook
    assert nodes == {"0": True, "1": False} and ray.num_looks == 4


def test_check_nodes_reports_an_unreachable_node_and_does_not_wait_again(
    monkeypatch, ports, capsys
):
    ray = NodesOfRay(ports, looks=float("inf"))
    monkeypatch.setattr(object_columns, "ray", ray)
    monkeypatch.setattr(object_columns, "_NOTICE_S", 0.0)
    for _ in range(2):
        assert object_columns.check_nodes() == {"0": True, "1": True}
    message = f"no connection from the driver to Ray on n1 (port {ports[1]}), which Ray says live"
    assert capsys.readouterr().out.count(message) == 1
    assert ray.num_looks <= 4


def test_check_nodes_does_not_connect_to_a_single_node(monkeypatch):
    node = {"NodeID": "0", "Alive": True}
    monkeypatch.setattr(object_columns, "ray", SimpleNamespace(nodes=lambda: [node]))
    assert object_columns.check_nodes() == {"0": True}
