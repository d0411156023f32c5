import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from mcore_rl.observability.memory import PeakMemory, tree_memory_bytes

MB = 1 << 20
# A process with 80 MB of its own and a child with 60 MB, which says when both are there.
FAMILY = """
import subprocess, sys
own = bytearray(b"x") * (80 << 20)
code = "own = bytearray(b'x') * (60 << 20); print('ready', flush=True); input()"
with subprocess.Popen([sys.executable, "-c", code]) as child:
    child.wait()
"""
# A process that maps a file and has touched every page of it.
READER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
    sum(mapped[::4096])
    print("ready", flush=True)
    input()
"""


@contextmanager
def running(code: str, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-c", code, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.communicate("\n")


def test_children_and_their_children_count():
    alone = tree_memory_bytes(psutil.Process())
    with running(FAMILY):
        together = tree_memory_bytes(psutil.Process())
    assert 140 * MB <= together - alone < 200 * MB
    assert tree_memory_bytes(psutil.Process()) - alone < 20 * MB


def test_the_peak_outlives_the_memory():
    with PeakMemory(interval_s=0.02, share=1.0) as memory:
        start = memory.peak_bytes
        assert start > 0
        with mmap.mmap(-1, 200 * MB) as block:  # new pages: the heap may have as many to spare
            block[::4096] = b"x" * (200 * MB // 4096)
            deadline = time.monotonic() + 30  # a sample takes its time, as the machine has others
            while memory.peak_bytes - start < 180 * MB and time.monotonic() < deadline:
                time.sleep(0.02)
    assert 180 * MB <= memory.peak_bytes - start < 250 * MB


def test_what_its_thread_takes_is_bounded_and_growth_between_counts(monkeypatch):
    """PSS, which takes all that the thread may, is asked once; memory that is not shared counts."""
    asked: list[int] = []

    def slow(process: psutil.Process) -> int:
        asked.append(process.pid)
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return psutil.Process(process.pid).memory_info().rss

    monkeypatch.setattr("mcore_rl.observability.memory.process_memory_bytes", slow)
    with PeakMemory(interval_s=0.02, share=1e-6) as memory:
        start = memory.peak_bytes
        block = bytearray(b"x") * (100 * MB)
        deadline = time.monotonic() + 30
        while memory.peak_bytes - start < 90 * MB and time.monotonic() < deadline:
            time.sleep(0.02)
        del block
    assert 90 * MB <= memory.peak_bytes - start < 150 * MB
    assert len(asked) == len(set(asked))


def test_memory_that_processes_share_counts_once(tmp_path):
    path = tmp_path / "shared"
    path.write_bytes(b"x" * (64 * MB))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        sum(mapped[::4096])
        alone = tree_memory_bytes(psutil.Process())
        with running(READER, str(path)):
            together = tree_memory_bytes(psutil.Process())
    assert together - alone < 32 * MB


def test_a_process_that_has_ended_counts_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    gone = psutil.Process(process.pid)
    process.wait()
    assert tree_memory_bytes(gone) == 0
