"""The pure steps of the synchronous trainer."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.sync import logprob_gaps, mini_batches


def batch():
    rows = [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0], [8.0], [9.0]]
    column = Jagged.of(rows, np.float32)
    return Batch(
        {
            "group_ids": np.array([0, 0, 1, 1, 2, 2]),
            "log_probs": column,
            "rollout_log_probs": column.with_values(column.values + np.float32(0.25)),
            "response_mask": column.with_values(np.ones(9, np.int8)),
        }
    )


def test_mini_batches_keep_groups_whole_and_use_every_sample_once():
    parts = mini_batches(batch(), 2, [0, 1])
    groups = [set(part.array("group_ids").tolist()) for part in parts]
    assert sum(len(part) for part in parts) == 6
    assert set.union(*groups) == {0, 1, 2}
    assert not set.intersection(*groups)


def test_mini_batches_are_never_empty():
    assert len(mini_batches(batch(), 5, [0])) == 3
    assert mini_batches(batch().take([]), 2, [0]) == []


def test_the_gap_is_the_largest_difference_at_chosen_tokens():
    made = batch()
    assert logprob_gaps(made) == pytest.approx({"max_logprob_gap": 0.25, "mean_logprob_gap": 0.25})
    values = made.jagged("rollout_log_probs").values.copy()
    values[3] += 9.0
    mask = np.ones(9, np.int8)
    mask[3] = 0
    column = made.jagged("log_probs")
    masked = made.with_columns(
        rollout_log_probs=column.with_values(values), response_mask=column.with_values(mask)
    )
    assert logprob_gaps(masked)["max_logprob_gap"] == pytest.approx(0.25)


def test_a_gap_that_is_not_a_number_is_not_hidden():
    column = batch().jagged("log_probs")
    broken = batch().with_columns(log_probs=column.with_values(np.full(9, np.nan, np.float32)))
    assert np.isnan(logprob_gaps(broken)["max_logprob_gap"])
