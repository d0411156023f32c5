"""Steps made in a thread: as without one, but that a peer's end ends the wait for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from mcore_rl.weight_sync.connection import StreamError
from mcore_rl.weight_sync.watched import watched


def steps(num: int, made: list[int], error: Exception | None = None) -> Iterator[int]:
    for number in range(num):
        made.append(number)
        yield number
    if error is not None:
        raise error


def test_steps_come_in_order_each_made_when_it_is_asked_for_and_the_thread_ends():
    made: list[int] = []
    before = {*threading.enumerate()}
    for number, found in enumerate(watched(steps(3, made), lambda: True)):
        assert found == number and made == [*range(number + 1)]
    assert {*threading.enumerate()} <= before


def test_what_a_step_raises_is_raised_where_it_is_asked_for():
    error = StreamError("version 3 broke off")
    before, found = {*threading.enumerate()}, watched(steps(1, [], error), lambda: False)
    assert next(found) == 0
    with pytest.raises(StreamError, match="version 3 broke off") as raised:
        next(found)
    assert raised.value is error
    assert {*threading.enumerate()} <= before


def test_a_consumer_that_stops_ends_the_thread():
    before, found = {*threading.enumerate()}, watched(steps(3, []), lambda: False)
    assert next(found) == 0
    found.close()
    assert {*threading.enumerate()} <= before


def test_a_step_that_does_not_come_ends_when_a_peer_is_known_to_be_gone():
    goes_on, is_lost = threading.Event(), threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        goes_on.wait(60)

    found = watched(stuck(), is_lost.is_set)
    assert next(found) == 0
    begun = time.monotonic()
    threading.Timer(0.7, is_lost.set).start()
    with pytest.raises(StreamError, match="a peer has died"):
        next(found)
    assert 0.7 <= time.monotonic() - begun < 10
    goes_on.set()
