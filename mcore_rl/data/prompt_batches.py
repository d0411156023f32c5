"""Batches of prompts, for generation."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mcore_rl.data.batch import Array, Batch, Jagged, pack_images
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.sampler import CurriculumSampler, IndexSampler, MixtureSampler

encode_json = json.JSONEncoder(default=str).encode  # json.dumps would make an encoder a value


class PromptBatches:
    """Endless shuffled batches of prompts. Group ids count up from 0, one per prompt of a run.

    Columns: prompt_ids, group_ids, fields and messages (JSON, as Jagged.pack_texts), rows (of the
    data set), and images if there are any. The batch size may change on resuming.

    Args:
        dataset: Prompts of one or more files.
        batch_size: Prompts per batch.
        seed: Seed of the order.
        weights: Mixture weight of each file; without them rows are shuffled over all files.
        curriculum: Sampler that draws by the success rates that `observe` counts.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        seed: int,
        weights: Sequence[float] = (),
        curriculum: CurriculumSampler | None = None,
    ) -> None:
        self._dataset, self._batch_size, self._curriculum = dataset, batch_size, curriculum
        self._drawn: dict[int, int] = {}  # row of each group that was not observed yet
        self._sampler: IndexSampler | MixtureSampler | CurriculumSampler
        if curriculum is not None:
            self._sampler = curriculum
        elif weights:
            self._sampler = MixtureSampler(dataset.sizes, weights, batch_size, seed)
        else:
            self._sampler = IndexSampler(len(dataset), batch_size, seed)
        self._next_group_id = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.take(self._batch_size)

    def take(self, num: int) -> Batch:
        """Return the next `num` prompts; the order does not depend on the sizes of batches."""
        return self.build_batch(self.draw(num))

    def draw(self, num: int) -> dict[int, int]:
        """Draw the rows of the next `num` prompts, by their new group ids."""
        rows, first = self._sampler.take(num), self._next_group_id
        self._next_group_id += num
        return dict(zip(range(first, self._next_group_id), rows, strict=True))

    def build_batch(self, drawn: Mapping[int, int]) -> Batch:
        """Build the batch of a result of `draw`, of this run or of the run that it resumes."""
        if self._curriculum is not None:
            self._drawn |= drawn
        return _build_batch(self._dataset, list(drawn.values()), list(drawn))

    def observe(
        self, generated_groups: Collection[int], group_ids: Array, has_succeeded: Array
    ) -> None:
        """Count successes for the curriculum, once per group.

        Args:
            generated_groups: Ids of all groups that were generated, each once.
            group_ids: Group of each response with a reward: [samples].
            has_succeeded: Whether each of these succeeded: [samples].
        """
        if self._curriculum is None:
            return
        for group in sorted(generated_groups):
            row, successes = self._drawn.pop(group), has_succeeded[group_ids == group]
            if len(successes):  # else each reward raised
                self._curriculum.observe(row, int(successes.sum()), len(successes))

    def state_dict(self) -> dict[str, Any]:
        return {
            "sampler": self._sampler.state_dict(),
            "next_group_id": self._next_group_id,
            "drawn": [[group, row] for group, row in self._drawn.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; ConfigError if it is of other data or another seed."""
        self._sampler.load_state_dict(state["sampler"])
        self._next_group_id = state["next_group_id"]
        self._drawn = dict(state.get("drawn", ()))  # earlier versions did not save them


def build_held_out_batch(dataset: PromptDataset, num_prompts: int, num_before: int = 0) -> Batch:
    """Build a batch of the first prompts of an evaluation set, in the columns of PromptBatches.

    Group ids count down from -1, or from below those of `num_before` prompts of other sets. They,
    and seeds made of them, differ from those of training and do not depend on num_prompts.
    """
    first = -1 - num_before
    return _build_batch(dataset, range(num_prompts), range(first, first - num_prompts, -1))


def _build_batch(dataset: PromptDataset, rows: Sequence[int], group_ids: Sequence[int]) -> Batch:
    prompts = dataset.take(rows)

    def pack_json(values: Iterable[Any]) -> Jagged:
        return Jagged.pack_texts(encode_json(value) for value in values)

    return Batch(
        {
            "prompt_ids": Jagged.pack((p.prompt_ids for p in prompts), np.int32),
            "group_ids": np.array(group_ids, dtype=np.int64),
            "fields": pack_json(p.fields for p in prompts),
            "messages": pack_json(p.messages for p in prompts),
            "rows": np.array([dataset.get_row_number(row) for row in rows], dtype=np.int64),
            **pack_images([p.images for p in prompts]),
        }
    )
