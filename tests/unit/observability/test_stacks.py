"""What another process is doing, told from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.observability.stacks import Look, in_full, in_short, look_at

PROGRAM = """
import subprocess, sys, threading, time
from mcore_rl.observability.stacks import answer_signals

def for_ever():
    print("there", flush=True)
    while True:
        pass

def sleep():
    time.sleep(600)

if "answers" in sys.argv:
    answer_signals()
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
    [look] = look_at(start())
    assert look.state == "running"
    assert in_short([look]).startswith("running, in for_ever (program.py:")
    assert "sleep (program.py:" in look.stacks  # the other thread
    assert look.stacks in in_full([look])


def test_a_stopped_process_has_its_stack(start):
    process = start()
    stop(process)
    assert in_short(look_at(process)).startswith("stopped by a signal, in for_ever (program.py:")


def test_of_a_process_that_waits_the_child_that_runs_is_the_trouble(start):
    waits, runs = look_at(start("child"))
    assert (waits.state, runs.state) == ("waiting", "running")
    short = in_short([waits, runs])
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
    [answered], [unanswered] = look_at(answering), look_at(silent)
    assert answered.stacks.startswith("(py-spy cannot read them: Error: Permission Denied")
    # Of the thread that the signal met.
    assert in_short([answered]).startswith("stopped by a signal, in ")
    assert "for_ever" in answered.stacks and "sleep" in answered.stacks
    assert unanswered.stacks.endswith("nor does the process write them: it does not heed SIGUSR2")
    assert in_short([unanswered]) == "stopped by a signal"


def test_a_process_that_is_gone_is_said_to_be():
    process = subprocess.Popen(["true"])
    assert process.wait() == 0
    assert look_at(process.pid) == [Look(process.pid, "", "gone", "")]
    assert in_short(look_at(process.pid)) == "gone"
