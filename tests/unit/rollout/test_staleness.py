"""What an asynchronous trainer begins, selects and abandons, worked out by hand."""

from __future__ import annotations

import pytest

from mcore_rl.rollout.buffer import GroupState, LedgerError, SampleQueue
from mcore_rl.rollout.staleness import Admission, Pacing
from tests.operations import growth


def paced(**settings) -> Pacing:
    return Pacing(**{"groups_per_step": 2, "group_size": 3, "num_steps": 9, **settings})


def of(pacing: Pacing) -> tuple[SampleQueue[object], Admission[object]]:
    queue: SampleQueue[object] = SampleQueue(pacing.group_size)
    return queue, Admission(queue, pacing)


def begun(queue, admission) -> list[int]:
    """Ids of what is begun, with new prompts where the queue lacks them."""
    first, num = queue.groups_total["issued"], admission.num_to_draw()
    queue.issue(range(first, first + num), range(first, first + num))
    return [group.group_id for group in admission.begin()]


def rewarded(queue, *group_ids: int) -> None:
    for group_id in group_ids:
        queue.finish(group_id, -1, 3, {})
    queue.mark_rewarded(group_ids)


def selected(admission, step: int) -> list[int] | None:
    groups = admission.select(step)
    return None if groups is None else [group.group_id for group in groups]


def trained(queue, admission, step: int) -> list[int]:
    """The step ends; returns what the servers have to end before the push."""
    queue.mark_trained(step)
    running = admission.evict(step)
    admission.pushed(step)
    queue.clear(step)
    return running


def test_with_staleness_0_a_step_begins_its_own_groups_and_nothing_ahead():
    queue, admission = of(paced(staleness=0))
    for step, wanted in ((1, [0, 1]), (2, [2, 3]), (3, [4, 5])):
        assert begun(queue, admission) == wanted and begun(queue, admission) == []
        rewarded(queue, wanted[1])
        assert selected(admission, step) is None and begun(queue, admission) == []
        rewarded(queue, wanted[0])
        assert selected(admission, step) == wanted and begun(queue, admission) == []
        queue.mark_trained(step)
        assert begun(queue, admission) == [] and admission.evict(step) == []
        admission.pushed(step)
        queue.clear(step)
        assert len(queue) == 0


def test_with_staleness_1_a_step_is_begun_ahead_and_waits_for_what_would_be_too_old_later():
    queue, admission = of(paced(staleness=1))
    assert begun(queue, admission) == [0, 1, 2, 3]  # of steps 1 and 2, version 0
    rewarded(queue, 3, 1, 2)
    assert selected(admission, 1) == [1, 2] and begun(queue, admission) == []
    assert trained(queue, admission, 1) == []  # group 0 may be trained in step 2
    assert begun(queue, admission) == [4, 5]  # version 1
    rewarded(queue, 4, 5)
    assert selected(admission, 2) is None  # 3 and 4 are ready, but 0 is too old for step 3
    rewarded(queue, 0)
    assert selected(admission, 2) == [0, 3]
    assert trained(queue, admission, 2) == []


def test_stragglers_are_begun_again_as_many_as_are_begun_beyond_the_batches():
    queue, admission = of(paced(staleness=1, over_issue=0.5))
    assert begun(queue, admission) == [0, 1, 2, 3, 4]  # one more than steps 1 and 2 need
    rewarded(queue, 4, 1, 2)
    assert selected(admission, 1) == [1, 2] and begun(queue, admission) == []
    assert trained(queue, admission, 1) == []
    assert begun(queue, admission) == [5, 6]  # version 1
    rewarded(queue, 5, 6)
    assert selected(admission, 2) is None  # of 0 and 3 one may be late
    rewarded(queue, 3)
    assert selected(admission, 2) == [3, 4]  # the oldest first
    assert trained(queue, admission, 2) == [0]  # in step 3 it would be 2 versions old
    assert begun(queue, admission) == [0, 7, 8]  # version 2; groups 5 and 6 wait, of version 1
    rewarded(queue, 0, 7)
    assert selected(admission, 3) == [5, 6]
    ages = [(group.group_id, group.age(2)) for group in queue.groups(GroupState.TRAINING)]
    assert ages == [(5, 1), (6, 1)]


def test_a_step_does_not_wait_for_as_many_stragglers_as_are_begun_beyond_the_batches():
    queue, admission = of(paced(staleness=1, over_issue=0.5))
    assert begun(queue, admission) == [0, 1, 2, 3, 4]
    rewarded(queue, 0, 1, 2, 4)
    queue.drop([4])
    assert selected(admission, 1) == [0, 1] and trained(queue, admission, 1) == []
    assert begun(queue, admission) == [5, 6, 7]  # version 1
    rewarded(queue, 5)
    assert selected(admission, 2) == [2, 5]  # group 3 is as old as 2, and one may be late
    assert trained(queue, admission, 2) == [3]


