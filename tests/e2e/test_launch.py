"""launch/hosts.sh and launch/local.sh: Ray comes up on every host, and goes with the script."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

# As ssh does it: a shell at the other end, to which the end of the connection is that of stdin.
SSH = '#!/bin/sh\nshift\necho "$*" >>"$0.commands"\nexec sh -c "$*"\n'
ENDS_S = 120


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """launch(script, *settings, **variables): it prints to tmp_path/told."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *settings: str, **variables: str) -> subprocess.Popen[str]:
        environment = os.environ | {
            "MCORE_RL_PYTHON": sys.executable,
            "MCORE_RL_SSH": str(ssh),
            "MCORE_RL_DOCTOR": "0",  # tests/e2e/test_doctor.py
            "MCORE_RL_RANKS_PER_NODE": "1",
            "MCORE_RL_FIRST_PORT": str(10000 + 256 * random.randrange(80)),
        }
        with (tmp_path / "told").open("w") as told:
            command = [
                "bash",
                str(ROOT / "launch" / script),
                *settings,
                f"output_dir={tmp_path}/out",
            ]
            started.append(
                subprocess.Popen(
                    command, stdout=told, stderr=told, env=environment | variables, text=True,
                    start_new_session=True,
                )
            )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def leftovers() -> set[str]:
    return {str(path) for path in [*Path("/tmp").glob("mcr_*"), *Path("/dev/shm").iterdir()]}


def gone(before: set[str]) -> bool:
    """A driver whose Ray is gone tries for a minute to reach it."""
    deadline = time.monotonic() + ENDS_S
    while leftovers() - before and time.monotonic() < deadline:
        time.sleep(0.2)
    return not leftovers() - before


def test_hosts_have_a_ray_together_and_the_driver_tells_the_status(launch, tmp_path):
    before = leftovers()
    job = launch(
        "hosts.sh", "recipe=tiny_two_nodes", "trainer.num_steps=0",
        MCORE_RL_HOSTS="a1 a2", MCORE_RL_DOCTOR="1", HF_TOKEN="secret",
    )  # fmt: skip
    assert job.wait(ENDS_S) == 2, (tmp_path / "told").read_text()
    told = (tmp_path / "told").read_text()
    assert "attempt 1 on a1 a2" in told
    assert "HF_TOKEN" not in (tmp_path / "ssh.commands").read_text()
    assert "mcore-rl rl: trainer.num_steps=0" in told
    assert {"node-a1.log", "node-a2.log"} <= {*os.listdir(tmp_path / "out/logs/attempt_1")}
    assert gone(before)


def test_the_ray_of_a_host_ends_with_a_launch_script_that_is_killed(launch, tmp_path):
    before = leftovers()
    job = launch("local.sh", "recipe=quickstart", MCORE_RL_RANKS_PER_NODE="2")
    deadline = time.monotonic() + ENDS_S
    while "run the driver" not in (told := (tmp_path / "told").read_text()):
        assert time.monotonic() < deadline, told
        time.sleep(0.2)
    assert leftovers() - before
    (tmp_path / "token").write_text("0" * 64)
    other = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    head = re.search(r"start Ray at (\S+)", told)
    waiting = [sys.executable, "-m", "mcore_rl.controller.node", "wait", "--seconds=20"]
    waiting += [f"--head={head[1]}", "--names=a1", f"--logs={tmp_path}"]
    refused = subprocess.run(waiting, env=other, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"the Ray at {head[1]} has another token" in refused.stderr
    os.kill(job.pid, signal.SIGKILL)
    assert gone(before)


@pytest.mark.nightly
def test_a_busy_port_ends_the_start_with_the_host_and_the_remedy(launch, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = launch(
            "hosts.sh", "recipe=tiny_two_nodes", MCORE_RL_HOSTS="a1 a2",
            MCORE_RL_FIRST_PORT=str(port - 70),  # of a2, 64 above a1's
        )  # fmt: skip
        assert job.wait(ENDS_S) == 1
    told = (tmp_path / "told").read_text()
    assert "mcore-rl node: a2: port" in told
    assert "MCORE_RL_FIRST_PORT" in told
