"""How long a server has had nothing to do."""

from __future__ import annotations

import time
from collections.abc import Hashable


class IdleTime:
    """What time/servers_idle_s counts: the seconds in which nothing goes on, of all that is told.

    A server has something to do

    - from when it begins a group, of samples or of an evaluation, until that has its rewards;
    - while it takes new weights, whether it keeps requests meanwhile or has none;
    - while it starts, and while it sleeps: then its devices are another role's.

    These overlap. A push in flight comes while groups run, so what each of them takes cannot be
    subtracted one by one. All calls are of one event loop.
    """

    def __init__(self) -> None:
        self._going_on: set[Hashable] = set()
        self._since, self._before_s = time.monotonic(), 0.0

    def begin(self, what: Hashable) -> None:
        """`what` may go on already."""
        self._before_s = self.seconds
        self._going_on.add(what)

    def end(self, what: Hashable) -> None:
        """Of what does not go on, it changes nothing."""
        self._before_s, self._since = self.seconds, time.monotonic()
        self._going_on.discard(what)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return self._before_s + (0.0 if self._going_on else time.monotonic() - self._since)