def test_what_has_ended_and_would_be_too_old_is_begun_again_but_not_ended_on_servers():
    queue, admission = of(paced(staleness=1, over_issue=0.5))
    assert begun(queue, admission) == [0, 1, 2, 3, 4]
    rewarded(queue, 0, 1, 2, 3, 4)
    for step, wanted in ((1, [0, 1]), (2, [2, 3])):
        assert selected(admission, step) == wanted
        assert trained(queue, admission, step) == []
        assert begun(queue, admission) == ([5, 6] if step == 1 else [4, 7, 8])
    assert queue.groups_total["abandoned"] == 1


def test_tokens_newer_than_the_beginning_of_their_group_keep_it_longer():
    queue, admission = of(paced(staleness=1, groups_per_step=1))
    assert begun(queue, admission) == [0, 1]
    rewarded(queue, 0)
    selected(admission, 1)
    trained(queue, admission, 1)
    queue.finish(1, 1, 3, {})  # it waited, and its first token is of version 1
    assert begun(queue, admission) == [2]
    rewarded(queue, 2)
    assert selected(admission, 2) == [2]
    assert trained(queue, admission, 2) == []
    queue.mark_rewarded([1])
    assert selected(admission, 3) == [1]


def test_dropped_groups_are_replaced_and_lost_ones_are_admitted_once():
    queue, admission = of(paced(staleness=0, groups_per_step=3))
    assert begun(queue, admission) == [0, 1, 2]
    rewarded(queue, 0, 1)
    queue.drop([1])
    queue.lost([0, 2])
    assert admission.num_to_begin() == 3 and admission.num_to_draw() == 1
    assert begun(queue, admission) == [0, 2, 3]
    rewarded(queue, 0, 2, 3)
    assert selected(admission, 1) == [0, 2, 3]
    queue.lost([2])  # while it is trained on: the step is filled up
    assert selected(admission, 1) is None
    assert begun(queue, admission) == [2]
    rewarded(queue, 2)
    assert selected(admission, 1) == [0, 2, 3]


def test_depth_bounds_what_generates_at_once_apart_from_staleness():
    queue, admission = of(paced(staleness=3, depth=3))
    assert begun(queue, admission) == [0, 1, 2] and begun(queue, admission) == []
    rewarded(queue, 1)
    assert begun(queue, admission) == [3]
    rewarded(queue, 0, 2, 3)
    assert begun(queue, admission) == [4, 5, 6]
    rewarded(queue, 4, 5, 6)
    assert begun(queue, admission) == [7] and admission.num_to_begin() == 0


def test_samples_that_wait_hold_back_new_groups_but_not_those_of_the_next_batch():
    queue, admission = of(paced(staleness=3, max_samples=11))  # of 3 a group
    assert begun(queue, admission) == [0, 1, 2]
    rewarded(queue, 0, 1, 2)
    assert begun(queue, admission) == []
    assert selected(admission, 1) == [0, 1]
    assert begun(queue, admission) == [3]  # the next batch has group 2 and lacks one
    trained(queue, admission, 1)
    assert begun(queue, admission) == [4]


def test_steps_that_replay_begin_as_many_groups_as_they_train():
    queue, admission = of(paced(staleness=2, new_per_step=1))
    admission.expect(1, 2)  # there is nothing to replay yet
    assert begun(queue, admission) == [0, 1, 2, 3]  # two of step 1, one of 2 and of 3
    rewarded(queue, 0, 1, 2, 3)
    for step, wanted in ((1, [0, 1]), (2, [2]), (3, [3])):
        assert selected(admission, step) == wanted
        assert trained(queue, admission, step) == []
        admission.expect(step + 1, 1)
        assert begun(queue, admission) == [3 + step] and begun(queue, admission) == []
    admission.expect(4, 2)  # fewer can be replayed than was thought
    assert begun(queue, admission) == [7]
    rewarded(queue, 4, 5)
    assert selected(admission, 4) == [4, 5]
    assert queue.groups_total["abandoned"] == 0


def test_a_step_waits_for_what_later_ones_would_not_train_as_they_replay():
    queue, admission = of(paced(staleness=2, new_per_step=1))
    admission.expect(1, 2)
    assert begun(queue, admission) == [0, 1, 2, 3]
    rewarded(queue, 0, 1)
    assert selected(admission, 1) == [0, 1] and trained(queue, admission, 1) == []
    assert begun(queue, admission) == [4]  # version 1
    rewarded(queue, 4)
    assert selected(admission, 2) is None  # 4 is ready, but step 3 has room for one of 2 and 3
    rewarded(queue, 3)
    assert selected(admission, 2) == [3] and trained(queue, admission, 2) == []


def test_samples_that_wait_hold_back_all_but_what_the_next_batch_lacks_besides_its_replay():
    queue, admission = of(paced(staleness=3, groups_per_step=3, new_per_step=1, max_samples=9))
    admission.expect(1, 2)
    assert begun(queue, admission) == [0, 1, 2]
    rewarded(queue, 0, 1, 2)
    assert selected(admission, 1) == [0, 1]
    assert begun(queue, admission) == []  # group 2 is all that step 2 needs
    trained(queue, admission, 1)
    assert begun(queue, admission) == [3, 4]


