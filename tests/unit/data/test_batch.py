import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample, TurnSpan

rows_of_numbers = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=6), max_size=10)


def sample(number: int, length: int) -> Sample:
    return Sample(
        prompt_ids=[number] * (number + 1),
        response_ids=list(range(length)),
        response_mask=[1] * length,
        rollout_log_probs=[-0.5] * length,
        weight_versions=[number] * length,
        finish_reason="stop" if number % 2 else "length",
        group_id=number // 2,
        reward=number / 4,
    )


def assert_same(left: Batch, right: Batch) -> None:
    assert left.columns.keys() == right.columns.keys()
    for name, column in left.columns.items():
        if isinstance(column, Jagged):
            np.testing.assert_array_equal(column.offsets, right.jagged(name).offsets)
            np.testing.assert_array_equal(column.values, right.jagged(name).values)
            assert column.values.dtype == right.jagged(name).values.dtype
        else:
            np.testing.assert_array_equal(column, right.array(name))


@given(rows=rows_of_numbers)
def test_jagged_gives_back_the_rows_it_was_made_of(rows):
    jagged = Jagged.pack(rows, np.int64)
    assert [row.tolist() for row in jagged] == rows
    assert jagged.lengths.tolist() == [len(row) for row in rows]


@given(rows=rows_of_numbers.filter(bool), data=st.data())
def test_jagged_take_is_list_indexing(rows, data):
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    taken = Jagged.pack(rows, np.int64).take(picks)
    assert [row.tolist() for row in taken] == [rows[i] for i in picks]
    assert taken.values.dtype == np.int64


def test_jagged_take_is_list_indexing_for_long_rows():
    rows = [list(range(100 * number, 100 * number + 70 + number)) for number in range(4)]
    taken = Jagged.pack(rows, np.int64).take([2, 0, 3, 0])
    assert [row.tolist() for row in taken] == [rows[i] for i in (2, 0, 3, 0)]


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=10), data=st.data())
def test_batch_take_is_list_indexing_of_every_column(lengths, data):
    batch = Batch.collate([sample(number, length) for number, length in enumerate(lengths)])
    picks = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=12))
    taken = batch.take(picks)
    assert taken.columns.keys() == batch.columns.keys()
    for name, column in batch.columns.items():
        rows = [np.asarray(row).tolist() for row in column]
        assert [np.asarray(row).tolist() for row in taken[name]] == [rows[i] for i in picks], name


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=10), data=st.data())
def test_batch_cut_up_by_take_and_joined_by_concat_is_the_same_batch(lengths, data):
    batch = Batch.collate([sample(number, length) for number, length in enumerate(lengths)])
    cuts = data.draw(st.sets(st.integers(1, len(lengths)), max_size=4))
    bounds = sorted({0, len(lengths)} | cuts)
    parts = [batch.take(range(low, high)) for low, high in itertools.pairwise(bounds)]
    assert_same(Batch.concat(parts), batch)


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=10), data=st.data())
def test_batch_in_another_order_and_back_is_the_same_batch(lengths, data):
    batch = Batch.collate([sample(number, length) for number, length in enumerate(lengths)])
    order = data.draw(st.permutations(range(len(lengths))))
    assert_same(batch.take(order).take(np.argsort(order).tolist()), batch)


def test_a_column_that_only_some_of_the_batches_to_be_joined_have_is_refused():
    plain = Batch.collate([sample(0, 2)])
    more = plain.with_columns(teacher=np.array(["a"]))
    for batches in ([plain, more], [more, plain]):
        with pytest.raises(KeyError, match="to be joined has no column 'teacher'"):
            Batch.concat(batches)
    assert_same(Batch.concat([plain.take([]), more, plain.take([])]), more)


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="columns of a batch differ in length"):
        Batch({"a": np.zeros(2), "b": Jagged.pack([[1]], np.int64)})


def test_a_sample_whose_columns_do_not_fit_its_response_is_refused():
    with pytest.raises(ValueError, match=r"Sample\.response_mask has 2 entries for 1 response"):
        Sample([1], [2], [1, 1], [-0.1], [0], "stop", 0)


def test_offsets_of_rows_that_are_taken_count_beyond_four_bytes():
    for rows in ([0, 0], []):
        assert Jagged.pack([[1, 2]], np.int8).take(rows).offsets.dtype == np.int64


def test_a_token_of_no_turn_has_the_number_of_none():
    made = replace(sample(0, 5), turn_spans=[TurnSpan("a", 0, 2), TurnSpan("b", 3, 4)])
    numbers = Batch.collate([made, sample(1, 2)]).jagged("turn_numbers")
    assert [row.tolist() for row in numbers] == [[0, 0, -1, 1, -1], [0, 0]]
