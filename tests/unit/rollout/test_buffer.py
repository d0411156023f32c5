"""The buffer of groups: states, counts, checkpoints, and samples that are freed."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.checkpoint.run_checkpoints import RunCheckpoints, read_checkpoint
from mcore_rl.rollout.buffer import ALLOWED, BufferStateError, GroupState, SampleQueue
from tests.operations import growth


class Samples:
    """Opaque to the buffer."""


def make_queue(num: int = 4, group_size: int = 2) -> SampleQueue[object]:
    queue: SampleQueue[object] = SampleQueue(group_size)
    queue.issue(range(num), range(100, 100 + num))
    return queue


def finish_groups(queue: SampleQueue[object], *group_ids: int, version: int = 0) -> None:
    queue.begin(group_ids, version)
    for group_id in group_ids:
        queue.finish(group_id, version, 2, {"samples": Samples()})


def make_in_state(state: GroupState) -> SampleQueue[object]:
    """Return a queue whose group 0 is in a state."""
    queue = make_queue(1)
    path = (
        [GroupState.DROPPED]
        if state is GroupState.DROPPED
        else NOT_DROPPED[1 : NOT_DROPPED.index(state) + 1]
    )
    for step in path:
        MOVES[step](queue)
    return queue


MOVES = {
    GroupState.ISSUED: lambda queue: queue.reissue_lost([0]),
    GroupState.GENERATING: lambda queue: queue.begin([0], 0),
    GroupState.GENERATED: lambda queue: queue.finish(0, 0, 3, {}),  # one more than expected
    GroupState.REWARDED: lambda queue: queue.mark_rewarded([0]),
    GroupState.TRAINING: lambda queue: queue.select([0], queue.last_trained + 1),
    GroupState.TRAINED: lambda queue: queue.mark_trained(1),
    GroupState.DROPPED: lambda queue: queue.drop([0]),
}
GROUP_MOVES = [
    state for state in MOVES if state is not GroupState.TRAINED
]  # moves of chosen groups
NOT_DROPPED = [state for state in GroupState if state is not GroupState.DROPPED]


@pytest.mark.parametrize("state", NOT_DROPPED)
@pytest.mark.parametrize("to", GROUP_MOVES)
def test_a_group_moves_to_allowed_states_and_the_error_lists_them(state, to):
    queue = make_in_state(state)
    if to in ALLOWED[state]:
        MOVES[to](queue)
        assert queue.num_groups(to) == (to is not GroupState.DROPPED)
        return
    allowed = ", ".join(sorted(ALLOWED[state])) or "nothing, it has ended"
    with pytest.raises(
        BufferStateError, match=f"group 0 is {state} and .* {to}; allowed: {allowed}$"
    ):
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


@pytest.mark.parametrize("to", GROUP_MOVES)
def test_an_unknown_group_is_an_error(to):
    with pytest.raises(
        BufferStateError, match="group 0 is not in the buffer: never issued, dropped, "
    ):
        MOVES[to](make_in_state(GroupState.DROPPED))


def test_a_call_with_one_wrong_group_changes_none():
    queue = make_queue(2)
    finish_groups(queue, 1)
    with pytest.raises(BufferStateError, match="group 0 is issued and cannot become rewarded"):
        queue.mark_rewarded([1, 0])
    assert queue.num_groups(GroupState.GENERATED) == 1


def test_no_group_is_issued_twice():
    queue = make_queue(3)
    queue.drop([2])
    with pytest.raises(
        BufferStateError, match="group 2 cannot be issued: it has been before; allowed: ids from 3"
    ):
        queue.issue([2], [9])


def test_tokens_older_than_the_weights_of_begin_are_refused():
    queue = make_queue(2)
    queue.begin([0, 1], 5)
    with pytest.raises(BufferStateError, match="group 0 has tokens of version 4; allowed: from 5"):
        queue.finish(0, 4, 2, {})
    queue.finish(0, 7, 2, {})
    queue.finish(1, -1, 2, {})  # no tokens of the policy
    assert [
        (g.group_id, g.oldest_version, g.age(8)) for g in queue.groups(GroupState.GENERATED)
    ] == [
        (1, 5, 3),
        (0, 7, 1),
    ]


@pytest.mark.parametrize("state", ["generating", "generated", "rewarded", "training"])
def test_a_lost_group_is_issued_as_if_it_had_never_been_begun(state):
    queue = make_in_state(GroupState(state))
    queue.reissue_lost([0, 0])  # twice in one call
    (group,) = queue.groups(GroupState.ISSUED)
    assert (group.row, group.begun_version, group.oldest_version) == (100, -1, -1)
    assert (group.partition, group.columns, group.num_samples) == (0, {}, 2)
    assert queue.samples_total["lost"] == (2 if state == "generating" else 3)
    assert queue.groups_total == dict(issued=1, begun=1, trained=0, dropped=0, lost=1, abandoned=0)
    with pytest.raises(BufferStateError, match="group 0 is issued and cannot become issued"):
        queue.reissue_lost([0])


def test_partitions_are_trained_and_cleared_in_order_and_samples_are_freed():
    queue = make_queue(3)
    finish_groups(queue, 0, 1, 2)
    samples = [
        weakref.ref(group.columns["samples"]) for group in queue.groups(GroupState.GENERATED)
    ]
    queue.mark_rewarded([0, 1, 2])
    with pytest.raises(BufferStateError, match="partition 2 cannot be trained after 0; allowed: 1"):
        queue.select([0], 2)
    queue.select([0], 1)
    with pytest.raises(
        BufferStateError, match="partition 1 cannot be cleared: it is not trained; allowed: up to 0"
    ):
        queue.clear(1)
    queue.mark_trained(1)
    queue.drop([2])
    gc.collect()
    assert [ref() is None for ref in samples] == [False, False, True]
    queue.clear(1)
    gc.collect()
    assert [ref() is None for ref in samples] == [True, False, True] and len(queue) == 1
    queue.mark_trained(2)  # a step may have no groups
    assert queue.last_trained == 2


def test_groups_and_samples_are_counted_by_state():
    queue = make_queue(6)
    finish_groups(queue, 0, 1)
    queue.begin([2, 3], 0)
    queue.finish(3, 0, 5, {"samples": Samples()})  # more samples than expected
    queue.mark_rewarded([0, 1])
    queue.select([0], 1)
    queue.abandon([2])
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


def test_a_checkpoint_has_counters_and_groups_that_have_not_ended(tmp_path: Path):
    queue = make_queue(6)
    finish_groups(queue, *np.arange(4))  # NumPy integers, as in batches
    queue.begin([4], 0)
    queue.finish(4, np.int64(0), np.int64(3), {})
    queue.mark_rewarded([0, 1, 2])
    queue.select([0], 1)
    queue.mark_trained(1)
    queue.select([1], 2)
    queue.drop([3])
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.begin(1)
    path = checkpoints.publish(1, {"parts": {"queue": queue.state_dict()}})
    resumed = make_queue(0)
    resumed.load_state_dict(read_checkpoint(path).state["parts"]["queue"])
    issued = resumed.groups(GroupState.ISSUED)
    assert [(g.group_id, g.row) for g in issued] == [(1, 101), (2, 102), (4, 104), (5, 105)]
    assert len(resumed) == 4 and resumed.last_trained == 1
    assert resumed.groups_total == queue.groups_total
    assert resumed.samples_total == queue.samples_total
    with pytest.raises(BufferStateError, match="allowed: ids from 6"):
        resumed.issue([3], [103])
    empty = make_queue(0).state_dict()
    resumed.load_state_dict(empty)
    assert len(resumed) == 0 and resumed.groups_total["issued"] == 0


def read_metrics(queue: SampleQueue[object], _: int) -> None:
    queue.metrics()


def begin_and_lose(queue: SampleQueue[object], group_id: int) -> None:
    queue.begin([group_id], 0)
    queue.reissue_lost([group_id])


def drop(queue: SampleQueue[object], group_id: int) -> None:
    queue.drop([group_id])


def finish(queue: SampleQueue[object], group_id: int) -> None:
    queue.begin([group_id], 0)
    queue.finish(group_id, 0, 2, {})
    queue.mark_rewarded([group_id])
    assert queue.num_by_version(GroupState.REWARDED) == {0: group_id + 1}
    assert queue.get_row(group_id) == 100 + group_id


@pytest.mark.parametrize("use", [read_metrics, begin_and_lose, drop, finish])
def test_work_per_group_does_not_grow_with_the_number_of_groups(use):
    def use_all(num_groups: int) -> None:
        queue = make_queue(num_groups)
        for group_id in range(num_groups):
            use(queue, group_id)
            queue.num_groups(*NOT_DROPPED)
            queue.num_samples(*NOT_DROPPED)

    assert growth(use_all, 16, 256) < 1.2


def test_counts_are_those_of_the_groups_after_random_moves():
    # Allowed moves, also back to issued, and with other numbers of samples.
    queue, rng = make_queue(30), np.random.default_rng(0)
    for _ in range(400):
        group_id, to = int(rng.integers(30)), NOT_DROPPED[rng.integers(5)]
        version, num = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        with contextlib.suppress(BufferStateError):
            if to is GroupState.GENERATED:
                queue.finish(group_id, version, num, {})
            elif to is GroupState.GENERATING:
                queue.begin([group_id], version)
            elif to is GroupState.TRAINING:
                queue.select([group_id], queue.last_trained + 1)
            else:
                (queue.reissue_lost if to is GroupState.ISSUED else queue.mark_rewarded)([group_id])
        for state in NOT_DROPPED:
            groups = queue.groups(state)
            assert all(group.state is state for group in groups)
            assert queue.num_samples(state) == sum(group.num_samples for group in groups)
            versions = [group.oldest_version for group in groups]
            assert queue.num_by_version(state) == Counter(versions)
    assert sum(queue.num_groups(state) for state in NOT_DROPPED) == 30
