"""Packs hold every sample once, and each response token points at the hidden state before it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.megatron.packing import pack

CPU = torch.device("cpu")


def batch():
    prompts, responses = [[5, 6], [7], [8, 9, 10]], [[1, 2, 3], [4], [11, 12]]
    return Batch(
        {
            "prompt_ids": Jagged.of(prompts, np.int64),
            "response_ids": Jagged.of(responses, np.int64),
            "advantages": Jagged.of([[0.1, 0.2, 0.3], [0.4], [0.5, 0.6]], np.float32),
            "rewards": np.zeros(3, np.float32),
        }
    )


def test_one_pack_lays_the_samples_end_to_end():
    [micro] = pack(batch(), 1, multiple=4, device=CPU)
    assert micro.input_ids.tolist() == [[5, 6, 1, 2, 3, 7, 4, 8, 9, 10, 11, 12]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]]
    assert micro.packed.cu_seqlens_q.tolist() == [0, 5, 7, 12]
    assert micro.targets.tolist() == [1, 2, 3, 4, 11, 12]
    assert micro.input_ids[0, micro.hidden_rows].tolist() == [6, 1, 2, 7, 10, 11]
    assert micro.columns["advantages"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_the_tail_is_padded_behind_the_last_sequence():
    [micro] = pack(batch(), 1, multiple=8, device=CPU)
    assert micro.input_ids.shape == (1, 16)
    assert micro.packed.cu_seqlens_q.tolist() == [0, 5, 7, 16]
    assert micro.num_tokens == 12


def test_more_packs_than_samples_leave_packs_of_padding():
    micros = pack(batch(), 5, multiple=2, device=CPU)
    assert sorted(row for micro in micros for row in micro.rows) == [0, 1, 2]
    empty = [micro for micro in micros if not micro.rows]
    assert len(empty) == 2
    assert all(m.num_tokens == 0 and m.input_ids.shape == (1, 2) for m in empty)
    assert all(len(m.targets) == 0 and len(m.columns["advantages"]) == 0 for m in empty)


def test_a_column_that_does_not_run_along_the_responses_is_named():
    bad = batch().with_columns(advantages=Jagged.of([[0.1], [0.2], [0.3]], np.float32))
    with pytest.raises(ValueError, match="'advantages' does not run along the response tokens"):
        pack(bad, 1, multiple=1, device=CPU)
