"""Prompts as batches: what a trainer hands to its generation servers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.sampler import IndexSampler


def prompt_batch(dataset: PromptDataset, rows: Sequence[int], first_group_id: int) -> Batch:
    """Columns prompt_ids, group_ids (counted up from first_group_id), fields (JSON), rows."""
    prompts = [dataset[row] for row in rows]
    return Batch(
        {
            "prompt_ids": Jagged.of((p.prompt_ids for p in prompts), np.int64),
            "group_ids": np.arange(first_group_id, first_group_id + len(rows), dtype=np.int64),
            "fields": np.array([json.dumps(p.fields, default=str) for p in prompts], dtype=np.str_),
            "rows": np.array(rows, dtype=np.int64),
        }
    )


def prompt_batches(dataset: PromptDataset, batch_size: int, seed: int) -> Iterator[Batch]:
    """Shuffled batches without end; no two prompts of a run share a group id."""
    for number, rows in enumerate(IndexSampler(len(dataset), batch_size, seed)):
        yield prompt_batch(dataset, rows, number * batch_size)
