import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from mcore_rl.observability.memory import PeakMemory, get_tree_memory_bytes

MB = 1 << 20
# A process with 80 MB of its own and a child with 60 MB, which says when both are there.
FAMILY = """
import subprocess, sys
own = bytearray(b"x") * (80 << 20)
code = "own = bytearray(b'x') * (60 << 20); print('ready', flush=True); input()"
with subprocess.Popen([sys.executable, "-c", code]) as child:
    child.wait()
"""
ROOT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
# A process that maps a file and has touched every page of it, as has a child of the program named.
READER = """
import mmap, subprocess, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
    sum(mapped[::4096])
    if sys.argv[2:]:
        subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])
    else:
        print("ready", flush=True)
        input()
"""
PEAK = """
import mmap, time
from mcore_rl.observability.memory import PeakMemory
MB = 1 << 20
with PeakMemory(interval_s=0.02, share=1.0) as memory:
    start = memory.peak_bytes
    with mmap.mmap(-1, 200 * MB) as block:  # new pages: the heap may have as many to spare
        block[::4096] = b"x" * (200 * MB // 4096)
        deadline = time.monotonic() + 30  # a sample takes its time, as the machine has others
        while memory.peak_bytes - start < 180 * MB and time.monotonic() < deadline:
            time.sleep(0.02)
print(start, memory.peak_bytes - start)
"""


@contextmanager
def running(code: str, *arguments: str) -> Iterator[psutil.Process]:
    """Apart from this process, whose share of what others map changes with these."""
    command = [sys.executable, "-c", code, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield psutil.Process(process.pid)
        finally:
            process.communicate("\n")


def test_children_and_their_children_count():
    with running(ROOT, FAMILY) as family:
        assert 140 * MB <= get_tree_memory_bytes(family) < 200 * MB
    assert get_tree_memory_bytes(family) == 0


def test_the_peak_outlives_the_memory():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    start, peak = map(int, done.stdout.split())
    assert start > 0 and 180 * MB <= peak < 250 * MB


def test_what_its_thread_takes_is_bounded_and_growth_between_counts(monkeypatch):
    """PSS, which takes all that the thread may, is read once; memory that is not shared counts."""
    calls: list[int] = []

    def slow(process: psutil.Process) -> int:
        calls.append(process.pid)
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return psutil.Process(process.pid).memory_info().rss

    monkeypatch.setattr("mcore_rl.observability.memory.get_process_memory_bytes", slow)
    gc.collect()  # what earlier tests have left shall not be freed meanwhile
    with PeakMemory(interval_s=0.02, share=1e-6) as memory:
        start = memory.peak_bytes
        block = bytearray(b"x") * (100 * MB)
        deadline = time.monotonic() + 30
        while memory.peak_bytes - start < 90 * MB and time.monotonic() < deadline:
            time.sleep(0.02)
        del block
    assert 90 * MB <= memory.peak_bytes - start < 150 * MB
    assert len(calls) == len(set(calls))


def test_memory_that_processes_share_counts_once(tmp_path):
    path = tmp_path / "shared"
    path.write_bytes(b"x" * (64 * MB))
    with running(READER, str(path), READER) as reader:
        assert get_tree_memory_bytes(reader) < 96 * MB  # twice would be 128, and the interpreters


def test_a_process_that_has_ended_counts_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    gone = psutil.Process(process.pid)
    process.wait()
    assert get_tree_memory_bytes(gone) == 0
