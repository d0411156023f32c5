"""launch/hosts.sh and launch/local.sh: Ray comes up on every host, and goes with the script."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Job
from tests.e2e.test_kill import assert_gone_soon

# As ssh does it: a shell at the other end, to which the end of the connection is that of stdin.
SSH = '#!/bin/sh\nshift\necho "$*" >>"$0.commands"\nexec sh -c "$*"\n'
ENDS_S = 120


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """launch(script, *settings, **variables) is a job that a script starts."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    with contextlib.ExitStack() as jobs:

        def start(script: str, *settings: str, **variables: str) -> Job:
            environment = {
                "MCORE_RL_PYTHON": sys.executable,
                "MCORE_RL_SSH": str(ssh),
                "MCORE_RL_DOCTOR": "0",  # tests/e2e/test_doctor.py
                "MCORE_RL_RANKS_PER_NODE": "1",
                "MCORE_RL_FIRST_PORT": str(10000 + 256 * random.randrange(54, 62)),
            }
            command = ["bash", ROOT / "launch" / script]
            job = Job(tmp_path, *settings, command=command, **environment | variables)
            jobs.callback(job.close)
            return job

        yield start


def test_hosts_have_a_ray_together_and_the_driver_tells_the_status(launch, tmp_path):
    job = launch(
        "hosts.sh", "recipe=tiny_two_nodes", "trainer.num_steps=0",
        MCORE_RL_HOSTS="a1 a2", MCORE_RL_DOCTOR="1", HF_TOKEN="secret",
    )  # fmt: skip
    assert job.process.wait(ENDS_S) == 2, job.stdout + job.stderr
    assert "attempt 1 on a1 a2" in job.stdout
    assert "HF_TOKEN" not in (tmp_path / "ssh.commands").read_text()
    assert "mcore-rl rl: trainer.num_steps=0" in job.stdout
    assert {"node-a1.log", "node-a2.log"} <= {*os.listdir(job.output / "logs/attempt_1")}
    assert len(job.processes) > 8
    assert_gone_soon(job)


@pytest.mark.nightly  # tests/unit/repo/test_launch_ends.py has scripts that are killed
def test_the_ray_of_a_host_ends_with_a_launch_script_that_is_killed(launch, tmp_path):
    job = launch("local.sh", "recipe=quickstart", MCORE_RL_RANKS_PER_NODE="2")
    job.wait_until(lambda: "run the driver" in job.stdout, "the driver")
    assert job.left()
    (tmp_path / "token").write_text("0" * 64)
    other = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    other.pop("RAY_AUTH_TOKEN", None)  # of another test's Ray in this process
    head = re.search(r"start Ray at (\S+)", job.stdout)
    waiting = [sys.executable, "-m", "mcore_rl.controller.node", "wait", "--seconds=20"]
    waiting += [f"--head={head[1]}", "--names=a1", f"--logs={tmp_path}"]
    refused = subprocess.run(waiting, env=other, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"the Ray at {head[1]} has another token" in refused.stderr
    job.process.kill()
    assert_gone_soon(job, ENDS_S)  # a driver whose Ray is gone tries for a minute to reach it


@pytest.mark.nightly
def test_a_busy_port_ends_the_start_with_the_host_and_the_remedy(launch):
    with socket.socket() as taken:
        port = 9500  # below those of connections, and of jobs
        taken.bind(("", port))
        taken.listen()
        job = launch(
            "hosts.sh", "recipe=tiny_two_nodes", MCORE_RL_HOSTS="a1 a2",
            MCORE_RL_FIRST_PORT=str(port - 70),  # of a2, 64 above a1's
        )  # fmt: skip
        assert job.process.wait(ENDS_S) == 1
    assert "mcore-rl node: a2: port" in job.stderr
    assert "MCORE_RL_FIRST_PORT" in job.stderr
    assert_gone_soon(job)
