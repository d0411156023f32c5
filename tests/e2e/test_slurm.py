"""`sbatch launch/run_tiny.sh` on a real SLURM of two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.controller import reaper
from tests.e2e.conftest import ROOT, Job
from tests.e2e.outcomes import timeless
from tests.e2e.processes import lives
from tests.planted import FAULTS, plant
from tests.slurm_cluster import SlurmCluster, start_slurm_cluster

SETTINGS = (
    "warm_start.num_steps=6", "warm_start.batch_size=16", "warm_start.optimizer.warmup_steps=1",
    "trainer.num_steps=4", "trainer.eval_samples=8", "trainer.prompts_per_step=8",
    "trainer.save_every=1", "actor.optimizer.warmup_steps=0", "algorithm.num_mini_batches=1",
    "algorithm.filter.group_filter=''",
    f"reward.name={ROOT}/tests/e2e/own_functions.py:fingerprint",  # half of all rewards are 1
)  # fmt: skip
LAUNCH = {
    "MCORE_RL_PYTHON": sys.executable,
    "PYTHONPATH": str(ROOT),
    "MCORE_RL_DOCTOR": "0",  # tests/e2e/test_doctor.py
}
A_JOB_S = 300


class Submitted:
    """run_tiny.sh as a job of the cluster."""

    def __init__(
        self,
        slurm: SlurmCluster,
        folder: Path,
        *settings: str,
        num_nodes: int = 2,
        **variables: str,
    ) -> None:
        self.slurm, self.output, self._log = slurm, folder / "out", folder / "slurm.out"
        self.number = slurm.submit(
            f"--nodes={num_nodes}", f"--output={self._log}", str(ROOT / "launch/run_tiny.sh"),
            f"output_dir={self.output}", *(settings or SETTINGS), **LAUNCH | variables,
        )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            assert not self.state().startswith(("COMPLETED", "FAILED")), self.log
            return f"training {step}/" in self.log

        self.slurm.wait_until(reached, f"step {step}", A_JOB_S)

    def wait(self, *states: str) -> dict[str, str]:
        """Wait for one of these states; fail with the job's log."""
        try:
            return self.slurm.wait_for_state(self.number, *states, seconds=A_JOB_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from error

    def state(self) -> str:
        return self.slurm.job(self.number).get("JobState", "")

    def metrics(self) -> list[dict[str, float]]:
        return timeless(self.output)


def nothing_is_left(slurm: SlurmCluster, before: set[str]) -> None:
    def left() -> list[str]:
        pids = slurm.processes()
        daemons = {"munged", "slurmctld", "slurmd", "slurmstepd"}
        leftovers = [
            str(p)
            for p in pids
            if lives(p) and p.name() not in daemons and "slurms" not in p.name()
        ]
        return leftovers + sorted(temporary(slurm) - before)

    slurm.wait_until(lambda: not left(), f"{left()} is gone", 30)


def temporary(slurm: SlurmCluster) -> set[str]:
    """Return temporary files of jobs that no living process uses."""
    mapped = reaper.list_mapped_inodes(set(reaper.list_processes()))
    files = {name for name, inode in reaper.list_shared_memory().items() if inode not in mapped}
    files -= list_paths_of_other_runs()
    return files | {str(folder) for folder in slurm.temp.glob("mcr_*") if _is_unlocked(folder)}


def list_paths_of_other_runs() -> set[str]:
    """Return what reapers of other tests' jobs will remove, as of killed servers."""
    paths = set[str]()
    for note in Path("/tmp").glob(f"job*/{reaper.PREFIX}*/{reaper.NOTE}"):
        with contextlib.suppress(OSError, ValueError):  # its job has ended meanwhile
            paths |= json.loads(note.read_text())["files"].keys()
    return paths


def _is_unlocked(scratch: Path) -> bool:
    try:
        os.close(reaper.acquire_lock(str(scratch)))
    except OSError:  # locked, or gone meanwhile
        return False
    return True


@pytest.fixture(scope="module")
def undisturbed(start_job: Callable[..., Job]) -> list[dict[str, float]]:
    """Return the metrics of the same run on one node."""
    job = start_job("rollout.num_servers=2", *SETTINGS)
    assert job.process.wait(A_JOB_S) == 0, job.stderr
    rows = timeless(job.output)
    assert all(row["actor/grad_norm"] > 0 for row in rows if "reward" in row)
    return rows


@pytest.mark.nightly
def test_a_run_over_two_nodes_is_the_run_on_one_node_to_the_digit(slurm, undisturbed, tmp_path):
    before = temporary(slurm)
    job = Submitted(slurm, tmp_path)
    status = job.wait("COMPLETED", "FAILED")
    assert status["ExitCode"] == "0:0", job.log
    assert {"actor: rank 0 on n1, rank 1 on n2", "rollout: rank 0 on n1, rank 1 on n2"} <= {
        *job.log.splitlines()
    }
    assert job.metrics() == undisturbed
    assert {"driver.log", "node-n1.log", "node-n2.log", "actor-0.log", "ray-n1"} <= {
        *os.listdir(job.output / "logs/latest")
    }
    assert not (job.output / "logs/attempt_1/.token").exists()
    nothing_is_left(slurm, before)


def test_a_run_with_a_signal_saves_is_queued_again_and_trains_each_step_once(slurm, tmp_path):
    # test_resume.py and a run below that loses a node compare such a run with an undisturbed one.
    before = temporary(slurm)
    job = Submitted(slurm, tmp_path)
    job.wait_for_step(1)
    # As before the time limit (#SBATCH --signal=B:USR1): only the batch script is told.
    assert slurm.run("scancel", "--batch", "--signal=USR1", job.number).returncode == 0
    status = job.wait("COMPLETED", "FAILED")
    assert status["ExitCode"] == "0:0", job.log
    # Starts of Ray that a slow machine has failed do not count.
    assert (int(status["Restarts"]) > 0, job.log.count("run the driver")) == (True, 2), job.log
    assert "the driver has ended with status 75" in job.log
    assert {"actor: rank 0 on n1, rank 1 on n2", "rollout: rank 0 on n1, rank 1 on n2"} <= {
        *job.log.splitlines()
    }
    trained = [row for row in job.metrics() if "reward" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    assert all(row["actor/grad_norm"] > 0 for row in trained)
    nothing_is_left(slurm, before)


@pytest.mark.nightly
def test_a_run_that_loses_a_node_goes_on_when_that_is_back_and_ends_the_same(undisturbed, tmp_path):
    with start_slurm_cluster() as slurm:
        before = temporary(slurm)
        job = Submitted(slurm, tmp_path)
        job.wait_for_step(2)
        slurm.kill_node("n2")
        job.wait("PENDING")
        slurm.start_node("n2")
        status = job.wait("COMPLETED", "FAILED")
        assert status["ExitCode"] == "0:0", job.log
        assert re.search(r"mcore-rl rl: .*\(host n2, pid .* died", job.log), job.log
        assert job.metrics() == undisturbed
        nothing_is_left(slurm, before)


@pytest.mark.nightly
@pytest.mark.parametrize("kill", [SlurmCluster.kill_node, SlurmCluster.kill_ray])
def test_a_run_outlives_a_node_that_has_a_server_only(kill, tmp_path):
    # The other server holds the step up for longer than a driver without Ray is given.
    paused = tmp_path / "paused"
    overrides = (
        "placement.rollout=own", "weight_sync.method=disaggregated", "weight_sync.timeout_s=60",
        "reward.name=tests/e2e/own_functions.py:later_pausing_reward", "reward.settings.after=60",
        f"reward.settings.file={paused}", "reward.settings.log=rollout-0-0.log",
        "reward.settings.seconds=90", "reward.timeout_s=200",
    )  # fmt: skip
    with start_slurm_cluster() as slurm:
        before = temporary(slurm)
        python = make_python(tmp_path, "n2", "hold", 'set -- "$@" --ranks=1')
        variables = {"MCORE_RL_PYTHON": python, "MCORE_RL_RANKS_PER_NODE": "3"}
        job = Submitted(slurm, tmp_path, *SETTINGS[:-1], *overrides, **variables)
        slurm.wait_until(paused.exists, "a server generates", A_JOB_S)
        kill(slurm, "n2")
        status = job.wait("COMPLETED", "FAILED", "PENDING")
        assert (status["ExitCode"], status["Restarts"]) == ("0:0", "0"), job.log
        assert {"actor: rank 0 on n1, rank 1 on n1", "rollout: rank 0 on n1, rank 1 on n2"} <= {
            *job.log.splitlines()
        }
        assert "It is started again: 1," in job.log and "is up again" not in job.log
        messages = {
            "kill_node": "Node failure on n2",
            "kill_ray": "Ray has ended on n2; the driver",
        }
        assert messages[kill.__name__] in job.log
        assert len([row for row in job.metrics() if "reward" in row]) == 4
        if kill is SlurmCluster.kill_ray:  # what a lost node has is swept by the next start on it
            nothing_is_left(slurm, before)


@pytest.mark.nightly
def test_what_a_killed_batch_step_leaves_is_swept_by_the_next_start(slurm, tmp_path):
    before = temporary(slurm)
    job = Submitted(slurm, tmp_path)
    slurm.wait_until(lambda: "run the driver" in job.log, "Ray runs", A_JOB_S)
    # Batch script, driver, Ray and the reapers that watch them, all at once.
    assert slurm.run("scancel", "--full", "--signal=KILL", job.number).returncode == 0
    job.wait("CANCELLED", "FAILED")
    slurm.wait_until(lambda: slurm.run("squeue", "-h").stdout == "", "the job is gone")
    sweep = [sys.executable, "-m", "mcore_rl.controller.node", "sweep"]
    done = slurm.run("srun", "-N2", "--ntasks-per-node=1", *sweep, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    nothing_is_left(slurm, before)


@pytest.mark.nightly
def test_a_busy_port_ends_the_job_with_the_node_the_port_and_the_remedy(slurm, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1] - 70  # n2's, whose first is 64 above n1's
        job = Submitted(slurm, tmp_path, MCORE_RL_FIRST_PORT=str(port))
        job.wait("PENDING", "FAILED")
        slurm.wait_until(lambda: "ended twice" in job.log, "it gives up", A_JOB_S)
    assert job.wait("FAILED")["Restarts"] == "1"
    assert re.search(rf"n2: port .*:{port + 70} cannot be had .*MCORE_RL_FIRST_PORT", job.log)
    assert not (job.output / "config.json").exists()


@pytest.mark.nightly
def test_a_node_that_does_not_come_is_named(slurm, tmp_path):
    python = make_python(tmp_path, "n2", "hold", "sleep 1000")
    job = Submitted(slurm, tmp_path, MCORE_RL_PYTHON=python, MCORE_RL_NODES_S="40")
    slurm.wait_until(lambda: "did not join" in job.log, "it says so", A_JOB_S)
    slurm.run("scancel", job.number)
    assert re.search(r"node: n2 did not join the Ray of .* in 40 s; alive: n1\.", job.log)


def make_python(folder: Path, node: str, command: str, shell: str) -> str:
    """Write a Python that runs `shell` first, on one node, for one command of node.py."""
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\n[ "$SLURMD_NODENAME" = {node} ] && case "$*" in *" {command} "*) {shell};;\n'
        f'esac\nexec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def test_a_node_on_which_ray_has_failed_is_left_out_the_next_time(slurm, tmp_path):
    # A job of one of the two nodes; what it is told to train is refused where Ray comes up.
    python = make_python(tmp_path, "n1", "hold", 'set -- "$@" --interface=ib9')
    job = Submitted(slurm, tmp_path, "trainer.num_steps=0", num_nodes=1, MCORE_RL_PYTHON=python)
    status = job.wait("FAILED")
    assert re.search(r"n1: interface 'ib9' has no IPv4 address; allowed: .*lo", job.log), job.log
    assert "next time without n1" in job.log
    assert "attempt 2 on n2" in job.log
    assert "mcore-rl rl: trainer.num_steps=0" in job.log
    expected = {"Restarts": "1", "ExitCode": "2:0", "ExcNodeList": "n1", "BatchHost": "n2"}
    assert {name: status[name] for name in expected} == expected


def test_a_node_that_is_not_fit_ends_the_job_before_ray_and_tells_what_to_do(slurm, tmp_path):
    planted = plant(tmp_path, FAULTS["version"].world)
    job = Submitted(slurm, tmp_path, MCORE_RL_DOCTOR="1", **planted)
    slurm.wait_until(lambda: "ended twice" in job.log, "it gives up", A_JOB_S)
    assert job.wait("FAILED")["Restarts"] == "1"
    assert re.search(r"n2.*ray.*2\.59\.0.*make the nodes alike", job.log), job.log
    assert job.log.count("the nodes are not fit for a run") == 2
    assert "start Ray" not in job.log and not (job.output / "config.json").exists()


def test_a_wrong_path_is_refused_at_once(slurm, tmp_path):
    job = Submitted(slurm, tmp_path, MCORE_RL_PYTHON="/nowhere/python")
    job.wait("FAILED")
    assert "/nowhere/python is not there" in job.log
    assert "MCORE_RL_PYTHON" in job.log
    assert not job.output.exists()
