"""Memory of a run, over all its processes."""

from __future__ import annotations

import threading
import time

import psutil


def process_memory_bytes(process: psutil.Process) -> int:
    """Memory of one process, in bytes: proportional (PSS) if Linux reports it, else resident (RSS).

    PSS splits a shared page between the processes that map it. Summed RSS would count the object
    store and weights in shared memory once for every process that has them mapped.
    """
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as rollup:
            for line in rollup:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # no such file on this system, not ours to read, or the process is gone
        pass
    return resident_bytes(process)


def resident_bytes(process: psutil.Process) -> int:
    """Resident memory of one process (RSS), in bytes; of one that has ended, none."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _resident_and_shared(process: psutil.Process) -> tuple[int, int]:
    """RSS, and the part of it that is of files or shared memory, in bytes."""
    try:
        found = process.memory_info()
    except psutil.Error:
        return 0, 0
    return int(found.rss), int(getattr(found, "shared", 0))


def tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants; of one that has ended, none."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def tree_memory_bytes(root: psutil.Process) -> int:
    """Memory of a process and all its descendants, in bytes; a process that has ended has none."""
    return sum(map(process_memory_bytes, tree(root)))


class PeakMemory:
    """Context manager that samples the memory of this process and its descendants in a thread.

    `peak_bytes` is the highest sample so far; spikes shorter than `interval_s` may be missed. Linux
    walks the page tables to tell PSS, 7 ms for a process that has imported vLLM. It is asked when
    RSS is by a hundredth above what it was at the last time, and so seldom that it takes `share` of
    a core; between, memory is what it was then and what anonymous memory has grown by.
    """

    def __init__(self, interval_s: float = 4.0, share: float = 0.0005) -> None:
        self._interval_s, self._share = interval_s, share
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._root = psutil.Process()
        self._resident = 0.0  # at the last look at PSS, as the two below
        self._shared_bytes = 0  # what is not anonymous, counted once
        self._next_at = 0.0
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        processes = tree(self._root)
        found = [_resident_and_shared(process) for process in processes]
        resident = sum(own for own, _ in found)
        anonymous = resident - sum(shared for _, shared in found)
        if resident > self._resident * 1.01 and time.monotonic() >= self._next_at:
            began_s = time.thread_time()
            self._shared_bytes = sum(map(process_memory_bytes, processes)) - anonymous
            took_s = time.thread_time() - began_s
            self._resident, self._next_at = resident, time.monotonic() + took_s / self._share
        self.peak_bytes = max(self.peak_bytes, self._shared_bytes + anonymous)
