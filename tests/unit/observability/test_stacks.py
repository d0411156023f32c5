"""States and stacks of other processes, and of operations that take too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.observability.stacks import (
    ProcessState,
    StackTimer,
    format_stacks,
    inspect_process,
    summarize_states,
)

PROGRAM = """
import subprocess, sys, threading, time
from mcore_rl.observability.stacks import dump_stacks_on_signal

def for_ever():
    print("there", flush=True)
    while True:
        pass

def sleep():
    time.sleep(600)

if "answers" in sys.argv:
    dump_stacks_on_signal()
if "child" in sys.argv:
    subprocess.Popen([sys.executable, __file__])
    sleep()
threading.Thread(target=sleep, daemon=True).start()
for_ever()
"""
NO_PTRACE = "#!/bin/sh\necho 'Error: Permission Denied: Try running again as root' >&2\nexit 1\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """start(*words) runs the program until its busiest process is in its loop."""
    script, started = tmp_path / "program.py", []
    script.write_text(PROGRAM)

    def run(*words: str) -> int:
        with (tmp_path / "stderr").open("wb") as stderr:
            command = [sys.executable, str(script), *words]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr))
        assert started[-1].stdout.readline() == b"there\n"
        return started[-1].pid

    yield run
    for process in started:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.wait()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def test_a_loop_in_python_is_seen_with_all_threads(start):
    [state] = inspect_process(start())
    assert state.state == "running"
    assert summarize_states([state]).startswith("running, in for_ever (program.py:")
    assert "sleep (program.py:" in state.stacks  # the other thread
    assert state.stacks in format_stacks([state])


def test_a_stopped_process_has_its_stack(start):
    process = start()
    stop(process)
    assert summarize_states(inspect_process(process)).startswith(
        "stopped by a signal, in for_ever (program.py:"
    )


def test_of_a_process_that_waits_the_child_that_runs_is_the_trouble(start):
    waits, runs = inspect_process(start("child"))
    assert (waits.state, runs.state) == ("waiting", "running")
    short = summarize_states([waits, runs])
    assert short.startswith(f"its process {runs.pid} (")
    assert ") is running, in for_ever (program.py:" in short
    assert "sleep (program.py:" in waits.stacks


def test_where_processes_may_not_be_looked_into_they_write_their_stacks_when_they_can(
    start, tmp_path, monkeypatch
):
    (tmp_path / "py-spy").write_text(NO_PTRACE)
    (tmp_path / "py-spy").chmod(0o700)
    answering, silent = start("answers"), start()
    stop(answering)
    stop(silent)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    [answered], [unanswered] = inspect_process(answering), inspect_process(silent)
    assert answered.stacks.startswith("(py-spy cannot read them: Error: Permission Denied")
    # Of the thread that the signal met.
    assert summarize_states([answered]).startswith("stopped by a signal, in ")
    assert "for_ever" in answered.stacks and "sleep" in answered.stacks
    assert unanswered.stacks.endswith("nor does the process write them: it does not heed SIGUSR2")
    assert summarize_states([unanswered]) == "stopped by a signal"


def test_a_process_that_is_gone_is_reported_as_gone():
    process = subprocess.Popen(["true"])
    assert process.wait() == 0
    assert inspect_process(process.pid) == [ProcessState(process.pid, "", "gone", "")]
    assert summarize_states(inspect_process(process.pid)) == "gone"


def wait_for_ever(begun: threading.Event, ended: threading.Event) -> None:
    begun.set()
    ended.wait()


def test_what_takes_too_long_is_named_with_all_stacks_once(capfd):
    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_for_ever, args=[begun, ended])
    thread.start()
    assert begun.wait(60)  # else it may not be there when the stacks are taken
    timer = StackTimer("rank 3 on here", 0.1)
    timer.start("model.update")
    err, deadline, name = "", time.monotonic() + 60, sys._getframe().f_code.co_name
    while not {"wait_for_ever", name} <= {*err.split()} and time.monotonic() < deadline:
        time.sleep(0.05)
        err += capfd.readouterr().err
    ended.set()
    thread.join()
    first, *lines = err.splitlines()
    assert first == "rank 3 on here: model.update takes longer than 0.1 s; its threads:"
    stacks = "\n".join(lines)
    assert "in wait_for_ever" in stacks and f"in {name}" in stacks


def test_what_ends_in_time_leaves_nothing(capfd):
    timer = StackTimer("rank 3 on here", 1.0)
    timer.start("model.update")
    timer.stop()
    timer.stop()
    time.sleep(1.5)
    assert capfd.readouterr().err == ""
