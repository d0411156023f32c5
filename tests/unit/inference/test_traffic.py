"""Who waits for whom, where requests and what is done beside them meet."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from mcore_rl.config.errors import StateError
from mcore_rl.inference.vllm.lifecycle import Call, Lifecycle, State
from mcore_rl.inference.vllm.traffic import Traffic


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


async def done(act: AbstractAsyncContextManager[None]) -> None:
    async with act:
        pass


async def fail(act: AbstractAsyncContextManager[None]) -> None:
    with pytest.raises(OSError):
        async with act:
            raise OSError


@pytest.mark.parametrize("how", ["beside", "alone"])
def test_after_an_update_in_flight_that_failed_requests_wait_until_one_succeeds(how):
    """The trainer connects anew without a server that has died, and sends the weights again."""

    async def work() -> None:
        scene = Scene()
        traffic = scene.traffic
        with pytest.raises(OSError):
            async with traffic.beside(Call.UPDATE):
                await scene.begin("meanwhile", traffic.request())
                raise OSError
        await scene.begin("after", traffic.request())
        await scene.begin("held", traffic.held())
        assert traffic.awaits_update
        again = done(traffic.beside(Call.CONNECT)), fail(traffic.beside(Call.UPDATE))
        for act in (*again, done(traffic.beside(Call.CONNECT))):
            await act
            await scene.settled()
            assert scene.inside == [] and traffic.awaits_update
        await done(getattr(traffic, how)(Call.UPDATE))
        await scene.settled()
        assert scene.inside == ["meanwhile", "after", "held"] and not traffic.awaits_update
        await scene.end("meanwhile", "after", "held")

    asyncio.run(work())


def test_after_an_update_on_its_own_that_failed_requests_are_refused_and_do_not_wait():
    async def work() -> None:
        scene = Scene()
        await fail(scene.traffic.alone(Call.UPDATE))
        await done(scene.traffic.beside(Call.CONNECT))
        await fail(scene.traffic.beside(Call.CONNECT))
        assert not scene.traffic.awaits_update
        with pytest.raises(StateError, match="an update did not complete"):
            await done(scene.traffic.request())

    asyncio.run(work())


def test_what_waits_for_an_update_can_be_cancelled_and_is_refused_at_the_end():
    async def work() -> None:
        scene = Scene()
        await fail(scene.traffic.beside(Call.UPDATE))
        ended, late = (asyncio.create_task(done(scene.traffic.request())) for _ in range(2))
        await scene.settled()
        ended.cancel()
        await asyncio.wait([ended])
        assert ended.cancelled() and not late.done()
        scene.traffic.close()
        await scene.settled()
        assert late.done()
        with pytest.raises(StateError, match="it has been closed"):
            await late

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
            await scene.settled()
        assert scene.inside == ["early", "late"]
        await scene.end("early", "late")

    asyncio.run(work())
