"""A limit on every call of Ray in this process, by a clock that does not run inside Ray.

Most calls of Ray have no limit. While a raylet does not answer, because it is stopped or its disk
hangs, `ray.put`, `ray.get` with a timeout, large arguments and `ray.shutdown` never return, nor
does a handler of signals run in their thread. They do let other threads run (Ray 2.60). One of
those looks at the stacks, so calls in parts of a user's own have the limit, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil
import ray

from mcore_rl.controller.pending_call import Timeout
from mcore_rl.controller.process_cleanup import end_hanging_process
from mcore_rl.observability.stacks import describe_stopped_processes

_POLL_S = 1.0
_MARGIN_S = 20.0  # beyond the limit, as Ray's own timeouts come first
_RAY = f"{Path(ray.__file__).parent}{os.sep}"
_PROJECT = f"{Path(__file__).parents[1]}{os.sep}"


class RayCallLimit:
    """Ends this process when one of its calls of Ray takes too long."""

    def __init__(self, timeout: Timeout) -> None:
        self._timeout = timeout
        self._seconds: dict[int, float] = {}  # that each thread's call has run for
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray calls", daemon=True)
        self._thread.start()

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the limit of the calls that run, and of later ones.

        Returns when no frame of an earlier call is held here.
        """
        with self._lock:
            self._timeout = timeout

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        observed_at = time.monotonic()
        while not self._end.wait(_POLL_S):
            now_s = time.monotonic()
            # The clock goes on while this process is suspended.
            passed_s, observed_at = min(now_s - observed_at, 2 * _POLL_S), now_s
            with self._lock:
                report = self._observe(passed_s)
            if report:
                end_hanging_process(report)
                return

    def _observe(self, passed_s: float) -> str:
        """Add the time that has passed to the calls of all threads; report one that is late."""
        # No frame is kept: what its variables hold would be released by this thread, and an
        # ObjectRef that is released during ray.shutdown ends the process (Ray 2.60,
        # core_worker_process.cc). Python keeps one frame object until a call returns, so a call
        # seen before bears a mark: f_trace_lines, True at first, which only a debugger reads.
        seconds: dict[int, float] = {}
        for thread, frame in sys._current_frames().items():
            if (call := _find_ray_call(frame)) is None:
                continue
            is_new, call.f_trace_lines = call.f_trace_lines, False
            seconds[thread] = 0.0 if is_new else self._seconds.get(thread, 0.0) + passed_s
            if seconds[thread] > self._timeout.seconds + _MARGIN_S:
                return self._describe(call, frame, seconds[thread])
        self._seconds = seconds
        return ""

    def _describe(self, call: FrameType, frame: FrameType, seconds: float) -> str:
        """Describe a call: a line on what blocks it, then the stacks of all threads."""
        caller = call.f_back or call
        place = f"{caller.f_code.co_qualname} ({Path(caller.f_code.co_filename).name})"
        line = (
            f"{place} has waited for Ray ({frame.f_code.co_name}) for {seconds:.0f} s "
            f"({self._timeout.setting}={self._timeout.seconds:g}): "
            f"{describe_stopped_processes(_list_ray_processes())}"
        )
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(stack))}"
            for ident, stack in sys._current_frames().items()
        ]
        return "\n\n".join([line, *stacks])


def _find_ray_call(frame: FrameType) -> FrameType | None:
    """Return the outermost frame of Ray's that a thread of this project is in; None: it is not."""
    call, caller = None, frame
    while caller.f_code.co_filename.startswith(_RAY):
        call = caller
        if caller.f_back is None:
            return None
        caller = caller.f_back
    outer: FrameType | None = caller if call is not None else None
    while outer is not None:
        if outer.f_code.co_filename.startswith(_PROJECT):
            return call
        outer = outer.f_back
    # A thread of Ray's own, except the main thread of a driver that uses the session directly.
    main = threading.main_thread().ident
    return call if sys._current_frames().get(main or 0) is frame else None


def _list_ray_processes() -> list[psutil.Process]:
    """Return this process's descendants, and the Ray processes of the machine."""
    processes: list[psutil.Process] = psutil.Process().children(recursive=True)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() in ("raylet", "gcs_server") and process not in processes:
                processes.append(process)
    return processes


@contextlib.contextmanager
def limit_ray_calls(timeout: Timeout) -> Iterator[RayCallLimit]:
    """Limit each call of Ray inside. One that takes longer ends this process, with a report."""
    limit = RayCallLimit(timeout)
    try:
        yield limit
    finally:
        limit.close()
