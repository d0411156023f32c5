"""Stopped processes of an engine are killed; those that go on are left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from mcore_rl.controller.reaper import list_processes
from mcore_rl.inference.vllm.processes import StoppedProcesses
from tests.waiting import wait_until

LIMIT_S = 0.4
ENGINE = """
import subprocess, sys
worker = subprocess.Popen(["sleep", "300"])
print(worker.pid, flush=True)
worker.wait()
"""


@pytest.fixture
def engine() -> Iterator[tuple[int, int]]:
    """The pids of an engine and of a worker that it has started."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("place", [0, 1], ids=["engine", "worker"])
def test_a_stopped_process_is_ended_and_named(engine, capfd, place):
    with closing(StoppedProcesses([engine[0]], LIMIT_S)) as watch:
        os.kill(engine[place], signal.SIGSTOP)
        wait_until(lambda: watch.reason)
    process = r"its process \S+ \(pid " + str(engine[place]) + r"\)"
    reason = watch.reason
    assert re.fullmatch(rf"{process} had been stopped by a signal for 0\.4 s", reason)
    assert capfd.readouterr().err == f"vLLM's engine is ended: {reason}\n"
    wait_until(lambda: engine[place] not in list_processes())


def test_a_process_that_stops_now_and_then_goes_on(engine):
    # A profiler does that.
    with closing(StoppedProcesses([engine[0]], LIMIT_S)) as watch:
        until = time.monotonic() + 4 * LIMIT_S
        while time.monotonic() < until:
            os.kill(engine[0], signal.SIGSTOP)
            time.sleep(LIMIT_S / 4)
            os.kill(engine[0], signal.SIGCONT)
            time.sleep(LIMIT_S / 3)
    assert watch.reason == ""


WATCHED = """
import os, signal, subprocess, sys, time
from mcore_rl.inference.vllm.processes import StoppedProcesses
engine = subprocess.Popen(["sleep", "300"])
watch = StoppedProcesses([engine.pid], 0.8)
print(engine.pid, flush=True)
sys.stdin.readline()
print(watch.reason or "alive", flush=True)
engine.kill()
"""


@pytest.mark.job
def test_a_whole_job_that_is_suspended_and_continued_is_left_alone():
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        job.stdout.readline()
        os.killpg(job.pid, signal.SIGSTOP)
        time.sleep(2)
        os.killpg(job.pid, signal.SIGCONT)
        time.sleep(0.5)
        assert job.communicate("\n", timeout=30)[0] == "alive\n"


def test_processes_that_are_gone_are_no_error(engine):
    with closing(StoppedProcesses([2**22 + 1, engine[0]], LIMIT_S)) as watch:
        os.kill(engine[0], signal.SIGKILL)
        time.sleep(2 * LIMIT_S)
    assert watch.reason == ""
