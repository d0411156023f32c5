"""Groups that StalenessController begins, selects and abandons, worked out by hand."""

from __future__ import annotations

import pytest

from mcore_rl.rollout.buffer import (
    BufferStateError,
    GroupState,
    SampleQueue,
    StalenessController,
    StalenessSettings,
)
from tests.operations import growth


def make_pacing(**settings) -> StalenessSettings:
    return StalenessSettings(**{"groups_per_step": 2, "group_size": 3, "num_steps": 9, **settings})


def make_controller(
    pacing: StalenessSettings,
) -> tuple[SampleQueue[object], StalenessController[object]]:
    queue: SampleQueue[object] = SampleQueue(pacing.group_size)
    return queue, StalenessController(queue, pacing)


def begin(queue, controller) -> list[int]:
    """Issue the groups that the queue lacks, begin groups, and return their ids."""
    first, num = queue.groups_total["issued"], controller.num_to_draw()
    queue.issue(range(first, first + num), range(first, first + num))
    return [group.group_id for group in controller.begin()]


def finish(queue, *group_ids: int) -> None:
    for group_id in group_ids:
        queue.finish(group_id, -1, 3, {})
    queue.mark_rewarded(group_ids)


def select(controller, step: int) -> list[int] | None:
    groups = controller.select(step)
    return None if groups is None else [group.group_id for group in groups]


def train(queue, controller, step: int) -> list[int]:
    """End the step; return the groups that the servers have to end before the push."""
    queue.mark_trained(step)
    running = controller.evict(step)
    controller.mark_pushed(step)
    queue.clear(step)
    return running


def test_staleness_0_begins_the_groups_of_one_step():
    queue, controller = make_controller(make_pacing(staleness=0))
    for step, expected in ((1, [0, 1]), (2, [2, 3]), (3, [4, 5])):
        assert begin(queue, controller) == expected and begin(queue, controller) == []
        finish(queue, expected[1])
        assert select(controller, step) is None and begin(queue, controller) == []
        finish(queue, expected[0])
        assert select(controller, step) == expected and begin(queue, controller) == []
        queue.mark_trained(step)
        assert begin(queue, controller) == [] and controller.evict(step) == []
        controller.mark_pushed(step)
        queue.clear(step)
        assert len(queue) == 0


def test_staleness_1_begins_a_step_ahead_and_waits_for_groups_that_would_be_too_old_later():
    queue, controller = make_controller(make_pacing(staleness=1))
    assert begin(queue, controller) == [0, 1, 2, 3]  # of steps 1 and 2, version 0
    finish(queue, 3, 1, 2)
    assert select(controller, 1) == [1, 2] and begin(queue, controller) == []
    assert train(queue, controller, 1) == []  # group 0 may be trained in step 2
    assert begin(queue, controller) == [4, 5]  # version 1
    finish(queue, 4, 5)
    assert select(controller, 2) is None  # 3 and 4 are ready, but 0 is too old for step 3
    finish(queue, 0)
    assert select(controller, 2) == [0, 3]
    assert train(queue, controller, 2) == []


def test_as_many_stragglers_as_extra_groups_are_issued_again():
    queue, controller = make_controller(make_pacing(staleness=1, oversampling=0.5))
    assert begin(queue, controller) == [0, 1, 2, 3, 4]  # one more than steps 1 and 2 need
    finish(queue, 4, 1, 2)
    assert select(controller, 1) == [1, 2] and begin(queue, controller) == []
    assert train(queue, controller, 1) == []
    assert begin(queue, controller) == [5, 6]  # version 1
    finish(queue, 5, 6)
    assert select(controller, 2) is None  # of 0 and 3 one may be late
    finish(queue, 3)
    assert select(controller, 2) == [3, 4]  # the oldest first
    assert train(queue, controller, 2) == [0]  # in step 3 it would be 2 versions old
    assert begin(queue, controller) == [0, 7, 8]  # version 2; groups 5 and 6 wait, of version 1
    finish(queue, 0, 7)
    assert select(controller, 3) == [5, 6]
    ages = [(group.group_id, group.age(2)) for group in queue.groups(GroupState.TRAINING)]
    assert ages == [(5, 1), (6, 1)]


def test_a_step_does_not_wait_for_as_many_stragglers_as_extra_groups():
    queue, controller = make_controller(make_pacing(staleness=1, oversampling=0.5))
    assert begin(queue, controller) == [0, 1, 2, 3, 4]
    finish(queue, 0, 1, 2, 4)
    queue.drop([4])
    assert select(controller, 1) == [0, 1] and train(queue, controller, 1) == []
    assert begin(queue, controller) == [5, 6, 7]  # version 1
    finish(queue, 5)
    assert select(controller, 2) == [2, 5]  # group 3 is as old as 2, and one may be late
    assert train(queue, controller, 2) == [3]


