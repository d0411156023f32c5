"""Groups come back as they end: each once, whole, in order; abandoned ones never."""

from __future__ import annotations

import asyncio

import pytest

from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample
from mcore_rl.rollout.running_groups import RunningGroups


def sample(group_id: int) -> Sample:
    return Sample([1], [2], [1], [-0.5], [0], "stop", group_id)


class Made:
    """Groups of two samples each, which end when they are told to."""

    def __init__(self, *group_ids: int) -> None:
        self.groups = RunningGroups()
        self.ends = {i: asyncio.get_running_loop().create_future() for i in group_ids}
        self.ended: list[int] = []
        self.groups.begin({i: asyncio.create_task(self._run(i)) for i in group_ids})

    async def _run(self, group_id: int) -> list[Sample]:
        try:
            await self.ends[group_id]
        finally:
            await asyncio.sleep(0)
            self.ended.append(group_id)
        return [sample(group_id)] * 2

    def end(self, *group_ids: int) -> None:
        for group_id in group_ids:
            self.ends[group_id].set_result(None)

    async def collected(self, wait_s: float = 0.0) -> list[int]:
        return [one.group_id for one in await self.groups.collect(wait_s)]


def test_groups_come_once_whole_and_in_the_order_of_their_ids():
    async def work() -> None:
        made = Made(5, 3, 4)
        assert await made.collected() == []
        made.end(5, 3)
        assert await made.collected(10.0) == [3, 3, 5, 5]
        assert made.groups.ids == {4}
        assert await made.collected() == []
        made.end(4)
        assert await made.collected(10.0) == [4, 4]

    asyncio.run(work())


def test_it_waits_for_a_group_that_has_yet_to_begin_and_not_for_longer_than_it_may():
    async def work() -> None:
        made = Made()
        assert await made.collected(0.01) == []
        collecting = asyncio.create_task(made.groups.collect(10.0))
        await asyncio.sleep(0)

        async def at_once() -> list[Sample]:
            return [sample(1)]

        made.groups.begin({1: asyncio.create_task(at_once())})
        assert await collecting == [sample(1)]

    asyncio.run(work())


def test_what_made_a_group_fail_is_raised_once_and_the_others_stay():
    async def work() -> None:
        made = Made(1, 2, 3)
        made.ends[2].set_exception(OSError("no reward"))
        made.end(1)
        await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="no reward"):
            await made.collected()
        assert await made.collected() == [1, 1]
        made.end(3)
        assert await made.collected(10.0) == [3, 3]

    asyncio.run(work())


def test_together_it_waits_until_none_runs_or_one_has_failed():
    async def work() -> None:
        made = Made(1, 2, 3)
        made.end(1)
        collecting = asyncio.create_task(made.groups.collect(600.0, at_least=9))
        for group_id in (2, 3):
            await asyncio.sleep(0.01)
            assert not collecting.done()
            made.end(group_id)
        async with asyncio.timeout(10):  # none is left that could be the fourth
            assert [one.group_id for one in await collecting] == [1, 1, 2, 2, 3, 3]
        made = Made(4, 5)
        made.end(4)
        await asyncio.sleep(0.01)
        found = await made.groups.collect(0.05, at_least=9)  # what there is when time is over
        assert [one.group_id for one in found] == [4, 4]
        made = Made(6, 7)
        made.ends[6].set_exception(OSError("no reward"))
        with pytest.raises(OSError, match="no reward"):
            await made.groups.collect(10.0, at_least=9)

    asyncio.run(work())


def test_an_abandoned_group_has_ended_and_never_comes():
    async def work() -> None:
        made = Made(1, 2, 3)
        made.end(1)
        await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            await made.groups.abandon([1, 2, 7])
        assert made.ended == [1, 2]
        made.end(3)
        assert await made.collected(10.0) == [3, 3]
        assert await made.collected() == []

    asyncio.run(work())


def test_a_group_without_a_sample_comes_as_one_that_says_so():
    async def nothing() -> list[Sample]:
        return []

    async def work() -> list[Sample]:
        groups = RunningGroups()
        groups.begin({7: asyncio.create_task(nothing())})
        return await groups.collect(10.0)

    [found] = asyncio.run(work())
    assert (found.group_id, found.response_ids, found.status) == (7, [], "failed")
    assert found.reward_error == "no trajectory of the group has had a turn"
    assert len(Batch.collate([found])) == 1
