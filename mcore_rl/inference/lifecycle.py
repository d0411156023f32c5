"""The states of a generation server, which calls each allows, and requests that wait for a call.

         start           sleep          wake weights         update          wake kv_cache
    new -------> serving -------> asleep ------------> empty -------> loaded -------------> serving

A server that was started without weights waits for an update, or sleeps before it. A serving server
takes updates, too. A failed update leaves it torn, or empty if it slept; a failed sleep leaves it
torn. It then serves nothing until a complete update succeeds. Requests run in parallel; all other
calls run alone, or beside paused requests. Requests kept through a sleep stay paused until the
server serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from types import MappingProxyType

from mcore_rl.config.errors import StateError


class State(Enum):
    """States of a server; the values complete "the server ..."."""

    NEW = "has not been started"
    WAITING = "has yet to get weights"
    SERVING = "serves"
    ASLEEP = "is asleep"
    EMPTY = "has no weights since it slept"
    LOADED = "has its weights, but its KV cache is asleep"
    TORN = "has weights of which an update did not complete, or failed to sleep"
    CLOSED = "has been closed"


class Call(Enum):
    """Calls of a server; the values complete "the server cannot ..."."""

    START = "start"
    START_WITHOUT_WEIGHTS = "start without weights"
    GENERATE = "generate"
    TRACE = "trace"
    CONNECT = "connect to a trainer"
    UPDATE = "update its weights"
    SLEEP = "sleep"
    WAKE_WEIGHTS = "wake its weights"
    WAKE_KV_CACHE = "wake its KV cache"


# State after a call, by call and state before it. Other pairs are refused.
TRANSITIONS: Mapping[tuple[Call, State], State] = MappingProxyType(
    {
        (Call.START, State.NEW): State.SERVING,
        (Call.START_WITHOUT_WEIGHTS, State.NEW): State.WAITING,
        (Call.GENERATE, State.SERVING): State.SERVING,
        (Call.TRACE, State.SERVING): State.SERVING,
        (Call.CONNECT, State.SERVING): State.SERVING,
        (Call.CONNECT, State.WAITING): State.WAITING,
        (Call.CONNECT, State.TORN): State.TORN,
        (Call.CONNECT, State.EMPTY): State.EMPTY,
        (Call.CONNECT, State.LOADED): State.LOADED,
        (Call.UPDATE, State.SERVING): State.SERVING,
        (Call.UPDATE, State.WAITING): State.SERVING,
        (Call.UPDATE, State.TORN): State.SERVING,
        (Call.UPDATE, State.EMPTY): State.LOADED,
        (Call.UPDATE, State.LOADED): State.LOADED,
        (Call.SLEEP, State.SERVING): State.ASLEEP,
        (Call.SLEEP, State.WAITING): State.ASLEEP,
        (Call.WAKE_WEIGHTS, State.ASLEEP): State.EMPTY,
        (Call.WAKE_KV_CACHE, State.LOADED): State.SERVING,
    }
)
# State after a call that failed, where it is not the state before.
_AFTER_FAILURE: Mapping[tuple[Call, State], State] = MappingProxyType(
    {
        (Call.UPDATE, State.SERVING): State.TORN,
        (Call.UPDATE, State.LOADED): State.EMPTY,
        (Call.SLEEP, State.SERVING): State.TORN,
        (Call.SLEEP, State.WAITING): State.TORN,
    }
)

ASLEEP = (State.ASLEEP, State.EMPTY, State.LOADED)  # no request can run
_ASLEEP, _TORN = "asleep", "torn"  # reasons to hold new requests


class Lifecycle:
    """The state of one server; every call goes through `run_alone` or `run_request`."""

    def __init__(self) -> None:
        self.state = State.NEW
        self._num_requests = 0
        self._running: Call | None = None  # the call that runs alone

    @contextmanager
    def run_alone(self, call: Call, *, beside_requests: bool = False) -> Iterator[None]:
        """Run a call in the with block, and change the state at its end.

        Args:
            beside_requests: Allow running requests, which the caller has paused.

        Raises:
            StateError: the state does not allow the call; another call runs; requests run.
        """
        next_state = self._check(call)
        if self._num_requests and not beside_requests and self.state not in ASLEEP:
            raise StateError(
                f"the server cannot {call.value} while it generates: {self._num_requests} requests "
                "run; wait for them, or abort them"
            )
        self._running, before = call, self.state
        try:
            yield
        except BaseException:
            self._enter(_AFTER_FAILURE.get((call, before), before))
            raise
        else:
            self._enter(next_state)
        finally:
            self._running = None

    @contextmanager
    def run_request(self) -> Iterator[None]:
        """Run a request in the with block.

        Raises:
            StateError: the state allows no requests, or a call runs alone.
        """
        self._check(Call.GENERATE)
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    def close(self) -> None:
        """Refuse all further calls."""
        self.state = State.CLOSED

    def _enter(self, state: State) -> None:
        if self.state is not State.CLOSED:
            self.state = state

    def _check(self, call: Call) -> State:
        """Return the state after a call; raise StateError if it is not allowed."""
        if self._running is not None:
            raise StateError(
                f"the server cannot {call.value} while it has to {self._running.value}"
            )
        if (call, self.state) not in TRANSITIONS:
            allowed = [call.value for call, state in TRANSITIONS if state is self.state]
            raise StateError(
                f"the server cannot {call.value}: it {self.state.value}; "
                f"allowed: {', '.join(allowed) or 'nothing'}"
            )
        return TRANSITIONS[call, self.state]


class Gate:
    """A barrier for requests: open unless it is held, for one reason or several.

    All calls are made in one event loop.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def is_held(self, reason: str) -> bool:
        return reason in self._reasons

    def hold(self, reason: str) -> None:
        """Close the gate until this reason, and all others, are released."""
        self._reasons.add(reason)
        self._opened.clear()

    def release(self, reason: str) -> None:
        """Drop a reason; open the gate if none is left."""
        self._reasons.discard(reason)
        if not self._reasons:
            self._opened.set()

    @contextmanager
    def hold_during(self, reason: str) -> Iterator[None]:
        """Hold the gate for the length of a with block."""
        self.hold(reason)
        try:
            yield
        finally:
            self.release(reason)

    async def wait_open(self) -> None:
        """Wait until the gate is open, without a time limit."""
        while not self.is_open:  # it may have been closed between the event and this task
            await self._opened.wait()