def test_finished_groups_that_would_be_too_old_are_issued_again():
    queue, controller = make_controller(make_pacing(staleness=1, oversampling=0.5))
    assert begin(queue, controller) == [0, 1, 2, 3, 4]
    finish(queue, 0, 1, 2, 3, 4)
    for step, expected in ((1, [0, 1]), (2, [2, 3])):
        assert select(controller, step) == expected
        assert train(queue, controller, step) == []
        assert begin(queue, controller) == ([5, 6] if step == 1 else [4, 7, 8])
    assert queue.groups_total["abandoned"] == 1


def test_the_age_of_a_group_is_that_of_its_tokens():
    queue, controller = make_controller(make_pacing(staleness=1, groups_per_step=1))
    assert begin(queue, controller) == [0, 1]
    finish(queue, 0)
    select(controller, 1)
    train(queue, controller, 1)
    queue.finish(1, 1, 3, {})  # it waited, and its first token is of version 1
    assert begin(queue, controller) == [2]
    finish(queue, 2)
    assert select(controller, 2) == [2]
    assert train(queue, controller, 2) == []
    queue.mark_rewarded([1])
    assert select(controller, 3) == [1]


def test_dropped_groups_are_replaced_and_lost_ones_begin_again():
    queue, controller = make_controller(make_pacing(staleness=0, groups_per_step=3))
    assert begin(queue, controller) == [0, 1, 2]
    finish(queue, 0, 1)
    queue.drop([1])
    queue.reissue_lost([0, 2])
    assert controller.num_to_begin() == 3 and controller.num_to_draw() == 1
    assert begin(queue, controller) == [0, 2, 3]
    finish(queue, 0, 2, 3)
    assert select(controller, 1) == [0, 2, 3]
    queue.reissue_lost([2])  # while it is trained on: the step is filled up
    assert select(controller, 1) is None
    assert begin(queue, controller) == [2]
    finish(queue, 2)
    assert select(controller, 1) == [0, 2, 3]


def test_depth_bounds_the_groups_being_generated():
    queue, controller = make_controller(make_pacing(staleness=3, depth=3))
    assert begin(queue, controller) == [0, 1, 2] and begin(queue, controller) == []
    finish(queue, 1)
    assert begin(queue, controller) == [3]
    finish(queue, 0, 2, 3)
    assert begin(queue, controller) == [4, 5, 6]
    finish(queue, 4, 5, 6)
    assert begin(queue, controller) == [7] and controller.num_to_begin() == 0


def test_max_samples_bounds_new_groups_except_those_of_the_next_batch():
    queue, controller = make_controller(make_pacing(staleness=3, max_samples=11))  # of 3 a group
    assert begin(queue, controller) == [0, 1, 2]
    finish(queue, 0, 1, 2)
    assert begin(queue, controller) == []
    assert select(controller, 1) == [0, 1]
    assert begin(queue, controller) == [3]  # the next batch has group 2 and lacks one
    train(queue, controller, 1)
    assert begin(queue, controller) == [4]


def test_steps_that_replay_begin_as_many_groups_as_they_train():
    queue, controller = make_controller(make_pacing(staleness=2, new_per_step=1))
    controller.expect(1, 2)  # nothing to replay yet
    assert begin(queue, controller) == [0, 1, 2, 3]  # two of step 1, one of 2 and of 3
    finish(queue, 0, 1, 2, 3)
    for step, expected in ((1, [0, 1]), (2, [2]), (3, [3])):
        assert select(controller, step) == expected
        assert train(queue, controller, step) == []
        controller.expect(step + 1, 1)
        assert begin(queue, controller) == [3 + step] and begin(queue, controller) == []
    controller.expect(4, 2)  # fewer can be replayed than expected
    assert begin(queue, controller) == [7]
    finish(queue, 4, 5)
    assert select(controller, 4) == [4, 5]
    assert queue.groups_total["abandoned"] == 0


def test_a_step_waits_for_groups_that_replaying_steps_would_not_train():
    queue, controller = make_controller(make_pacing(staleness=2, new_per_step=1))
    controller.expect(1, 2)
    assert begin(queue, controller) == [0, 1, 2, 3]
    finish(queue, 0, 1)
    assert select(controller, 1) == [0, 1] and train(queue, controller, 1) == []
    assert begin(queue, controller) == [4]  # version 1
    finish(queue, 4)
    assert select(controller, 2) is None  # 4 is ready, but step 3 has room for one of 2 and 3
    finish(queue, 3)
    assert select(controller, 2) == [3] and train(queue, controller, 2) == []


def test_max_samples_with_replay_allows_what_the_next_batch_lacks():
    queue, controller = make_controller(
        make_pacing(staleness=3, groups_per_step=3, new_per_step=1, max_samples=9)
    )
    controller.expect(1, 2)
    assert begin(queue, controller) == [0, 1, 2]
    finish(queue, 0, 1, 2)
    assert select(controller, 1) == [0, 1]
    assert begin(queue, controller) == []  # group 2 is all that step 2 needs
    train(queue, controller, 1)
    assert begin(queue, controller) == [3, 4]


