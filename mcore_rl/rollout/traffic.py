"""Requests of a server, and what is done beside them: they wait, stand still and go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mcore_rl.rollout.gate import Gate
from mcore_rl.rollout.lifecycle import Call, Lifecycle

_ASLEEP = "asleep"


class Traffic:
    """All calls are of one event loop. What waits here has no limit; its caller sets one."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._entrance = Gate()  # of requests
        self._beginning = Gate()  # held while requests are, that they start together
        self._num_held = 0

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """For the length of a request. It waits for what is done beside requests.

        Raises StateError as Lifecycle.request.
        """
        await self._entrance.passed()
        with self._lifecycle.request():
            yield

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """For the length of a GenerationServer.held. Raises as `request`."""
        async with self.request():
            self._num_held += 1
            self._beginning.hold("held")
            try:
                yield
            finally:
                self._num_held -= 1
                if not self._num_held:
                    self._beginning.release("held")

    @property
    def is_last_held(self) -> bool:
        return self._num_held == 1

    @asynccontextmanager
    async def beside(self, call: Call) -> AsyncIterator[None]:
        """For the length of a call that leaves the running requests be; new ones wait for it.

        It waits until those that are held have started. Raises StateError as Lifecycle.alone.
        """
        with self._lifecycle.alone(call, beside_requests=True), self._entrance.held(call.value):
            await self._beginning.passed()
            yield

    @asynccontextmanager
    async def alone(self, call: Call) -> AsyncIterator[None]:
        """Lifecycle.alone."""
        with self._lifecycle.alone(call):
            yield

    def fall_asleep(self) -> None:
        """New requests wait until `wake_up`, for those that run go on then."""
        self._entrance.hold(_ASLEEP)

    def wake_up(self) -> None:
        self._entrance.release(_ASLEEP)
