"""The states of a generation server, and which calls each allows. Pure.

         start           sleep          wake weights         update          wake kv_cache
    new -------> serving -------> asleep ------------> empty -------> loaded -------------> serving

A server that was started without weights waits for an update, or sleeps before it. A serving server
takes updates, too. After a failed one it is torn, or empty as before, and after a sleep that failed
torn: it serves nothing until a complete update succeeds. Requests run in parallel; everything else
runs alone, or beside requests that stand still meanwhile (rollout/traffic.py). Those of a server
that sleeps have been kept: whatever it does, they stand still until it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType

from mcore_rl.config.errors import StateError


class State(Enum):
    NEW = "has not been started"
    WAITING = "has yet to get weights"
    SERVING = "serves"
    ASLEEP = "is asleep"
    EMPTY = "has no weights since it slept"
    LOADED = "has its weights, but its KV cache is asleep"
    TORN = "has weights of which an update did not complete, or failed to sleep"
    CLOSED = "has been closed"


class Call(Enum):
    START = "start"
    START_WITHOUT_WEIGHTS = "start without weights"
    GENERATE = "generate"
    TRACE = "trace"
    CONNECT = "connect to a trainer"
    UPDATE = "update its weights"
    SLEEP = "sleep"
    WAKE_WEIGHTS = "wake its weights"
    WAKE_KV_CACHE = "wake its KV cache"


# From what state a call leads to which. Where a call fails, `_AFTER_FAILURE` says what is left.
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
_AFTER_FAILURE: Mapping[tuple[Call, State], State] = MappingProxyType(
    {
        (Call.UPDATE, State.SERVING): State.TORN,
        (Call.UPDATE, State.LOADED): State.EMPTY,
        (Call.SLEEP, State.SERVING): State.TORN,
        (Call.SLEEP, State.WAITING): State.TORN,
    }
)


# In these nothing can run.
ASLEEP = (State.ASLEEP, State.EMPTY, State.LOADED)


class Lifecycle:
    """The state of one server; every call goes through `alone` or `request`."""

    def __init__(self) -> None:
        self.state = State.NEW
        self._num_requests = 0
        self._running: Call | None = None  # what runs alone

    @contextmanager
    def alone(self, call: Call, *, beside_requests: bool = False) -> Iterator[None]:
        """For the length of a call.

        Raises StateError when the state does not allow it, when another call runs or, without
        `beside_requests`, when requests do.
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
    def request(self) -> Iterator[None]:
        """For the length of a request. Raises as `alone`, but for other requests."""
        self._check(Call.GENERATE)
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    def close(self) -> None:
        self.state = State.CLOSED

    def _enter(self, state: State) -> None:
        if self.state is not State.CLOSED:
            self.state = state

    def _check(self, call: Call) -> State:
        if self._running is not None:
            raise StateError(
                f"the server cannot {call.value} while it has to {self._running.value}"
            )
        if (call, self.state) not in TRANSITIONS:
            allowed = [other.value for other, state in TRANSITIONS if state is self.state]
            raise StateError(
                f"the server cannot {call.value}: it {self.state.value}; "
                f"allowed: {', '.join(allowed) or 'nothing'}"
            )
        return TRANSITIONS[call, self.state]
