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
Call = tuple[int, int, int]  # thread, id of the calling frame, position in it


class RayCallLimit:
    """Ends this process when one of its calls of Ray takes too long."""

    def __init__(self, timeout: Timeout) -> None:
        self.timeout = timeout  # of the calls from now on
        self._seconds: dict[Call, float] = {}  # so far, of the calls that have not returned
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray calls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        observed_at = time.monotonic()
        while not self._end.wait(_POLL_S):
            now_s = time.monotonic()
            # The clock goes on while this process is suspended.
            passed_s, observed_at = min(now_s - observed_at, 2 * _POLL_S), now_s
            calls = {}
            for thread, frame in sys._current_frames().items():
                if caller := _find_ray_caller(frame):
                    call = thread, id(caller), caller.f_lasti
                    calls[call] = self._seconds.get(call, 0.0) + passed_s
                    if calls[call] > self.timeout.seconds + _MARGIN_S:
                        end_hanging_process(self._describe(caller, frame, calls[call]))
                        return
            self._seconds = calls

    def _describe(self, caller: FrameType, frame: FrameType, seconds: float) -> str:
        """Describe a call: a line on what blocks it, then the stacks of all threads."""
        place = f"{caller.f_code.co_qualname} ({Path(caller.f_code.co_filename).name})"
        line = (
            f"{place} has waited for Ray ({frame.f_code.co_name}) for {seconds:.0f} s "
            f"({self.timeout.setting}={self.timeout.seconds:g}): "
            f"{describe_stopped_processes(_list_ray_processes())}"
        )
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(stack))}"
            for ident, stack in sys._current_frames().items()
        ]
        return "\n\n".join([line, *stacks])


def _find_ray_caller(frame: FrameType) -> FrameType | None:
    """Return the frame of this project's thread that has called Ray; None: it is not in a call."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(_RAY):
        caller = caller.f_back
    if caller is frame or caller is None:
        return None
    outer: FrameType | None = caller
    while outer is not None:
        if outer.f_code.co_filename.startswith(_PROJECT):
            return caller
        outer = outer.f_back
    # A thread of Ray's own, except the main thread of a driver that uses the session directly.
    main = threading.main_thread().ident
    return caller if sys._current_frames().get(main or 0) is frame else None


def _list_ray_processes() -> list[psutil.Process]:
    """Return this process's descendants, and the Ray processes of the machine."""
    processes = psutil.Process().children(recursive=True)
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
