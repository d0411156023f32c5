"""Requests of a server, and what is done beside them: they wait, stand still and go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mcore_rl.inference.gate import Gate
from mcore_rl.inference.vllm.lifecycle import Call, Lifecycle, State

_ASLEEP, _TORN = "asleep", "torn"


class Traffic:
    """All calls are of one event loop. What waits here has no limit; its caller sets one.

    After an update beside requests that failed, new ones wait until an update succeeds, as those
    that run stand still. A failed one without requests leaves a server that refuses them.
    """

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
        try:
            with self._lifecycle.alone(call, beside_requests=True), self._entrance.held(call.value):
                await self._beginning.passed()
                yield
        except BaseException:
            if call is Call.UPDATE and self._lifecycle.state is State.TORN:
                self._entrance.hold(_TORN)
            raise
        self._let_in()

    @asynccontextmanager
    async def alone(self, call: Call) -> AsyncIterator[None]:
        """Lifecycle.alone."""
        with self._lifecycle.alone(call):
            yield
        self._let_in()

    def fall_asleep(self) -> None:
        """New requests wait until the server serves, for those that run go on then."""
        self._entrance.hold(_ASLEEP)

    def close(self) -> None:
        """What waits is refused from now on."""
        self._lifecycle.close()
        self._let_in()

    @property
    def awaits_update(self) -> bool:
        """As GenerationServer.awaits_update."""
        return self._entrance.is_held(_TORN)

    def _let_in(self) -> None:
        if self._lifecycle.state in (State.SERVING, State.CLOSED):
            self._entrance.release(_ASLEEP)
            self._entrance.release(_TORN)
