"""Memory of a run, over all its processes."""

from __future__ import annotations

import threading

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
    walks the page tables to tell PSS, 7 ms for a process that has imported vLLM: it is asked when
    RSS, which costs nothing, is by a hundredth above what it was at the last such sample.
    """

    def __init__(self, interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._root = psutil.Process()
        self._resident = 0.0
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
        resident = sum(map(resident_bytes, processes))
        if resident > self._resident * 1.01:
            self._resident = resident
            self.peak_bytes = max(self.peak_bytes, sum(map(process_memory_bytes, processes)))
