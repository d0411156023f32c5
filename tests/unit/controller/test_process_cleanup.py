"""The end of a process: by a hang-up, by a request to stop, by SIGKILL, with its Ray."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mcore_rl.controller import reaper
from mcore_rl.controller.process_cleanup import (
    STOP_SIGNALS,
    RunStopped,
    catch_stop_signals,
    keep_sigterm_handler,
)
from mcore_rl.controller.reaper import list_processes, read_command_line
from tests.nightly import all_but

JOB = """
import sys, time
from pathlib import Path
from types import ModuleType
from mcore_rl.cli import main
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.observability.console import StepProgress

def job(arguments):
    log, end = open(sys.argv[1], "w", buffering=1), Path(sys.argv[2])
    with clean_up_on_exit(), StepProgress("training", 2) as shown:
        try:
            shown.update(1, "loss 1.0")
            print("waiting", file=log)
            while not end.exists():
                time.sleep(0.05)
            print("all done", file=log)
        finally:
            print("closed in order", file=log)

sys.modules["mcore_rl.cli.waiting_job"] = ModuleType("waiting_job")
sys.modules["mcore_rl.cli.waiting_job"].main = job
sys.exit(main.run_command("waiting_job", []))
"""


def test_keep_sigterm_handler_calls_the_handler_that_was_replaced():
    received_calls = []
    before = signal.signal(signal.SIGTERM, lambda *received: received_calls.append(received))
    try:
        with pytest.raises(SystemExit, match="143"), keep_sigterm_handler():
            sys.exit(1)  # as Ray's does
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received_calls == [(signal.SIGTERM, None)]


def wait_for(log: Path) -> None:
    deadline = time.monotonic() + 60
    while not log.exists() or not log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_terminal_that_hangs_up_ends_the_job_in_order(tmp_path: Path):
    # Its last output goes nowhere, and its status is that of the signal.
    log, end = tmp_path / "log", tmp_path / "end"
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-c", JOB, str(log), str(end)])
    wait_for(log)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert log.read_text() == "waiting\nclosed in order\n"


def test_under_nohup_a_job_goes_on(tmp_path: Path):
    log, end = tmp_path / "log", tmp_path / "end"
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", JOB, log, end],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(log)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    end.touch()
    assert process.wait(timeout=60) == 0
    assert log.read_text() == "waiting\nall done\nclosed in order\n"


def test_a_signal_inside_a_step_is_a_request(capfd):
    with (
        pytest.raises(RunStopped, match="SIGTERM: "),  # since nobody has looked
        catch_stop_signals("go on") as stop,
        stop.defer_to_step_end(),
    ):
        assert stop.requested == ""
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == "SIGTERM"
    assert capfd.readouterr().err.startswith("SIGTERM: the run ends after this step")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_outside_of_a_step_ends_the_run(number):
    message = f"{number.name}: the run was in no step; go on"
    with pytest.raises(RunStopped, match=message), catch_stop_signals("go on"):
        try:
            signal.raise_signal(number)
        except SystemExit:
            raise SystemExit(1) from None  # as a call into Ray does


def test_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with catch_stop_signals("go on"):
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


STEP = """
import time
from mcore_rl.controller.process_cleanup import catch_stop_signals
with catch_stop_signals("go on") as stop, stop.defer_to_step_end():
    print("step", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("second", "status"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)],
)
def test_a_second_signal_acts_as_before(second, status):
    command = [sys.executable, "-c", STEP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"step\n"
        process.send_signal(signal.SIGUSR1)
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(10) == status


# The reaper with shorter limits of time.
FAST_REAPER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("reaper", REAPER)
sys.modules["reaper"] = reaper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reaper)
reaper.STOPPED_S = reaper.SECOND_SIGNAL_S = 1.5
reaper.main()
"""
# Processes that sleep stand in for Ray's; the driver waits for a line, in the middle of a run.
DRIVER = """
import ctypes, json, subprocess, sys
from pathlib import Path
from mcore_rl.controller import reaper
from mcore_rl.controller.process_cleanup import (
    clean_up_on_exit, end_hanging_process, wait_if_ray_died, watch_ray_processes
)
reaper.__file__ = sys.argv.pop(2)
sys.argv[1:] = ["rl", *sys.argv[1:]]
names = "GCS", "raylet", "dashboard agent", "runtime env agent"
logs = Path(sys.argv[2])
with clean_up_on_exit(logs=logs / "ray", trace_file=logs / "error.txt") as scratch:
    sleepers = {name: subprocess.Popen(["sleep", "300"]) for name in names}
    pids = {name: sleeper.pid for name, sleeper in sleepers.items()}
    try:
        with watch_ray_processes(scratch, pids):
            print(json.dumps(pids | {"scratch": str(scratch)}), flush=True)
            word = sys.stdin.readline().strip()
            if word == "fail":
                raise SystemExit("a line of its own")
            if word == "lock":  # in C code, which signals do not interrupt
                mutex = (ctypes.c_char * 64)()
                for _ in range(2):
                    ctypes.CDLL(None).pthread_mutex_lock(mutex)
            if word == "hang":
                end_hanging_process("Ray has not answered\\n\\nMainThread: a stack")
                sys.stdin.read()
            if word == "ask":  # a rank is lost, it seems
                wait_if_ray_died()
                print("blamed a rank", flush=True)
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
"""


class Run:
    def __init__(self, process: subprocess.Popen[str], logs: Path) -> None:
        assert process.stdout is not None
        self.process, self.logs = process, logs
        self.pids: dict[str, int] = json.loads(process.stdout.readline())
        self.ray_logs = Path(str(self.pids.pop("scratch"))) / "r" / "session_2026" / "logs"
        self.ray_logs.mkdir(parents=True)

    def kill(self, *names: str) -> None:
        for name in names:
            os.kill(self.pids[name], signal.SIGKILL)

    def say(self, word: str) -> None:
        """Send a word to the driver, and leave its stdin open."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self, word: str = "") -> tuple[int, str, str]:
        """Return status, stdout and stderr, when the reaper has ended, too."""
        if not word:
            self.process.wait(60)  # its stdin stays open
        out, err = self.process.communicate(f"{word}\n" if word else None, timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with start_run(tmp_path / "logs") as made:
        yield made


@contextmanager
def start_run(logs: Path) -> Iterator[Run]:
    logs.mkdir(exist_ok=True)
    script = logs.parent / "fast" / "reaper.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"REAPER = {reaper.__file__!r}{FAST_REAPER}")
    command = [sys.executable, "-c", DRIVER, str(logs), str(script)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield Run(process, logs)
        finally:
            process.kill()


DEATHS = {
    "GCS": (["GCS"], "GCS"),
    "raylet": (["raylet"], "raylet"),
    "dashboard agent": (["dashboard agent"], "dashboard agent"),
    "runtime env agent": (["runtime env agent"], "runtime env agent"),
    "raylet with its agents": (["raylet", "dashboard agent", "runtime env agent"], "raylet"),
}


@pytest.mark.parametrize(("killed", "cause"), DEATHS.values(), ids=list(DEATHS))
def test_a_death_of_rays_ends_the_driver_with_one_line_and_a_file(run, killed, cause):
    (run.ray_logs / "raylet.err").write_text("the last words of a raylet\n")
    run.kill(*killed)
    status, _, err = run.end()
    line = f"Ray's {cause} (process {run.pids[cause]}) has died, and the run with it"
    assert (status, err) == (1, f"mcore-rl rl: {line} (more: {run.logs / 'error.txt'})\n")
    text = (run.logs / "error.txt").read_text()
    assert text == f"{line}\n\nThe end of raylet.err:\nthe last words of a raylet\n"
    assert not {*run.pids.values()} & list_processes().keys()
    assert sorted(path.name for path in run.logs.iterdir()) == ["error.txt", "ray"]


def test_an_agent_that_takes_the_raylet_and_the_other_agent_along_is_the_cause(run):
    words = "The raylet exited immediately because one Ray agent failed, agent_name = "
    (run.ray_logs / "raylet.err").write_text(f"{words}runtime_env_agent.\n")
    run.kill("runtime env agent", "dashboard agent", "raylet")
    line = f"mcore-rl rl: Ray's runtime env agent (process {run.pids['runtime env agent']}) has "
    assert run.end()[2].startswith(line)


def test_both_servers_of_ray_are_named_where_the_driver_lives_on(run):
    run.kill("GCS", "raylet")
    status, _, err = run.end()
    names = [f"Ray's {name} (process {run.pids[name]})" for name in ("GCS", "raylet")]
    assert err.startswith(f"mcore-rl rl: {' and '.join(names)} have died, and the run with them (")
    assert status == 1


def test_wait_if_ray_died_leaves_the_report_to_the_reaper(run):
    run.kill("raylet")
    status, out, err = run.end("ask")
    assert (status, out) == (1, "")
    assert err.startswith("mcore-rl rl: Ray's raylet (process ")


def test_a_driver_that_is_killed_is_reported(run):
    run.process.kill()
    status, _, err = run.end()
    line = f"the driver (process {run.process.pid}) has died: it was killed or has crashed"
    assert status == -signal.SIGKILL
    assert err == f"mcore-rl rl: {line} (more: {run.logs / 'error.txt'})\n"
    assert (run.logs / "error.txt").read_text() == f"{line}\n"


def test_a_driver_that_dies_with_its_ray_is_named_with_it(run):
    # The kernel kills GCS and raylet with the driver that has started them.
    run.process.kill()
    run.kill("GCS", "raylet")
    _, _, err = run.end()
    assert err.count("\n") == 1 and f"the driver (process {run.process.pid})" in err
    assert "and the run with" not in err


@pytest.mark.parametrize(("word", "status", "err"), [("end", 0, ""), ("fail", 1, "a line of its")])
def test_a_driver_that_ends_by_itself_speaks_for_itself(run, word, status, err):
    # It ends its Ray on the way out.
    code, _, text = run.end(word)
    assert code == status and text.startswith(err) and text.count("\n") == bool(err)
    assert not (run.logs / "error.txt").exists()


def test_traces_that_the_driver_has_written_stay_in_front(run):
    (run.logs / "error.txt").write_text("Traceback of the driver\n")
    run.process.kill()
    assert run.end()[2].endswith(f" (traceback: {run.logs / 'error.txt'})\n")
    text = (run.logs / "error.txt").read_text()
    assert text.startswith("Traceback of the driver\n") and "killed or has crashed" in text


def test_the_line_is_printed_if_the_file_cannot_be_written(run):
    run.logs.rmdir()
    run.kill("GCS")
    status, _, err = run.end()
    assert (status, err.count("\n")) == (1, 1)
    assert err.endswith("(nothing more can be written: No such file or directory)\n")


def test_a_cluster_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with start_run(tmp_path / "logs") as run:
        run.process.kill()
        assert "; Ray at RAY_ADDRESS=127.0.0.1:1 does not answer (Connection r" in run.end()[2]


NAMED = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\\xff\\xfe) Z 1 (", 0, 0, 0)
print("named", flush=True)
time.sleep(300)
"""


def test_a_process_may_have_any_name(run):
    # The reaper reads all processes of the machine.
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as named:
        assert named.stdout is not None and named.stdout.readline()
        assert named.pid in list_processes()
        run.kill("GCS")
        assert run.end()[2].startswith("mcore-rl rl: Ray's GCS (process ")
        named.kill()


@pytest.mark.parametrize("name", all_but(["raylet"], ["GCS", "raylet", "runtime env agent"]))
def test_a_process_of_rays_that_is_stopped_ends_the_driver_with_one_line(run, name):
    os.kill(run.pids[name], signal.SIGSTOP)
    status, _, err = run.end()
    line = f"Ray's {name} (process {run.pids[name]}) is stopped by a signal, and the run ends with"
    assert (status, err) == (1, f"mcore-rl rl: {line} it (more: {run.logs / 'error.txt'})\n")
    assert not {*run.pids.values()} & list_processes().keys()


def test_wait_if_ray_died_leaves_the_report_of_a_stop_to_the_reaper(run):
    gcs = psutil.Process(run.pids["GCS"])
    gcs.suspend()
    while gcs.status() != psutil.STATUS_STOPPED:  # the signal arrives when the process runs next
        time.sleep(0.01)
    status, out, err = run.end("ask")
    assert (status, out) == (1, "")
    assert err.startswith("mcore-rl rl: Ray's GCS (process ")


def test_a_run_that_is_suspended_as_a_whole_goes_on(run):
    pids = [*run.pids.values(), run.process.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)  # twice the limit
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert run.end("end") == (0, "", "")


def test_processes_of_rays_that_are_stopped_for_a_moment_end_nothing(run):
    for _ in range(3):
        os.kill(run.pids["raylet"], signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(run.pids["raylet"], signal.SIGCONT)
        time.sleep(0.8)
    assert run.end("end") == (0, "", "")


@pytest.mark.parametrize(
    "number", all_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
)
def test_a_second_signal_ends_a_driver_that_is_busy_in_c(run, number):
    run.say("lock")
    time.sleep(0.5)
    run.process.send_signal(number)
    time.sleep(reaper.REPEATED_S + 0.2)
    assert run.process.poll() is None
    run.process.send_signal(number)
    status, _, err = run.end()
    assert status == 128 + number
    line = f"mcore-rl rl: {number.name}, the second signal, did not end the run in 1.5 s (more: "
    assert err.startswith(line) and err.count("\n") == 1
    assert not {*run.pids.values()} & list_processes().keys()
    assert not run.ray_logs.parents[2].exists()


def test_a_signal_that_comes_twice_at_once_is_one(run):
    run.say("lock")
    time.sleep(0.5)
    for _ in range(2):
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    time.sleep(2.5)
    assert run.process.poll() is None


def test_a_driver_that_hangs_is_ended_with_its_report(run):
    run.say("hang")
    status, _, err = run.end()
    assert status == 1
    assert err == f"mcore-rl rl: Ray has not answered (more: {run.logs / 'error.txt'})\n"
    text = (run.logs / "error.txt").read_text()
    assert text == "Ray has not answered\n\nMainThread: a stack\n"


def find_reaper(run: Run) -> int:
    children = [p for p, (parent, _) in list_processes().items() if parent == run.process.pid]
    [pid] = [pid for pid in children if b"reaper.py" in read_command_line(pid)]
    return pid


def kill_reaper(run: Run) -> int:
    """Kill the reaper, and return its pid when another one runs."""
    killed = find_reaper(run)
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while True:
        try:
            if find_reaper(run) != killed:
                return killed
        except ValueError:
            assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_reaper_that_dies_is_started_again_and_nothing_is_left(run):
    killed = [kill_reaper(run), kill_reaper(run)]
    status, _, err = run.end("end")
    lines = [
        f"mcore-rl: warning: the process {pid}, which cleans up after the run, has died; it is "
        "started again"
        for pid in killed
    ]
    assert (status, err.splitlines()) == (0, lines)
    assert not run.ray_logs.parents[2].exists()


def test_the_second_reaper_reports_a_death(run):
    kill_reaper(run)
    time.sleep(1)
    run.kill("raylet")
    status, _, err = run.end()
    assert status == 1 and "Ray's raylet (process " in err.splitlines()[-1]


def test_a_reaper_that_is_stopped_is_continued(run):
    pid = find_reaper(run)
    os.kill(pid, signal.SIGSTOP)
    status, _, err = run.end("end")
    line = f"mcore-rl: warning: the process {pid}, which cleans up, is continued\n"
    assert (status, err) == (0, line)
    assert not run.ray_logs.parents[2].exists()
