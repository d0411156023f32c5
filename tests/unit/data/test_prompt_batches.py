"""Prompts as batches: each has a group id that no other prompt of the run has."""

from __future__ import annotations

import itertools
import json

from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.data.prompt_batches import PromptBatches, build_held_out_batch

DATASET = PromptDataset([PromptRow([1, row], {"answer": row}) for row in range(5)])


def test_prompts_of_training_count_up_over_epochs():
    batches = list(itertools.islice(PromptBatches(DATASET, 3, seed=0), 4))
    ids = [group for batch in batches for group in batch.array("group_ids").tolist()]
    assert ids == list(range(12))


def test_a_run_that_goes_on_draws_what_would_have_come_and_new_group_ids():
    full = [prompts_of(batch) for batch in itertools.islice(PromptBatches(DATASET, 3, seed=0), 6)]
    first = PromptBatches(DATASET, 3, seed=0)
    begun = [prompts_of(next(first)) for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptBatches(DATASET, 3, seed=0)
    next(second)
    second.load_state_dict(state)
    assert begun + [prompts_of(batch) for batch in itertools.islice(second, 4)] == full


def test_a_mixture_of_files_goes_on_where_it_was_saved():
    files = [[PromptRow([file], {"answer": row}) for row in range(8)] for file in range(3)]
    weights = [1.0, 2.0, 0.5]

    def begun() -> PromptBatches:
        return PromptBatches(PromptDataset(*files), 4, 0, weights)

    full = [prompts_of(batch) for batch in itertools.islice(begun(), 12)]
    first, second = begun(), begun()
    selected = [prompts_of(next(first)) for _ in range(5)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert selected + [prompts_of(batch) for batch in itertools.islice(second, 7)] == full
    of_files = [row // 8 for batch in full[:7] for _, row in batch]  # 28 prompts: 8, 16 and 4
    assert [of_files.count(file) for file in range(3)] == [8, 16, 4]


def prompts_of(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.array("group_ids").tolist(), batch.array("rows").tolist(), strict=True))


def test_held_out_prompts_count_down_from_minus_one():
    batch = build_held_out_batch(DATASET, 3)
    assert batch.array("group_ids").tolist() == [-1, -2, -3]
    assert [ids.tolist() for ids in batch.jagged("prompt_ids")] == [[1, 0], [1, 1], [1, 2]]
    assert [json.loads(text)["answer"] for text in batch.jagged("fields").texts] == [0, 1, 2]
