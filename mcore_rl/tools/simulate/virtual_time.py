"""A clock that jumps: the driver's threads run as they do in a job, and no wait takes real time.

One thread of the driver runs at a time. When it waits, another that can go on does. When all wait,
the clock jumps to the next event, such as the reply of a rank, whose callback is run. So a
simulation has one outcome whatever the machine does meanwhile, and what the driver computes takes
no time of the clock: its CPU seconds are counted instead.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from queue import Empty
from types import SimpleNamespace
from typing import Any

from mcore_rl.controller import pending_call
from mcore_rl.observability import activity, timeline
from mcore_rl.rollout import server_pool
from mcore_rl.trainers import async_rollout


class _Waiter:
    """A thread that waits until `is_ready`, or until `deadline_s`."""

    def __init__(self, is_ready: Callable[[], bool], deadline_s: float) -> None:
        self.is_ready, self.deadline_s = is_ready, deadline_s
        self.resumed = threading.Event()


class VirtualClock:
    """Simulated seconds, events, and the threads that wait for them.

    Attributes:
        now_s: Seconds since the clock was made.
        driver_cpu_s: CPU seconds of the driver's threads, without callbacks of events.
        ranks_cpu_s: CPU seconds of the callbacks, which stand for ranks.
    """

    def __init__(self) -> None:
        self.now_s = self.driver_cpu_s = self.ranks_cpu_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiters: list[_Waiter] = []
        self._resumed_at = time.thread_time()  # of the thread that runs

    def monotonic(self) -> float:
        return self.now_s

    def schedule(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back in so many seconds of the clock."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), callback))

    def measure_driver_s(self) -> float:
        """Return `driver_cpu_s` up to this moment; called by the thread that runs."""
        now_s = time.thread_time()
        self.driver_cpu_s += now_s - self._resumed_at
        self._resumed_at = now_s
        return self.driver_cpu_s

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until a condition is true; return False if it is not in `timeout_s`.

        Raises:
            RuntimeError: no event is left that could make it true.
        """
        if is_ready():
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        self.measure_driver_s()
        deadline_s = float("inf") if timeout_s is None else self.now_s + timeout_s
        waiter = _Waiter(is_ready, deadline_s)
        self._waiters.append(waiter)
        self._resume_next(waiter)
        self._resumed_at = time.thread_time()
        return is_ready()

    def run_in_thread(self, function: Callable[[], None]) -> None:
        """Run a function in a thread of the driver, beside the others."""
        waiter = _Waiter(lambda: True, float("inf"))
        self._waiters.append(waiter)

        def run() -> None:
            waiter.resumed.wait()
            self._resumed_at = time.thread_time()
            function()
            self.measure_driver_s()
            self._resume_next(None)

        threading.Thread(target=run, name="simulated", daemon=True).start()

    def _resume_next(self, caller: _Waiter | None) -> None:
        """Resume the first thread that can go on; return when it is the caller's turn."""
        while (ready := self._find_ready()) is None:
            if not self._advance():
                if caller is None:
                    return
                self._waiters.remove(caller)
                raise RuntimeError("the driver waits, and no event is left to wait for")
        self._waiters.remove(ready)
        if ready is caller:
            return
        ready.resumed.set()
        if caller is not None:
            caller.resumed.wait()

    def _find_ready(self) -> _Waiter | None:
        for waiter in self._waiters:
            if waiter.deadline_s <= self.now_s or waiter.is_ready():
                return waiter
        return None

    def _advance(self) -> bool:
        """Jump to the next event or deadline; return whether there is one."""
        deadline_s = min((waiter.deadline_s for waiter in self._waiters), default=float("inf"))
        if self._events and self._events[0][0] <= deadline_s:
            self.now_s, _, callback = heapq.heappop(self._events)
            start_s = time.thread_time()
            callback()
            self.ranks_cpu_s += time.thread_time() - start_s
            return True
        if deadline_s == float("inf"):
            return False
        self.now_s = deadline_s
        return True


class _Queue:
    """queue.SimpleQueue, whose `get` waits by the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._items = clock, deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        if not self._clock.wait(lambda: bool(self._items), timeout):
            raise Empty
        return self._items.popleft()


class _Event:
    """threading.Event, whose `wait` waits by the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._is_set = clock, False

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        return self._clock.wait(lambda: self._is_set, timeout)


class _Future(Future[Any]):
    """A future whose `result` waits by the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def result(self, timeout: float | None = None) -> Any:
        if not self._clock.wait(self.done, timeout):
            raise TimeoutError
        return super().result(0)


class VirtualExecutor(Executor):
    """Runs functions in threads of the driver, each in one of its own."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._futures = clock, list[Future[Any]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _Future(self._clock)
        self._futures.append(future)

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - whoever reads the result gets it
                future.set_exception(error)

        self._clock.run_in_thread(run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait:
            self._clock.wait(lambda: all(future.done() for future in self._futures))


@contextlib.contextmanager
def run_by_clock(clock: VirtualClock) -> Iterator[None]:
    """Let the waits of calls, server pool, trainers, timeline and stopwatches be by the clock.

    These modules read time and wait under the names that are replaced here; what else waits in the
    driver, such as Ray for an object, takes no time of the clock.
    """

    def wait_for_futures(
        futures: Iterable[Future[Any]], timeout: float | None = None
    ) -> Iterator[Future[Any]]:
        answered, pending = _Queue(clock), list(futures)
        for future in pending:
            future.add_done_callback(answered.put)
        end_s = float("inf") if timeout is None else clock.now_s + timeout
        for _ in pending:
            try:
                yield answered.get(None if timeout is None else end_s - clock.now_s)
            except Empty:
                raise TimeoutError from None

    times = SimpleNamespace(
        sleep=lambda seconds: clock.wait(lambda: False, seconds),
        monotonic=clock.monotonic,
        perf_counter=clock.monotonic,
        process_time=clock.measure_driver_s,
    )
    replaced: list[tuple[Any, str, Any]] = [
        (pending_call, "time", times),
        (pending_call, "SimpleQueue", lambda: _Queue(clock)),
        (pending_call, "as_completed", wait_for_futures),
        (server_pool, "time", times),
        (async_rollout, "time", times),
        (async_rollout, "threading", SimpleNamespace(Event=lambda: _Event(clock))),
        (async_rollout, "ThreadPoolExecutor", lambda *_: VirtualExecutor(clock)),
        (activity, "time", times),
        (timeline, "time", SimpleNamespace(time=clock.monotonic)),
        (activity.ACTIVITY, "clock", clock.monotonic),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, substitute in replaced:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, substitute)
        yield
