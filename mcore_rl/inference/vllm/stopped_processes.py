"""A watch over the processes of an engine: what a signal has stopped is ended, and so known."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import psutil

STOPPED_S = 10.0  # a look into a process (py-spy, gdb) stops it for less
_LOOK_S = 1.0


class StoppedProcesses:
    """Kills processes, and those that they have started, that have been stopped for too long.

    A process that died is noticed by vLLM, which then ends; one that is stopped holds up all others
    until they run into time limits. A whole job that is suspended and continued is left alone: this
    process does not look meanwhile.
    """

    def __init__(self, pids: Sequence[int], limit_s: float = STOPPED_S) -> None:
        self._pids, self._limit_s = list(pids), limit_s
        self.reason = ""  # why they have been ended
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stopped-processes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        since: dict[psutil.Process, float] = {}  # when each was first seen to be stopped
        last, pause = time.monotonic(), min(_LOOK_S, self._limit_s / 4)
        while not self._is_over.wait(pause):
            now = time.monotonic()
            if now - last > self._limit_s / 2:  # this process was stopped, or starved, itself
                since.clear()
            last, stopped = now, self._find_stopped()
            since = {process: since.get(process, now) for process in stopped}
            for process, start in since.items():
                if now - start >= self._limit_s:
                    self._kill(process)

    def _find_stopped(self) -> list[psutil.Process]:
        stopped = []
        for pid in self._pids:
            try:
                process = psutil.Process(pid)
                family = [process, *process.children(recursive=True)]
                stopped += [member for member in family if member.status() == psutil.STATUS_STOPPED]
            except psutil.Error:  # it has ended
                continue
        return stopped

    def _kill(self, process: psutil.Process) -> None:
        reason = f"its process {process.pid} had been stopped by a signal for {self._limit_s:g} s"
        self.reason = self.reason or reason
        print(f"vLLM's engine is ended: {reason}", file=sys.stderr, flush=True)
        try:
            process.kill()
        except psutil.Error:  # it has ended
            return
