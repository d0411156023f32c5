"""The ledger of groups: its states, what consumers get, what is kept and what is let go of."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.checkpoint.run_checkpoints import RunCheckpoints, read_checkpoint
from mcore_rl.rollout.buffer import ALLOWED, GroupState, LedgerError, SampleQueue
from tests.operations import growth


class Samples:
    """What a ledger never looks into."""


def queue_of(num: int = 4, group_size: int = 2) -> SampleQueue[object]:
    queue: SampleQueue[object] = SampleQueue(group_size)
    queue.issue(range(num), range(100, 100 + num))
    return queue


def finished(queue: SampleQueue[object], *group_ids: int, version: int = 0) -> None:
    queue.begin(group_ids, version)
    for group_id in group_ids:
        queue.finish(group_id, version, 2, {"samples": Samples()})


def in_state(state: GroupState) -> SampleQueue[object]:
    """Group 0 is in it."""
    queue = queue_of(1)
    path = [GroupState.DROPPED] if state is GroupState.DROPPED else KEPT[1 : KEPT.index(state) + 1]
    for step in path:
        MOVES[step](queue)
    return queue


MOVES = {
    GroupState.ISSUED: lambda queue: queue.lost([0]),
    GroupState.GENERATING: lambda queue: queue.begin([0], 0),
    GroupState.GENERATED: lambda queue: queue.finish(0, 0, 3, {}),  # one more than expected
    GroupState.REWARDED: lambda queue: queue.mark_rewarded([0]),
    GroupState.TRAINING: lambda queue: queue.select([0], queue.last_trained + 1),
    GroupState.TRAINED: lambda queue: queue.mark_trained(1),
    GroupState.DROPPED: lambda queue: queue.drop([0]),
}
BY_GROUP = [state for state in MOVES if state is not GroupState.TRAINED]  # moves of chosen groups
KEPT = [state for state in GroupState if state is not GroupState.DROPPED]


@pytest.mark.parametrize("state", KEPT)
@pytest.mark.parametrize("to", BY_GROUP)
def test_a_group_goes_where_its_state_allows_or_the_error_says_where_it_may(state, to):
    queue = in_state(state)
    if to in ALLOWED[state]:
        MOVES[to](queue)
        assert queue.num_groups(to) == (to is not GroupState.DROPPED)
        return
    allowed = ", ".join(sorted(ALLOWED[state])) or "nothing, it has ended"
    with pytest.raises(LedgerError, match=f"group 0 is {state} and .* {to}; allowed: {allowed}$"):
        MOVES[to](queue)
    assert queue.num_groups(state) == 1


def test_states_are_those_of_the_diagram():
    back = {"issued", "dropped"}
    expected = {
        "issued": {"generating", "dropped"},
        "generating": {"generated"} | back,
        "generated": {"rewarded"} | back,
        "rewarded": {"training"} | back,
        "training": {"trained", "issued"},
        "trained": set(),
        "dropped": set(),
    }
    assert expected == ALLOWED


@pytest.mark.parametrize("to", BY_GROUP)
def test_a_group_that_is_not_there_is_told(to):
    with pytest.raises(LedgerError, match="group 0 is not in the ledger: never issued, dropped, "):
        MOVES[to](in_state(GroupState.DROPPED))


def test_a_call_with_one_wrong_group_changes_none():
    queue = queue_of(2)
    finished(queue, 1)
    with pytest.raises(LedgerError, match="group 0 is issued and cannot become rewarded"):
        queue.mark_rewarded([1, 0])
    assert queue.num_groups(GroupState.GENERATED) == 1


def test_no_group_is_issued_twice():
    queue = queue_of(3)
    queue.drop([2])
    with pytest.raises(
        LedgerError, match="group 2 cannot be issued: it has been before; allowed: ids from 3"
    ):
        queue.issue([2], [9])


def test_tokens_are_no_older_than_the_weights_that_a_group_was_begun_with():
    queue = queue_of(2)
    queue.begin([0, 1], 5)
    with pytest.raises(LedgerError, match="group 0 has tokens of version 4; allowed: from 5"):
        queue.finish(0, 4, 2, {})
    queue.finish(0, 7, 2, {})
    queue.finish(1, -1, 2, {})  # the policy has chosen none
    assert [
        (g.group_id, g.oldest_version, g.age(8)) for g in queue.groups(GroupState.GENERATED)
    ] == [
        (1, 5, 3),
        (0, 7, 1),
    ]


def test_consumers_take_what_has_their_columns_once_each_in_streaming_order():
    queue = queue_of(4)
    finished(queue, 2, version=1)
    finished(queue, 3, 0, version=2)

    def ids(consumer, *needs, limit=None):
        return [taken.group_id for taken in queue.take(consumer, *needs, limit=limit)]

    assert ids("loss", "samples", "values") == []
    scored = queue.take("critic", "samples", limit=2)
    assert [taken.group_id for taken in scored] == [2, 0] and scored[0].columns.keys() == {
        "samples"
    }
    assert queue.put(scored[1], {"values": 0.5})
    assert ids("loss", "samples", "values") == [0]
    assert queue.put(scored[0], {"values": 1.5})
    assert ids("loss", "samples", "values") == [2] and ids("loss", "samples", "values") == []
    assert ids("critic", "samples") == [3] and ids("teacher", "samples") == [2, 0, 3]
    with pytest.raises(LedgerError, match=r"group 0 \(generated\) has columns values already"):
        queue.put(scored[1], {"values": 1})


def test_what_was_made_of_lost_samples_is_refused():
    queue = queue_of(2)
    finished(queue, 0, 1)
    lost, dropped = queue.take("critic", "samples")
    queue.lost([0])
    queue.drop([1])
    assert not queue.put(lost, {"values": 1}) and not queue.put(dropped, {"values": 1})
    finished(queue, 0, version=3)
    assert not queue.put(lost, {"values": 1})
    (again,) = queue.take("critic", "samples")
    assert again.columns["samples"] is not lost.columns["samples"] and queue.put(
        again, {"values": 2}
    )


@pytest.mark.parametrize("state", ["generating", "generated", "rewarded", "training"])
def test_a_lost_group_is_issued_as_if_it_had_never_been_begun(state):
    queue = in_state(GroupState(state))
    queue.lost([0, 0])  # told twice in one call
    (group,) = queue.groups(GroupState.ISSUED)
    assert (group.row, group.begun_version, group.oldest_version) == (100, -1, -1)
    assert (group.partition, group.columns, group.num_samples) == (0, {}, 2)
    assert queue.samples_total["lost"] == (2 if state == "generating" else 3)
    assert queue.groups_total == dict(issued=1, begun=1, trained=0, dropped=0, lost=1, abandoned=0)
    with pytest.raises(LedgerError, match="group 0 is issued and cannot become issued"):
        queue.lost([0])


def test_partitions_are_trained_and_cleared_in_order_and_samples_are_let_go_of():
    queue = queue_of(3)
    finished(queue, 0, 1, 2)
    kept = [weakref.ref(group.columns["samples"]) for group in queue.groups(GroupState.GENERATED)]
    queue.mark_rewarded([0, 1, 2])
    with pytest.raises(LedgerError, match="partition 2 cannot be trained after 0; allowed: 1"):
        queue.select([0], 2)
    queue.select([0], 1)
    with pytest.raises(
        LedgerError, match="partition 1 cannot be cleared: it is not trained; allowed: up to 0"
    ):
        queue.clear(1)
    queue.mark_trained(1)
    queue.drop([2])
    gc.collect()
    assert [ref() is None for ref in kept] == [False, False, True]
    queue.clear(1)
    gc.collect()
    assert [ref() is None for ref in kept] == [True, False, True] and len(queue) == 1
    queue.mark_trained(2)  # a step may have no groups
    assert queue.last_trained == 2


def test_groups_and_samples_are_counted_by_state():
    queue = queue_of(6)
    finished(queue, 0, 1)
    queue.begin([2, 3], 0)
    queue.finish(3, 0, 5, {"samples": Samples()})  # more samples than were expected
    queue.mark_rewarded([0, 1])
    queue.select([0], 1)
    queue.abandoned([2])
    assert queue.num_groups(GroupState.ISSUED) == 3 and queue.num_samples(GroupState.ISSUED) == 6
    assert queue.num_samples(GroupState.GENERATED) == 5
    assert queue.metrics() == {
        "queue/generating": 0,
        "queue/generated": 1,
        "queue/rewarded": 1,
        "queue/training": 1,
        "queue/waiting_samples": 9,
        "queue/issued_total": 6,
        "queue/begun_total": 4,
        "queue/trained_total": 0,
        "queue/dropped_total": 0,
        "queue/lost_total": 0,
        "queue/abandoned_total": 1,
    }
    queue.mark_trained(1)
    queue.drop([3])
    assert queue.samples_total == dict(
        issued=12, begun=8, trained=2, dropped=5, lost=0, abandoned=2
    )


def test_a_checkpoint_has_counters_and_what_has_not_ended(tmp_path: Path):
    queue = queue_of(6)
    finished(queue, *np.arange(4))  # numbers of numpy, as batches have them
    queue.begin([4], 0)
    queue.finish(4, np.int64(0), np.int64(3), {})
    queue.mark_rewarded([0, 1, 2])
    queue.select([0], 1)
    queue.mark_trained(1)
    queue.select([1], 2)
    queue.drop([3])
    written = RunCheckpoints(tmp_path)
    written.begin(1)
    path = written.publish(1, {"parts": {"queue": queue.state_dict()}})
    resumed = queue_of(0)
    resumed.load_state_dict(read_checkpoint(path).state["parts"]["queue"])
    issued = resumed.groups(GroupState.ISSUED)
    assert [(g.group_id, g.row) for g in issued] == [(1, 101), (2, 102), (4, 104), (5, 105)]
    assert len(resumed) == 4 and resumed.last_trained == 1
    assert resumed.groups_total == queue.groups_total
    assert resumed.samples_total == queue.samples_total
    with pytest.raises(LedgerError, match="allowed: ids from 6"):
        resumed.issue([3], [103])
    empty = queue_of(0).state_dict()
    resumed.load_state_dict(empty)
    assert len(resumed) == 0 and resumed.groups_total["issued"] == 0


def count(queue: SampleQueue[object], _: int) -> None:
    queue.metrics()


def begin_and_lose(queue: SampleQueue[object], group_id: int) -> None:
    queue.begin([group_id], 0)
    queue.lost([group_id])


def drop(queue: SampleQueue[object], group_id: int) -> None:
    queue.drop([group_id])


def finish(queue: SampleQueue[object], group_id: int) -> None:
    queue.begin([group_id], 0)
    queue.finish(group_id, 0, 2, {})
    queue.mark_rewarded([group_id])
    assert queue.num_by_version(GroupState.REWARDED) == {0: group_id + 1}
    assert queue.row_of(group_id) == 100 + group_id


@pytest.mark.parametrize("use", [count, begin_and_lose, drop, finish])
def test_what_is_done_for_each_group_does_not_look_at_the_others(use):
    def use_all(num_groups: int) -> None:
        queue = queue_of(num_groups)
        for group_id in range(num_groups):
            use(queue, group_id)
            queue.num_groups(*KEPT)
            queue.num_samples(*KEPT)

    assert growth(use_all, 16, 256) < 1.2


def test_the_counts_are_those_of_the_groups_after_any_moves():
    """Moves that are allowed, by chance, also back and with another number of samples."""
    queue, rng = queue_of(30), np.random.default_rng(0)
    for _ in range(400):
        group_id, to = int(rng.integers(30)), KEPT[rng.integers(5)]
        version, num = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        with contextlib.suppress(LedgerError):
            if to is GroupState.GENERATED:
                queue.finish(group_id, version, num, {})
            elif to is GroupState.GENERATING:
                queue.begin([group_id], version)
            elif to is GroupState.TRAINING:
                queue.select([group_id], queue.last_trained + 1)
            else:
                (queue.lost if to is GroupState.ISSUED else queue.mark_rewarded)([group_id])
        for state in KEPT:
            groups = queue.groups(state)
            assert all(group.state is state for group in groups)
            assert queue.num_samples(state) == sum(group.num_samples for group in groups)
            versions = [group.oldest_version for group in groups]
            assert queue.num_by_version(state) == Counter(versions)
    assert sum(queue.num_groups(state) for state in KEPT) == 30