def test_what_a_step_needs_is_within_what_it_trains():
    _, admission = of(paced(staleness=1))
    with pytest.raises(LedgerError, match="step 1 cannot need 3 groups; allowed: 0 to 2"):
        admission.expect(1, 3)


def test_a_share_of_a_group_is_a_group_over():
    for share, groups, extra in ((0, 8, 0), (0.05, 8, 1), (0.5, 8, 4), (0.07, 100, 7)):
        assert paced(staleness=1, groups_per_step=groups, over_issue=share).num_extra == extra


def test_nothing_is_begun_for_steps_that_the_run_does_not_have():
    queue, admission = of(paced(staleness=3, num_steps=2, over_issue=0.5))
    assert begun(queue, admission) == [0, 1, 2, 3, 4]
    for step in (1, 2):
        rewarded(queue, *range(2 * step - 2, 2 * step))
        selected(admission, step)
        trained(queue, admission, step)
        assert begun(queue, admission) == []


def test_a_step_may_need_fewer_groups():
    queue, admission = of(paced(staleness=0))
    begun(queue, admission)
    rewarded(queue, 1)
    assert [group.group_id for group in admission.select(1, 1)] == [1]
    with pytest.raises(LedgerError, match="step 1 cannot select 3 groups; allowed: 0 to 2"):
        admission.select(1, 3)
    assert trained(queue, admission, 1) == [0]  # with staleness 0 it is too old
    assert begun(queue, admission) == [0, 2]


def test_versions_and_steps_come_in_order():
    queue, admission = of(paced(staleness=0))
    begun(queue, admission)
    rewarded(queue, 0, 1)
    with pytest.raises(LedgerError, match="step 2 cannot select: the servers have version 0"):
        admission.select(2)
    selected(admission, 1)
    with pytest.raises(
        LedgerError, match="version 1 cannot be pushed after 0, with step 0 trained"
    ):
        admission.pushed(1)
    queue.mark_trained(1)
    with pytest.raises(
        LedgerError, match="version 2 cannot be pushed after 0, with step 1 trained"
    ):
        admission.pushed(2)
    with pytest.raises(
        LedgerError, match=r"step 1 cannot select: .* step 1 is trained; allowed: step 2"
    ):
        admission.select(1)


def test_a_push_is_refused_until_what_would_be_too_old_is_evicted():
    queue, admission = of(paced(staleness=1, groups_per_step=1))
    for step in (1, 2):
        begun(queue, admission)
        rewarded(queue, step)
        selected(admission, step)
        queue.mark_trained(step)
        if step == 1:
            admission.pushed(1)
    told = r"group 0 \(generating\) has version 0; allowed: from 1, after evict\(2\)"
    with pytest.raises(LedgerError, match=told):
        admission.pushed(2)
    assert admission.evict(2) == [0]
    admission.pushed(2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"groups_per_step": 0}, "groups_per_step=0; allowed: 1 or more"),
        ({"staleness": -1}, "staleness=-1; allowed: 0 or more"),
        ({"depth": 0}, "depth=0; allowed: 1 or more"),
        ({"over_issue": float("nan")}, "over_issue=nan; allowed: 0 or more"),
        ({"max_samples": 5}, "max_samples=5; allowed: 6 or more"),
        ({"new_per_step": 0}, "new_per_step=0; allowed: 1 to 2"),
        ({"new_per_step": 3}, "new_per_step=3; allowed: 1 to 2"),
        (
            {"staleness": 0, "over_issue": 0.5},
            "over_issue=0.5 with staleness=0, .*; allowed: 0, or",
        ),
    ],
)
def test_pacing_that_is_not_allowed_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        paced(**{"staleness": 1, **settings})


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_groups_that_end_in_order_are_never_abandoned(staleness):
    queue, admission = of(paced(staleness=staleness, num_steps=50))
    running: list[int] = []
    for step in range(1, 51):
        while selected(admission, step) is None:
            running += begun(queue, admission)
            rewarded(queue, running.pop(0))
        assert trained(queue, admission, step) == []
    assert queue.groups_total["abandoned"] == 0 and queue.groups_total["begun"] == 100


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"depth": 8}, {"max_samples": 10**6}])
def test_a_step_takes_work_near_linear_in_its_groups(staleness, settings):
    """It asks after each group that comes what may begin, and whether it has enough."""

    def run_step(num_groups: int) -> None:
        queue, admission = of(paced(groups_per_step=num_groups, staleness=staleness, **settings))
        running = begun(queue, admission)
        while (chosen := selected(admission, 1)) is None:
            rewarded(queue, running.pop(0))
            running += begun(queue, admission)
        assert len(chosen) == num_groups

    assert growth(run_step, 16, 256) < 1.3