def test_expect_more_groups_than_a_step_trains_is_an_error():
    _, controller = make_controller(make_pacing(staleness=1))
    with pytest.raises(BufferStateError, match="step 1 cannot need 3 groups; allowed: 0 to 2"):
        controller.expect(1, 3)


def test_extra_groups_are_rounded_up():
    for share, groups, extra in ((0, 8, 0), (0.05, 8, 1), (0.5, 8, 4), (0.07, 100, 7)):
        assert (
            make_pacing(staleness=1, groups_per_step=groups, oversampling=share).num_extra == extra
        )


def test_no_group_is_begun_for_steps_after_the_last():
    queue, controller = make_controller(make_pacing(staleness=3, num_steps=2, oversampling=0.5))
    assert begin(queue, controller) == [0, 1, 2, 3, 4]
    for step in (1, 2):
        finish(queue, *range(2 * step - 2, 2 * step))
        select(controller, step)
        train(queue, controller, step)
        assert begin(queue, controller) == []


def test_a_step_may_need_fewer_groups():
    queue, controller = make_controller(make_pacing(staleness=0))
    begin(queue, controller)
    finish(queue, 1)
    assert [group.group_id for group in controller.select(1, 1)] == [1]
    with pytest.raises(BufferStateError, match="step 1 cannot select 3 groups; allowed: 0 to 2"):
        controller.select(1, 3)
    assert train(queue, controller, 1) == [0]  # with staleness 0 it is too old
    assert begin(queue, controller) == [0, 2]


def test_versions_and_steps_come_in_order():
    queue, controller = make_controller(make_pacing(staleness=0))
    begin(queue, controller)
    finish(queue, 0, 1)
    with pytest.raises(BufferStateError, match="step 2 cannot select: the servers have version 0"):
        controller.select(2)
    select(controller, 1)
    with pytest.raises(
        BufferStateError, match="version 1 cannot be pushed after 0, with step 0 trained"
    ):
        controller.mark_pushed(1)
    queue.mark_trained(1)
    with pytest.raises(
        BufferStateError, match="version 2 cannot be pushed after 0, with step 1 trained"
    ):
        controller.mark_pushed(2)
    with pytest.raises(
        BufferStateError, match=r"step 1 cannot select: .* step 1 is trained; allowed: step 2"
    ):
        controller.select(1)


def test_a_push_is_refused_until_too_old_groups_are_evicted():
    queue, controller = make_controller(make_pacing(staleness=1, groups_per_step=1))
    for step in (1, 2):
        begin(queue, controller)
        finish(queue, step)
        select(controller, step)
        queue.mark_trained(step)
        if step == 1:
            controller.mark_pushed(1)
    message = r"group 0 \(generating\) has version 0; allowed: from 1, after evict\(2\)"
    with pytest.raises(BufferStateError, match=message):
        controller.mark_pushed(2)
    assert controller.evict(2) == [0]
    controller.mark_pushed(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups_per_step": 0}, "groups_per_step=0; allowed: 1 or more"),
        ({"staleness": -1}, "staleness=-1; allowed: 0 or more"),
        ({"depth": 0}, "depth=0; allowed: 1 or more"),
        ({"oversampling": float("nan")}, "oversampling=nan; allowed: 0 or more"),
        ({"max_samples": 5}, "max_samples=5; allowed: 6 or more"),
        ({"new_per_step": 0}, "new_per_step=0; allowed: 1 to 2"),
        ({"new_per_step": 3}, "new_per_step=3; allowed: 1 to 2"),
        (
            {"staleness": 0, "oversampling": 0.5},
            "oversampling=0.5 with staleness=0, .*; allowed: 0, or",
        ),
    ],
)
def test_bad_settings_of_pacing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_pacing(**{"staleness": 1, **settings})


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_groups_that_end_in_order_are_never_abandoned(staleness):
    queue, controller = make_controller(make_pacing(staleness=staleness, num_steps=50))
    running: list[int] = []
    for step in range(1, 51):
        while select(controller, step) is None:
            running += begin(queue, controller)
            finish(queue, running.pop(0))
        assert train(queue, controller, step) == []
    assert queue.groups_total["abandoned"] == 0 and queue.groups_total["begun"] == 100


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"depth": 8}, {"max_samples": 10**6}])
def test_the_work_of_a_step_grows_linearly_with_its_groups(staleness, settings):
    # After each group it checks which groups may begin, and whether it has enough.

    def run_step(num_groups: int) -> None:
        queue, controller = make_controller(
            make_pacing(groups_per_step=num_groups, staleness=staleness, **settings)
        )
        running = begin(queue, controller)
        while (groups := select(controller, 1)) is None:
            finish(queue, running.pop(0))
            running += begin(queue, controller)
        assert len(groups) == num_groups

    assert growth(run_step, 16, 256) < 1.3
