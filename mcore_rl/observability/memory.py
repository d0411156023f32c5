"""Memory of a run, over all its processes."""

from __future__ import annotations

import threading
import time

import psutil

# The entry of a summary with the peaks of ranks on GPUs, and the first part of their metrics.
GPU_MEMORY = "gpu_memory"


def get_process_memory_bytes(process: psutil.Process) -> int:
    """Return the memory of a process: proportional (PSS) if Linux reports it, else resident (RSS).

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
    return get_resident_bytes(process)


def get_resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory of one process (RSS); 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _get_resident_and_shared_bytes(process: psutil.Process) -> tuple[int, int]:
    """Return RSS, and the part of it in files or shared memory."""
    try:
        info = process.memory_info()
    except psutil.Error:
        return 0, 0
    return int(info.rss), int(getattr(info, "shared", 0))


def list_process_tree(root: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants; none if it has ended."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def get_tree_memory_bytes(root: psutil.Process) -> int:
    """Return the memory of a process and all its descendants; 0 if it has ended."""
    return sum(map(get_process_memory_bytes, list_process_tree(root)))


class PeakMemory:
    """Context manager that samples the memory of this process and its descendants in a thread.

    `peak_bytes` is the highest sample so far; spikes shorter than `interval_s` may be missed. Linux
    walks the page tables for PSS, 7 ms for a process that has imported vLLM. PSS is read when RSS
    has grown by a hundredth since the last time, and so seldom that it takes `share` of a core. In
    between, memory is the last value plus the growth of anonymous memory.
    """

    def __init__(self, interval_s: float = 4.0, share: float = 0.0005) -> None:
        self._interval_s, self._share = interval_s, share
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._root = psutil.Process()
        # Values when PSS was last read:
        self._resident = 0.0  # RSS in bytes, summed over the processes
        self._shared_bytes = 0  # memory in files or shared memory, counted once
        self._next_pss_s = 0.0  # when PSS may be read again, by time.monotonic
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
        processes = list_process_tree(self._root)
        sizes = [_get_resident_and_shared_bytes(process) for process in processes]
        resident = sum(size for size, _ in sizes)
        anonymous = resident - sum(shared for _, shared in sizes)
        if resident > self._resident * 1.01 and time.monotonic() >= self._next_pss_s:
            start_s = time.thread_time()
            self._shared_bytes = sum(map(get_process_memory_bytes, processes)) - anonymous
            duration_s = time.thread_time() - start_s
            self._resident = resident
            self._next_pss_s = time.monotonic() + duration_s / self._share
        self.peak_bytes = max(self.peak_bytes, self._shared_bytes + anonymous)
