"""Every order of calls that the table does not have is refused."""

from __future__ import annotations

import itertools

import pytest

from mcore_rl.config.errors import StateError
from mcore_rl.rollout.lifecycle import ASLEEP, TRANSITIONS, Call, Lifecycle, State

ALONE = [call for call in Call if call is not Call.GENERATE]
TURNS = (Call.SLEEP, Call.WAKE_WEIGHTS, Call.UPDATE, Call.WAKE_KV_CACHE)


def in_state(state: State) -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.state = state
    return lifecycle


def test_a_step_of_a_server_that_shares_its_device_goes_round():
    lifecycle = Lifecycle()
    for call in (Call.START, *TURNS, *TURNS):
        with lifecycle.alone(call):
            pass
    assert lifecycle.state is State.SERVING


def test_a_server_without_weights_serves_after_an_update_alone():
    for calls in ([Call.CONNECT, Call.UPDATE], [*TURNS], [Call.CONNECT, *TURNS]):
        lifecycle = Lifecycle()
        with lifecycle.alone(Call.START_WITHOUT_WEIGHTS):
            pass
        for call in calls:
            with pytest.raises(StateError, match="the server cannot generate"), lifecycle.request():
                pytest.fail("it was allowed")
            with lifecycle.alone(call):
                pass
        assert lifecycle.state is State.SERVING


@pytest.mark.parametrize(("call", "state"), [*itertools.product(Call, State)])
def test_a_call_is_allowed_in_its_states_only(call, state):
    lifecycle = in_state(state)
    around = lifecycle.request() if call is Call.GENERATE else lifecycle.alone(call)
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


def test_generation_needs_weights_and_cache_that_are_whole():
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
def test_what_a_call_that_fails_leaves(call, before, after):
    lifecycle = in_state(before)
    with pytest.raises(OSError), lifecycle.alone(call):
        raise OSError
    assert lifecycle.state is after


@pytest.mark.parametrize("call", ALONE)
def test_nothing_happens_beside_requests_but_requests(call):
    lifecycle = in_state(State.SERVING)
    with lifecycle.request():
        with lifecycle.request():
            pass
        with pytest.raises(StateError), lifecycle.alone(call):
            pytest.fail("it was allowed")
    assert lifecycle.state is State.SERVING


@pytest.mark.parametrize("state", State)
def test_beside_requests_that_run_or_were_kept_what_is_told_to_leave_them_be(state):
    """Where nothing can run, requests have been kept: no call is refused for them."""
    for call in ALONE:
        if (call, state) not in TRANSITIONS:
            continue
        lifecycle = in_state(State.SERVING)
        with lifecycle.request():
            lifecycle.state = state
            with lifecycle.alone(call, beside_requests=state not in ASLEEP):
                pass
            assert lifecycle.state is TRANSITIONS[call, state]


@pytest.mark.parametrize(
    ("running", "asked"), [*itertools.product([Call.UPDATE, Call.TRACE], Call)]
)
def test_nothing_happens_beside_what_runs_alone(running, asked):
    lifecycle = in_state(State.SERVING)
    with lifecycle.alone(running):
        around = lifecycle.request() if asked is Call.GENERATE else lifecycle.alone(asked)
        with pytest.raises(StateError, match=f"while it has to {running.value}$"), around:
            pytest.fail("it was allowed")
    assert lifecycle.state is State.SERVING


def test_closed_in_the_middle_of_a_call_it_stays_closed():
    lifecycle = in_state(State.SERVING)
    with lifecycle.alone(Call.UPDATE):
        lifecycle.close()
    assert lifecycle.state is State.CLOSED
