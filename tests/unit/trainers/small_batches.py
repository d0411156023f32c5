"""Batches of three groups with two responses each, for tests of a step."""

from __future__ import annotations

import numpy as np

from mcore_rl.data.batch import Batch, Jagged

REWARDS = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], np.float32)


def build_scored_batch() -> Batch:
    """Return nine tokens whose log-probs are 1 to 9; those of the servers are 0.25 higher."""
    rows = [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0], [8.0], [9.0]]
    column = Jagged.pack(rows, np.float32)
    return Batch(
        {
            "group_ids": np.array([0, 0, 1, 1, 2, 2]),
            "log_probs": column,
            "rollout_log_probs": column.with_values(column.values + np.float32(0.25)),
            "response_mask": column.with_values(np.ones(9, np.int8)),
        }
    )


def build_rewarded_batch() -> Batch:
    """Return the same with rewards, which differ in the first group alone."""
    batch = build_scored_batch()
    return batch.with_columns(rewards=REWARDS, response_ids=batch.jagged("log_probs"))
