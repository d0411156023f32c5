"""What is left for a step when samples are lost or rejected, with modelled servers."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.config.schema import CurriculumConfig, FilterConfig
from mcore_rl.controller.batch_ops import per_sample
from mcore_rl.controller.remote_batch import Places, RemoteBatch, RemoteColumn
from mcore_rl.data.batch import Batch, Jagged, Samples
from mcore_rl.rollout.buffer import HELD, GroupState
from mcore_rl.trainers import async_rollout
from tests.unit.trainers.test_fully_async import PER_STEP, Run


class Object:
    """What a column is in."""


def test_a_short_step_trains_what_it_had_selected_before_a_loss_and_what_has_come_since(
    tmp_path, monkeypatch
):
    """Five groups pass. Two of the four that are selected die, and do not pass again."""
    samples = FilterConfig(group_filter="drop_uniform", if_short="train")
    run, left, lost = Run(tmp_path, filter=samples), {0, 1, 2, 3, 4}, []
    samples_of = run.servers._samples

    def some_pass(group: int, *asked: Any) -> Batch:
        batch = samples_of(group, *asked)
        rewards = np.ones(len(batch), np.float32)
        rewards[0] = group not in left
        left.discard(group)
        return batch.with_columns(rewards=rewards)

    def two_die(batches: list[Any]) -> list[int]:
        if not lost:
            selected = run.loop.ahead.queue.groups(GroupState.TRAINING)
            lost.extend(group.group_id for group in selected[:2])
            return lost
        return []

    run.servers._samples = some_pass
    monkeypatch.setattr(async_rollout, "lost_groups", two_die)
    run.loop.ahead.start()
    batch, metrics = run.loop.ahead.take(1)
    assert len(lost) == 2 and metrics["queue/lost_total"] == 2
    assert {*batch.array("group_ids").tolist()} == {0, 1, 2, 3, 4} - {*lost}
    assert metrics["queue/rewarded"] == 0


class Elsewhere:
    """The answers of servers as they come in a job: each group's tokens are an object."""

    def __init__(self, run: Run) -> None:
        self._collect = run.servers.collect
        run.servers.collect = self.collect
        self._objects: weakref.WeakValueDictionary[int, Object] = weakref.WeakValueDictionary()

    @property
    def groups(self) -> list[int]:
        """Those whose tokens are there still."""
        return sorted(self._objects)

    def collect(self, *asked: Any) -> list[RemoteBatch]:
        found = self._collect(*asked)
        return [self.of_group(*one) for batch in found for one in groups_of(batch)]

    def of_group(self, group: int, batch: Batch) -> RemoteBatch:
        kept = self._objects[group] = Object()
        places = Places((kept,), np.zeros(len(batch), np.int32), np.arange(len(batch)))
        columns = {n: c for n, c in batch.columns.items() if isinstance(c, Jagged)}
        of_tokens = {n: RemoteColumn(places, n, c.values[:0]) for n, c in columns.items()}
        return RemoteBatch(per_sample(batch), of_tokens)


def groups_of(batch: Batch) -> list[tuple[int, Batch]]:
    ids = batch.array("group_ids")
    return [(g, batch.take(np.flatnonzero(ids == g).tolist())) for g in np.unique(ids).tolist()]


def with_a_filter(folder: Path) -> Run:
    """Every fifth group has a response without a reward."""
    samples = FilterConfig(group_filter="drop_uniform", max_rounds=4)
    run = Run(folder, filter=samples, curriculum=CurriculumConfig(name="learnability"))
    run.config.reward.on_error = "drop"
    samples_of = run.servers._samples

    def some_fail(group: int, *asked: Any) -> Batch:
        batch = samples_of(group, *asked)
        errors = ["late" if group % 5 == 0 else "", *[""] * (len(batch) - 1)]
        return batch.with_columns(reward_errors=np.array(errors))

    run.servers._samples = some_fail
    return run


def first_step(run: Run) -> tuple[Samples, list[Any]]:
    """The batch; and its values, metrics and what the curriculum has learned."""
    batch, metrics = run.loop.ahead.take(1)
    values = {name: column.tolist() for name, column in per_sample(batch).columns.items()}
    return batch, [metrics, values, repr(run.loop.prompts.state_dict())]


def test_rejected_groups_count_with_all_their_tokens_let_go_of(tmp_path, monkeypatch):
    monkeypatch.setattr(async_rollout, "lost_groups", lambda batches: [])
    _, wanted = first_step(with_a_filter(tmp_path / "here"))
    run = with_a_filter(tmp_path / "elsewhere")
    elsewhere, ahead = Elsewhere(run), run.loop.ahead
    ahead._chosen(1, PER_STEP)
    held = sorted(group.group_id for group in ahead.queue.groups(*HELD))
    rejected = ahead.queue.groups_total["dropped"]
    assert rejected > 1 and elsewhere.groups == held
    batch, found = first_step(run)
    assert found == wanted
    assert found[0]["samples/groups"] == PER_STEP + rejected and found[0]["dropped"] > 0
    assert isinstance(batch, RemoteBatch) and batch.remote.keys() >= {"response_ids"}
    assert all((column.places.objects >= 0).all() for column in batch.remote.values())
