"""Who waits for whom, where requests and what is done beside them meet."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from mcore_rl.config.errors import StateError
from mcore_rl.rollout.lifecycle import Call, Lifecycle, State
from mcore_rl.rollout.traffic import Traffic


class Scene:
    """A serving server, and which of the acts that were begun have come to their middle."""

    def __init__(self) -> None:
        self.lifecycle = Lifecycle()
        self.lifecycle.state = State.SERVING
        self.traffic = Traffic(self.lifecycle)
        self.inside: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, act: AbstractAsyncContextManager[None]) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._play(name, act))
        await self.settled()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await asyncio.gather(*(self._tasks[name] for name in names))
        await self.settled()

    async def _play(self, name: str, act: AbstractAsyncContextManager[None]) -> None:
        async with act:
            self.inside.append(name)
            await self._ends[name].wait()
        self.inside.remove(name)

    async def settled(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def test_new_requests_wait_for_an_update_in_flight_and_running_ones_stay():
    async def work() -> None:
        scene = Scene()
        await scene.begin("early", scene.traffic.request())
        await scene.begin("update", scene.traffic.beside(Call.UPDATE))
        await scene.begin("late", scene.traffic.request())
        await scene.begin("held", scene.traffic.held())
        assert scene.inside == ["early", "update"]
        await scene.end("update")
        assert scene.inside == ["early", "late", "held"]
        await scene.end("early", "late", "held")
        with scene.lifecycle.alone(Call.UPDATE):
            pass

    asyncio.run(work())


def test_an_update_in_flight_waits_until_all_that_are_held_have_started():
    async def work() -> None:
        scene = Scene()
        await scene.begin("held", scene.traffic.held())
        await scene.begin("other", scene.traffic.held())
        assert not scene.traffic.is_last_held
        await scene.begin("update", scene.traffic.beside(Call.UPDATE))
        await scene.end("held")
        assert scene.inside == ["other"] and scene.traffic.is_last_held
        await scene.end("other")
        assert scene.inside == ["update"]
        await scene.end("update")

    asyncio.run(work())


def test_two_updates_in_flight_are_an_error_and_the_first_is_not_disturbed():
    async def work() -> None:
        scene = Scene()
        await scene.begin("update", scene.traffic.beside(Call.UPDATE))
        with pytest.raises(StateError, match="while it has to update its weights"):
            async with scene.traffic.beside(Call.UPDATE):
                pytest.fail("it was allowed")
        await scene.begin("late", scene.traffic.request())
        assert scene.inside == ["update"]
        await scene.end("update", "late")

    asyncio.run(work())


def test_requests_that_waited_for_an_update_that_failed_are_refused():
    async def work() -> None:
        scene = Scene()
        with pytest.raises(OSError):
            async with scene.traffic.beside(Call.UPDATE):
                late = asyncio.create_task(scene.begin("late", scene.traffic.request()))
                await scene.settled()
                assert scene.inside == []
                raise OSError
        await late
        with pytest.raises(StateError, match="an update did not complete"):
            await scene.end("late")

    asyncio.run(work())


def test_through_sleep_requests_are_kept_or_wait_and_all_that_wakes_it_is_allowed():
    async def work() -> None:
        scene = Scene()
        await scene.begin("early", scene.traffic.request())
        async with scene.traffic.beside(Call.SLEEP):
            scene.traffic.fall_asleep()
        await scene.begin("late", scene.traffic.request())
        for call in (Call.WAKE_WEIGHTS, Call.CONNECT, Call.UPDATE, Call.UPDATE, Call.WAKE_KV_CACHE):
            async with scene.traffic.alone(call):
                await scene.settled()
            assert scene.inside == ["early"]
        scene.traffic.wake_up()
        await scene.settled()
        assert scene.inside == ["early", "late"]
        await scene.end("early", "late")

    asyncio.run(work())
