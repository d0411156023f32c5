"""The time that a trajectory may take, which can stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class TimeLimit:
    """An asyncio.Timeout for `async with`, of whose time nothing passes while it is stopped."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self.timeout = limit_s, asyncio.timeout(limit_s)
        self._clock = asyncio.get_running_loop().time
        self._num_stops = 0
        self._left_s = 0.0

    def stop(self) -> None:
        """May be called several times; then `go_on` has to be, too."""
        self._num_stops += 1
        if self._num_stops == 1:
            ends = self.timeout.when()
            assert ends is not None  # only `stop` takes it
            self._left_s = ends - self._clock()
            self._reschedule(None)

    def go_on(self) -> None:
        self._num_stops -= 1
        if not self._num_stops:
            self._reschedule(self._clock() + self._left_s)

    def begin_anew(self) -> None:
        """With the whole time; what is stopped stays so."""
        self._left_s = self._limit_s
        if not self._num_stops:
            self._reschedule(self._clock() + self._limit_s)

    def _reschedule(self, ends: float | None) -> None:
        if not self.timeout.expired():  # else the trajectory is being cancelled
            self.timeout.reschedule(ends)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.go_on()
