import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.sampler import IndexSampler

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
