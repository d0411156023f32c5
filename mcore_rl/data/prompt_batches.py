"""Prompts as batches: what a trainer hands to its generation servers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mcore_rl.data.batch import Array, Batch, Jagged
from mcore_rl.data.curriculum import CurriculumSampler
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.sampler import IndexSampler, MixtureSampler


class PromptBatches:
    """Shuffled batches without end. Group ids count up from 0: no two prompts of a run share one.

    Columns: prompt_ids, group_ids, fields and messages (JSON, as Jagged.of_texts), and rows (of the
    data set). The batch size may change where a run goes on from a state. With `weights`, one a
    file, files are mixed; a `curriculum` draws by what it is told of earlier prompts, with
    `observe`.
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
        self._drawn: dict[int, int] = {}  # the row of each group that nobody has told of yet
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
        """The next `num` prompts: other sizes have the same ones, in the same order."""
        return self.again(self.draw(num))

    def draw(self, num: int) -> dict[int, int]:
        """The rows of the next `num` prompts, by the group ids that they have got."""
        rows, first = self._sampler.take(num), self._next_group_id
        self._next_group_id += num
        return dict(zip(range(first, self._next_group_id), rows, strict=True))

    def again(self, drawn: Mapping[int, int]) -> Batch:
        """The prompts of what `draw` has given, now or in a run that this one goes on from."""
        if self._curriculum is not None:
            self._drawn |= drawn
        return _prompt_batch(self._dataset, list(drawn.values()), list(drawn))

    def observe(self, came: Array, group_ids: Array, has_succeeded: Array) -> None:
        """Which responses [samples] have succeeded, of the groups that `came`, each once."""
        if self._curriculum is None:
            return
        for group in np.unique(came).tolist():
            row, found = self._drawn.pop(group), has_succeeded[group_ids == group]
            if len(found):  # else each reward raised
                self._curriculum.observe(row, int(found.sum()), len(found))

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self._sampler.state_dict(), "next_group_id": self._next_group_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; ConfigError when it is of other data or another seed."""
        self._sampler.load_state_dict(state["sampler"])
        self._next_group_id = state["next_group_id"]


def held_out_batch(dataset: PromptDataset, num_prompts: int, num_before: int = 0) -> Batch:
    """The first prompts of an evaluation, in columns as above.

    Group ids count down from -1, so that training has none of them, nor a seed made of one; those
    of a prompt are the same however many are asked. `num_before` are of other sets: those of a set
    begin below.
    """
    first = -1 - num_before
    return _prompt_batch(dataset, range(num_prompts), range(first, first - num_prompts, -1))


def _prompt_batch(dataset: PromptDataset, rows: Sequence[int], group_ids: Sequence[int]) -> Batch:
    prompts = dataset.take(rows)

    def texts(values: Iterable[Any]) -> Jagged:
        return Jagged.of_texts(json.dumps(value, default=str) for value in values)

    return Batch(
        {
            "prompt_ids": Jagged.of((p.prompt_ids for p in prompts), np.int32),
            "group_ids": np.array(group_ids, dtype=np.int64),
            "fields": texts(p.fields for p in prompts),
            "messages": texts(p.messages for p in prompts),
            "rows": np.array([dataset.row_number(row) for row in rows], dtype=np.int64),
        }
    )
