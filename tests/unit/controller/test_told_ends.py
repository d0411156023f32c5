"""What a run says that cannot speak: its driver was killed, or a process of its Ray has died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_rl.controller.reaper import processes

# Processes that sleep stand in for Ray's; the driver waits for a line, in the middle of a run.
DRIVER = """
import json, subprocess, sys
from pathlib import Path
from mcore_rl.controller.run_scope import noted_ray, run_scope, wait_if_ray_died
sys.argv[1:] = ["rl", *sys.argv[1:]]
names = "GCS", "raylet", "dashboard agent", "runtime env agent"
logs = Path(sys.argv[2])
with run_scope(logs=logs / "ray", trace_file=logs / "error.txt") as scratch:
    sleepers = {name: subprocess.Popen(["sleep", "300"]) for name in names}
    pids = {name: sleeper.pid for name, sleeper in sleepers.items()}
    try:
        with noted_ray(scratch, pids):
            print(json.dumps(pids | {"scratch": str(scratch)}), flush=True)
            word = sys.stdin.readline().strip()
            if word == "fail":
                raise SystemExit("a line of its own")
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

    def end(self, word: str = "") -> tuple[int, str, str]:
        """Status, stdout and stderr, when the reaper has ended, too."""
        if not word:
            self.process.wait(60)  # its stdin stays open
        out, err = self.process.communicate(f"{word}\n" if word else None, timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with started(tmp_path / "logs") as made:
        yield made


@contextmanager
def started(logs: Path) -> Iterator[Run]:
    logs.mkdir(exist_ok=True)
    command = [sys.executable, "-c", DRIVER, str(logs)]
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
    told = (run.logs / "error.txt").read_text()
    assert told == f"{line}\n\nThe end of raylet.err:\nthe last words of a raylet\n"
    assert not {*run.pids.values()} & processes().keys()
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


def test_what_fails_then_blames_no_rank(run):
    run.kill("raylet")
    status, out, err = run.end("ask")
    assert (status, out) == (1, "")
    assert err.startswith("mcore-rl rl: Ray's raylet (process ")


def test_a_driver_that_is_killed_is_told_of(run):
    run.process.kill()
    status, _, err = run.end()
    line = f"the driver (process {run.process.pid}) has died: it was killed or has crashed"
    assert status == -signal.SIGKILL
    assert err == f"mcore-rl rl: {line} (more: {run.logs / 'error.txt'})\n"
    assert (run.logs / "error.txt").read_text() == f"{line}\n"


def test_a_driver_that_dies_with_its_ray_is_named_with_it(run):
    """The kernel kills GCS and raylet with the driver that has started them."""
    run.process.kill()
    run.kill("GCS", "raylet")
    _, _, err = run.end()
    assert err.count("\n") == 1 and f"the driver (process {run.process.pid})" in err
    assert "and the run with" not in err


@pytest.mark.parametrize(("word", "status", "err"), [("end", 0, ""), ("fail", 1, "a line of its")])
def test_a_driver_that_ends_by_itself_speaks_for_itself(run, word, status, err):
    """Though it ends its Ray on the way out."""
    found = run.end(word)
    assert found[0] == status and found[2].startswith(err) and found[2].count("\n") == bool(err)
    assert not (run.logs / "error.txt").exists()


def test_traces_that_the_driver_has_written_stay_in_front(run):
    (run.logs / "error.txt").write_text("Traceback of the driver\n")
    run.process.kill()
    assert run.end()[2].endswith(f" (traceback: {run.logs / 'error.txt'})\n")
    told = (run.logs / "error.txt").read_text()
    assert told.startswith("Traceback of the driver\n") and "killed or has crashed" in told


def test_a_line_is_said_without_a_place_for_the_file(run):
    run.logs.rmdir()
    run.kill("GCS")
    status, _, err = run.end()
    assert (status, err.count("\n")) == (1, 1)
    assert err.endswith("(nothing more can be written: No such file or directory)\n")


def test_a_cluster_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with started(tmp_path / "logs") as run:
        run.process.kill()
        assert "; Ray at RAY_ADDRESS=127.0.0.1:1 does not answer (Connection r" in run.end()[2]


NAMED = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\\xff\\xfe) Z 1 (", 0, 0, 0)
print("named", flush=True)
time.sleep(300)
"""


def test_a_process_may_have_any_name(run):
    """Of anybody on the machine."""
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as named:
        assert named.stdout is not None and named.stdout.readline()
        assert named.pid in processes()
        run.kill("GCS")
        assert run.end()[2].startswith("mcore-rl rl: Ray's GCS (process ")
        named.kill()
