"""The time of a trajectory passes only while it is not stopped."""

from __future__ import annotations

import asyncio

import pytest

from mcore_rl.agents.time_limit import TimeLimit
from tests.unit.rewards.test_http_reward import SkippedTime


async def ended_in_time(limit: TimeLimit, *pauses_s: float) -> bool:
    """Whether a trajectory that is stopped for each of these times, in turn, ended."""
    try:
        async with limit.timeout:
            for pause_s in pauses_s:
                with limit.stopped(), limit.stopped():
                    await asyncio.sleep(pause_s)
            await asyncio.sleep(0.05)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(("limit_s", "ends"), [(0.02, False), (0.2, True)])
def test_time_stands_still_while_it_is_stopped(limit_s, ends):
    async def work() -> bool:
        return await ended_in_time(TimeLimit(limit_s), 0.3, 0.1)

    clock = SkippedTime()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.time_s  # type: ignore[method-assign]
    try:
        assert loop.run_until_complete(work()) is ends
    finally:
        loop.close()


def test_a_trajectory_whose_time_is_over_can_be_stopped_while_it_ends():
    async def work() -> bool:
        limit = TimeLimit(0.01)
        try:
            async with limit.timeout:
                try:
                    await asyncio.sleep(10)
                finally:
                    with limit.stopped():
                        await asyncio.sleep(0.01)
        except TimeoutError:
            return True
        return False

    assert asyncio.run(work())