class RequestGate:
    """Makes requests wait for calls that run beside running ones, and starts requests together.

    After a failed update in flight new requests wait until an update succeeds, as running ones are
    paused until then. After a failed update without requests they are refused. All calls are made
    in one event loop; waits have no time limit.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._requests = Gate()  # open when new requests may run
        self._starts = Gate()  # held in blocks of start_together
        self._num_starting = 0

    @asynccontextmanager
    async def run_request(self) -> AsyncIterator[None]:
        """Wait for calls that hold requests, then run one as `Lifecycle.run_request`."""
        await self._requests.wait_open()
        with self._lifecycle.run_request():
            yield

    @asynccontextmanager
    async def start_together(self) -> AsyncIterator[None]:
        """Mark a block of `Generator.start_together`. Raises as `run_request`."""
        async with self.run_request():
            self._num_starting += 1
            self._starts.hold("starting")
            try:
                yield
            finally:
                self._num_starting -= 1
                if not self._num_starting:
                    self._starts.release("starting")

    @property
    def is_last_start(self) -> bool:
        """True if one block of `start_together` is left."""
        return self._num_starting == 1

    @asynccontextmanager
    async def run_beside_requests(self, call: Call) -> AsyncIterator[None]:
        """Run a call in the with block beside running requests; new ones wait for it.

        First waits until blocks of `start_together` have ended. Raises as `Lifecycle.run_alone`.
        """
        try:
            with (
                self._lifecycle.run_alone(call, beside_requests=True),
                self._requests.hold_during(call.value),
            ):
                await self._starts.wait_open()
                yield
        except BaseException:
            if call is Call.UPDATE and self._lifecycle.state is State.TORN:
                self._requests.hold(_TORN)
            raise
        self._release_if_serving()

    @asynccontextmanager
    async def run_alone(self, call: Call) -> AsyncIterator[None]:
        """Run a call in the with block, as `Lifecycle.run_alone`."""
        with self._lifecycle.run_alone(call):
            yield
        self._release_if_serving()

    def hold_until_awake(self) -> None:
        """Make new requests wait until the server serves, because running ones were kept."""
        self._requests.hold(_ASLEEP)

    def close(self) -> None:
        """Refuse new and waiting requests."""
        self._lifecycle.close()
        self._release_if_serving()

    @property
    def awaits_update(self) -> bool:
        """See `GenerationServer.awaits_update`."""
        return self._requests.is_held(_TORN)

    def _release_if_serving(self) -> None:
        """Let waiting requests run, or be refused, once the server serves or is closed."""
        if self._lifecycle.state in (State.SERVING, State.CLOSED):
            self._requests.release(_ASLEEP)
            self._requests.release(_TORN)
