import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.aggregation import AGGREGATIONS, compute_loss_weights
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Jagged

masks = st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=8).filter(
    lambda rows: any(map(any, rows))
)

SETTINGS = {"sequence_sum_fixed_length": {"length": 7}}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [[0.25, 0.25, 0.25, 0], [0.25], [0, 0]]),
        ("sequence_mean_token_mean", [[1 / 6, 1 / 6, 1 / 6, 0], [1 / 2], [0, 0]]),
        ("sequence_mean_token_sum", [[1 / 2, 1 / 2, 1 / 2, 0], [1 / 2], [0, 0]]),
        ("sequence_sum_fixed_length", [[1 / 14, 1 / 14, 1 / 14, 0], [1 / 14], [0, 0]]),
    ],
)
def test_weights_match_a_case_worked_by_hand(mode, expected):
    mask = Jagged.pack([[1, 1, 1, 0], [1], [0, 0]], np.int8)
    weights = compute_loss_weights(mask, mode, SETTINGS.get(mode))
    assert weights.values.dtype == np.float32
    for row, expected_row in zip(weights, expected, strict=True):
        np.testing.assert_allclose(row, expected_row, rtol=1e-6)


@settings(max_examples=1000)
@given(rows=masks, mode=st.sampled_from(AGGREGATIONS.names), seed=st.integers(0, 1000))
def test_the_weighted_sum_is_the_aggregated_loss(rows, mode, seed):
    mask = Jagged.pack(rows, np.int8)
    losses = mask.with_values(np.random.default_rng(seed).normal(size=len(mask.values)))
    trained = [loss[row.astype(bool)] for loss, row in zip(losses, mask, strict=True) if row.any()]
    reference = {
        "token_mean": lambda: np.concatenate(trained).mean(),
        "sequence_mean_token_mean": lambda: np.mean([loss.mean() for loss in trained]),
        "sequence_mean_token_sum": lambda: np.mean([loss.sum() for loss in trained]),
        "sequence_sum_fixed_length": lambda: np.mean([loss.sum() / 7 for loss in trained]),
    }[mode]()
    weights = compute_loss_weights(mask, mode, SETTINGS.get(mode))
    assert weights.values @ losses.values == pytest.approx(reference, rel=1e-5, abs=1e-5)
    assert not weights.values[mask.values == 0].any()


@settings(max_examples=1000)
@given(rows=masks, mode=st.sampled_from(AGGREGATIONS.names), seed=st.integers(0, 1000))
def test_weights_go_with_their_sample_however_the_batch_is_cut(rows, mode, seed):
    mask = Jagged.pack(rows, np.int8)
    order = np.random.default_rng(seed).permutation(len(mask)).tolist()
    shuffled = compute_loss_weights(mask.take(order), mode, SETTINGS.get(mode))
    full = compute_loss_weights(mask, mode, SETTINGS.get(mode))
    np.testing.assert_allclose(shuffled.values, full.take(order).values)


def test_a_mini_batch_without_a_token_to_train_on_is_refused():
    with pytest.raises(ValueError, match="0 at all 3 tokens of 2 samples"):
        compute_loss_weights(Jagged.pack([[0, 0], [0]], np.int8), "token_mean")


def test_an_unknown_mode_names_the_setting_and_what_is_allowed():
    with pytest.raises(ConfigError, match=r"algorithm\.loss_aggregation='mean'.*token_mean"):
        compute_loss_weights(Jagged.pack([[1]], np.int8), "mean")
