"""States of a server: calls out of order are refused, and requests wait for calls beside them."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AbstractAsyncContextManager

import pytest

from mcore_rl.config.errors import StateError
from mcore_rl.inference.lifecycle import (
    ASLEEP,
    TRANSITIONS,
    Call,
    Lifecycle,
    RequestGate,
    State,
)

ALONE = [call for call in Call if call is not Call.GENERATE]
TURNS = (Call.SLEEP, Call.WAKE_WEIGHTS, Call.UPDATE, Call.WAKE_KV_CACHE)


def make_in_state(state: State) -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.state = state
    return lifecycle


def test_a_server_that_shares_its_device_serves_again_after_each_step():
    lifecycle = Lifecycle()
    for call in (Call.START, *TURNS, *TURNS):
        with lifecycle.run_alone(call):
            pass
    assert lifecycle.state is State.SERVING


@pytest.mark.parametrize(
    "calls", [[Call.CONNECT, Call.UPDATE], [*TURNS], [Call.CONNECT, *TURNS]], ids=str
)
def test_a_server_without_weights_serves_only_after_an_update(calls):
    lifecycle = Lifecycle()
    for call in (Call.START_WITHOUT_WEIGHTS, *calls):
        with pytest.raises(StateError, match="cannot generate"), lifecycle.run_request():
            pytest.fail("it was allowed")
        with lifecycle.run_alone(call):
            pass
    assert lifecycle.state is State.SERVING


@pytest.mark.parametrize(("call", "state"), [*itertools.product(Call, State)])
def test_a_call_is_allowed_in_its_states_only(call, state):
    lifecycle = make_in_state(state)
    around = lifecycle.run_request() if call is Call.GENERATE else lifecycle.run_alone(call)
    if (call, state) in TRANSITIONS:
        with around:
            pass
        assert lifecycle.state is TRANSITIONS[call, state]
        return
    with (
        pytest.raises(StateError, match=f"^the server cannot {call.value}: it {state.value}; all"),
        around,
    ):
        pytest.fail("it was allowed")
    assert lifecycle.state is state


def test_requests_are_allowed_only_while_serving():
    assert {state for call, state in TRANSITIONS if call is Call.GENERATE} == {State.SERVING}


@pytest.mark.parametrize(
    ("call", "before", "after"),
    [
        (Call.UPDATE, State.SERVING, State.TORN),
        (Call.UPDATE, State.TORN, State.TORN),
        (Call.UPDATE, State.EMPTY, State.EMPTY),
        (Call.UPDATE, State.WAITING, State.WAITING),
        (Call.SLEEP, State.WAITING, State.TORN),
        (Call.START_WITHOUT_WEIGHTS, State.NEW, State.NEW),
        (Call.UPDATE, State.LOADED, State.EMPTY),
        (Call.START, State.NEW, State.NEW),
        (Call.SLEEP, State.SERVING, State.TORN),
    ],
)
def test_state_after_a_call_that_failed(call, before, after):
    lifecycle = make_in_state(before)
    with pytest.raises(OSError), lifecycle.run_alone(call):
        raise OSError
    assert lifecycle.state is after


@pytest.mark.parametrize("call", ALONE)
def test_calls_are_refused_while_requests_run(call):
    lifecycle = make_in_state(State.SERVING)
    with lifecycle.run_request():
        with lifecycle.run_request():
            pass
        with pytest.raises(StateError), lifecycle.run_alone(call):
            pytest.fail("it was allowed")
    assert lifecycle.state is State.SERVING


@pytest.mark.parametrize("state", State)
def test_calls_beside_requests_are_allowed(state):
    # Requests of a server that sleeps were paused before.
    for call in ALONE:
        if (call, state) not in TRANSITIONS:
            continue
        lifecycle = make_in_state(State.SERVING)
        with lifecycle.run_request():
            lifecycle.state = state
            with lifecycle.run_alone(call, beside_requests=state not in ASLEEP):
                pass
            assert lifecycle.state is TRANSITIONS[call, state]


@pytest.mark.parametrize(("running", "call"), [*itertools.product([Call.UPDATE, Call.TRACE], Call)])
def test_all_calls_are_refused_while_one_runs_alone(running, call):
    lifecycle = make_in_state(State.SERVING)
    with lifecycle.run_alone(running):
        around = lifecycle.run_request() if call is Call.GENERATE else lifecycle.run_alone(call)
        with pytest.raises(StateError, match=f"while it has to {running.value}$"), around:
            pytest.fail("it was allowed")
    assert lifecycle.state is State.SERVING


def test_a_server_closed_during_a_call_stays_closed():
    lifecycle = make_in_state(State.SERVING)
    with lifecycle.run_alone(Call.UPDATE):
        lifecycle.close()
    assert lifecycle.state is State.CLOSED


class Scene:
    """A serving server, with tasks that stay inside a block of its gate until they are ended."""

    def __init__(self) -> None:
        self.lifecycle = Lifecycle()
        self.lifecycle.state = State.SERVING
        self.gate = RequestGate(self.lifecycle)
        self.inside: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, block: AbstractAsyncContextManager[None]) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, block))
        await self.settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await asyncio.gather(*(self._tasks[name] for name in names))
        await self.settle()

    async def _run(self, name: str, block: AbstractAsyncContextManager[None]) -> None:
        async with block:
            self.inside.append(name)
            await self._ends[name].wait()
        self.inside.remove(name)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def test_new_requests_wait_for_an_update_in_flight_and_running_ones_stay():
    async def work() -> None:
        scene = Scene()
        await scene.begin("early", scene.gate.run_request())
        await scene.begin("update", scene.gate.run_beside_requests(Call.UPDATE))
        await scene.begin("late", scene.gate.run_request())
        await scene.begin("starting", scene.gate.start_together())
        assert scene.inside == ["early", "update"]
        await scene.end("update")
        assert scene.inside == ["early", "late", "starting"]
        await scene.end("early", "late", "starting")
        with scene.lifecycle.run_alone(Call.UPDATE):
            pass

    asyncio.run(work())


def test_an_update_in_flight_waits_until_held_requests_have_started():
    async def work() -> None:
        scene = Scene()
        await scene.begin("starting", scene.gate.start_together())
        await scene.begin("other", scene.gate.start_together())
        assert not scene.gate.is_last_start
        await scene.begin("update", scene.gate.run_beside_requests(Call.UPDATE))
        await scene.end("starting")
        assert scene.inside == ["other"] and scene.gate.is_last_start
        await scene.end("other")
        assert scene.inside == ["update"]
        await scene.end("update")

    asyncio.run(work())


def test_two_updates_in_flight_are_an_error_and_the_first_is_not_disturbed():
    async def work() -> None:
        scene = Scene()
        await scene.begin("update", scene.gate.run_beside_requests(Call.UPDATE))
        with pytest.raises(StateError, match="while it has to update its weights"):
            async with scene.gate.run_beside_requests(Call.UPDATE):
                pytest.fail("it was allowed")
        await scene.begin("late", scene.gate.run_request())
        assert scene.inside == ["update"]
        await scene.end("update", "late")

    asyncio.run(work())


async def run(block: AbstractAsyncContextManager[None]) -> None:
    async with block:
        pass


async def fail(block: AbstractAsyncContextManager[None]) -> None:
    with pytest.raises(OSError):
        async with block:
            raise OSError


@pytest.mark.parametrize("method", ["run_beside_requests", "run_alone"])
def test_after_an_update_in_flight_that_failed_requests_wait_until_one_succeeds(method):
    # A push in which another server has died is repeated.
    async def work() -> None:
        scene = Scene()
        gate = scene.gate
        with pytest.raises(OSError):
            async with gate.run_beside_requests(Call.UPDATE):
                await scene.begin("meanwhile", gate.run_request())
                raise OSError
        await scene.begin("after", gate.run_request())
        await scene.begin("starting", gate.start_together())
        assert gate.awaits_update
        attempts = (
            run(gate.run_beside_requests(Call.CONNECT)),
            fail(gate.run_beside_requests(Call.UPDATE)),
        )
        for block in (*attempts, run(gate.run_beside_requests(Call.CONNECT))):
            await block
            await scene.settle()
            assert scene.inside == [] and gate.awaits_update
        await run(getattr(gate, method)(Call.UPDATE))
        await scene.settle()
        assert scene.inside == ["meanwhile", "after", "starting"] and not gate.awaits_update
        await scene.end("meanwhile", "after", "starting")

    asyncio.run(work())


def test_requests_are_refused_after_an_update_without_requests_that_failed():
    async def work() -> None:
        scene = Scene()
        await fail(scene.gate.run_alone(Call.UPDATE))
        await run(scene.gate.run_beside_requests(Call.CONNECT))
        await fail(scene.gate.run_beside_requests(Call.CONNECT))
        assert not scene.gate.awaits_update
        with pytest.raises(StateError, match="an update did not complete"):
            await run(scene.gate.run_request())

    asyncio.run(work())


def test_requests_that_wait_for_an_update_can_be_cancelled_and_are_refused_when_it_closes():
    async def work() -> None:
        scene = Scene()
        await fail(scene.gate.run_beside_requests(Call.UPDATE))
        ended, late = (asyncio.create_task(run(scene.gate.run_request())) for _ in range(2))
        await scene.settle()
        ended.cancel()
        await asyncio.wait([ended])
        assert ended.cancelled() and not late.done()
        scene.gate.close()
        await scene.settle()
        assert late.done()
        with pytest.raises(StateError, match="it has been closed"):
            await late

    asyncio.run(work())


def test_requests_wait_through_a_sleep_and_all_calls_that_wake_are_allowed():
    async def work() -> None:
        scene = Scene()
        await scene.begin("early", scene.gate.run_request())
        async with scene.gate.run_beside_requests(Call.SLEEP):
            scene.gate.hold_until_awake()
        await scene.begin("late", scene.gate.run_request())
        for call in (Call.WAKE_WEIGHTS, Call.CONNECT, Call.UPDATE, Call.UPDATE, Call.WAKE_KV_CACHE):
            async with scene.gate.run_alone(call):
                await scene.settle()
            assert scene.inside == ["early"]
            await scene.settle()
        assert scene.inside == ["early", "late"]
        await scene.end("early", "late")

    asyncio.run(work())
