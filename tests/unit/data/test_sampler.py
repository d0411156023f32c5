import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.sampler import IndexSampler, MixtureSampler
from tests.operations import count_operations

sizes = {
    "num_rows": st.integers(1, 20),
    "batch_size": st.integers(1, 25),
    "seed": st.integers(0, 9),
}


def batches(sampler: IndexSampler, count: int) -> list[list[int]]:
    return list(itertools.islice(sampler, count))


@given(**sizes)
def test_every_epoch_has_every_row_once_and_every_batch_is_full(num_rows, batch_size, seed):
    drawn = batches(IndexSampler(num_rows, batch_size, seed), 3 * num_rows)
    assert all(len(batch) == batch_size for batch in drawn)
    flat = list(itertools.chain.from_iterable(drawn))
    for start in range(0, len(flat) - num_rows + 1, num_rows):
        assert sorted(flat[start : start + num_rows]) == list(range(num_rows))


@given(**sizes, before=st.integers(0, 12))
def test_a_restored_sampler_goes_on_where_the_saved_one_was(num_rows, batch_size, seed, before):
    sampler = IndexSampler(num_rows, batch_size, seed)
    batches(sampler, before)
    restored = IndexSampler(num_rows, batch_size, seed)
    restored.load_state_dict(sampler.state_dict())
    assert batches(restored, 10) == batches(sampler, 10)


def test_order_depends_on_the_seed_and_on_the_epoch():
    first = batches(IndexSampler(100, 100, seed=0), 2)
    assert first[0] != first[1]
    assert first == batches(IndexSampler(100, 100, seed=0), 2)
    assert first[0] != next(IndexSampler(100, 100, seed=1))


@pytest.mark.parametrize(("num_rows", "seed", "named"), [(9, 0, "num_rows=10"), (10, 1, "seed=0")])
def test_the_state_of_another_data_set_or_seed_is_refused(num_rows, seed, named):
    state = IndexSampler(10, 2, seed=0).state_dict()
    with pytest.raises(ConfigError, match=named):
        IndexSampler(num_rows, 2, seed).load_state_dict(state)


@pytest.mark.parametrize(("num_rows", "batch_size"), [(0, 4), (4, 0)])
def test_batches_of_nothing_are_refused(num_rows, batch_size):
    with pytest.raises(ConfigError, match=f"batches of {batch_size} from {num_rows} rows"):
        IndexSampler(num_rows, batch_size, seed=0)


files = st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10)), min_size=1, max_size=5)


@given(files=files, batch_size=st.integers(1, 7), seed=st.integers(0, 9))
def test_a_mixture_keeps_to_its_weights_and_has_every_row_of_a_file_once_an_epoch(
    files, batch_size, seed
):
    sizes, weights = zip(*files, strict=True)
    drawn = batches(MixtureSampler(sizes, weights, batch_size, seed), 40)
    assert all(len(batch) == batch_size for batch in drawn)
    flat = list(itertools.chain.from_iterable(drawn))
    first = 0
    for size, weight in files:
        file_rows = [row - first for row in flat if first <= row < first + size]
        for start in range(0, len(file_rows) - size + 1, size):
            assert sorted(file_rows[start : start + size]) == list(range(size))
        for n in range(1, len(flat) + 1):
            expected = n * weight / sum(weights)
            count = sum(first <= row < first + size for row in flat[:n])
            assert count - expected < 1 + 1e-9
            assert expected - count < max(1, len(files) - 1) + 1e-9
        first += size


@given(files=files, batch_size=st.integers(1, 7), seed=st.integers(0, 9), before=st.integers(0, 12))
def test_a_restored_mixture_goes_on_where_the_saved_one_was(files, batch_size, seed, before):
    sizes, weights = zip(*files, strict=True)
    sampler = MixtureSampler(sizes, weights, batch_size, seed)
    batches(sampler, before)
    restored = MixtureSampler(sizes, weights, batch_size, seed)
    next(restored)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert batches(restored, 10) == batches(sampler, 10)


def test_a_mixture_worked_by_hand():
    # Weights 3 to 1: each fourth prompt is of the second file, after the first two.
    rows = [row for [row] in batches(MixtureSampler([100, 100], [3, 1], 1, seed=0), 8)]
    assert [row >= 100 for row in rows] == [False, False, True, False] * 2


def test_files_of_one_length_have_orders_of_their_own():
    rows = batches(MixtureSampler([50, 50], [1, 1], 100, seed=0), 2)
    orders = [[row % 50 for row in batch if row // 50 == file] for batch in rows for file in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize(
    ("sizes", "weights", "seed", "named"),
    [
        ([9, 4], [1, 2], 0, "num_rows=5"),
        ([9, 5], [2, 1], 0, "weights"),
        ([9, 5], [1, 2], 1, "seed"),
    ],
)
def test_the_state_of_another_mixture_is_refused(sizes, weights, seed, named):
    state = MixtureSampler([9, 5], [1, 2], 2, seed=0).state_dict()
    with pytest.raises(ConfigError, match=named):
        MixtureSampler(sizes, weights, 2, seed).load_state_dict(state)


def equal_weights(num: int) -> list[float]:
    return [1.0] * num


def falling_weights(num: int) -> list[float]:
    return [1 / (index + 1) for index in range(num)]


@pytest.mark.parametrize("is_restored", [False, True])
@pytest.mark.parametrize("weights_of", [equal_weights, falling_weights])
def test_a_draw_does_not_loop_over_the_files(weights_of, is_restored):
    def operations(num_files: int) -> int:
        weights = weights_of(num_files)
        sampler = MixtureSampler([64] * num_files, weights, 16, seed=0)
        if is_restored:
            sampler.load_state_dict(sampler.state_dict())
        with count_operations() as counted:
            sampler.take(32)
        return counted.num

    assert operations(512) < operations(8) * 1.2
