"""How the process in a run scope ends when its terminal does."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_rl.controller.run_scope import own_sigterm

JOB = """
import sys, time
from pathlib import Path
from types import ModuleType
from mcore_rl.cli import main
from mcore_rl.controller.run_scope import run_scope
from mcore_rl.observability.console import StepProgress

def job(arguments):
    story, end = open(sys.argv[1], "w", buffering=1), Path(sys.argv[2])
    with run_scope(), StepProgress("training", 2) as shown:
        try:
            shown.update(1, "loss 1.0")
            print("waiting", file=story)
            while not end.exists():
                time.sleep(0.05)
            print("all done", file=story)
        finally:
            print("closed in order", file=story)

sys.modules["mcore_rl.cli.waiting_job"] = ModuleType("waiting_job")
sys.modules["mcore_rl.cli.waiting_job"].main = job
sys.exit(main.run_command("waiting_job", []))
"""


def test_a_sigterm_that_another_handler_has_taken_reaches_ours():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *received: heard.append(received))
    try:
        with pytest.raises(SystemExit, match="143"), own_sigterm():
            sys.exit(1)  # as Ray's does
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [(signal.SIGTERM, None)]


def wait_for(story: Path) -> None:
    deadline = time.monotonic() + 60
    while not story.exists() or not story.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_terminal_that_hangs_up_ends_the_job_in_order(tmp_path: Path):
    """What it says last goes nowhere, and its status is still that of the signal."""
    story, end = tmp_path / "story", tmp_path / "end"
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-c", JOB, str(story), str(end)])
    wait_for(story)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert story.read_text() == "waiting\nclosed in order\n"


def test_under_nohup_a_job_goes_on(tmp_path: Path):
    story, end = tmp_path / "story", tmp_path / "end"
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", JOB, story, end],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(story)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    end.touch()
    assert process.wait(timeout=60) == 0
    assert story.read_text() == "waiting\nall done\nclosed in order\n"
