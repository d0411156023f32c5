"""Ends of a job of a launch script: what is queued again, and without which nodes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
# A launch script of one node. The driver is a program of a test, Ray and SLURM are told of only.
JOB = """\
. {root}/launch/slurm_lib.sh
find_nodes() {{ nodes=(n1); }}
examine_nodes() {{ {examine}; }}
on_all_nodes() {{ case "$*" in *' hold '*) {hold} ;; esac }}
on_first_node() {{
    case "$*" in
    *' address '*) echo 127.0.0.1 ;;
    *' wait '*) {wait} ;;
    *) run bash -c {driver} ;;
    esac
}}
scontrol() {{
    echo "$*" >>{folder}/scontrol
    if [ "$2" = hostnames ]; then
        echo "$3"
    elif [ "$1" = show ]; then
        echo "   JobState=COMPLETING Reason={reason} Dependency=(null)"
        echo "   ReqNodeList=(null) ExcNodeList={excluded}"
    fi
}}
sinfo() {{ cat {folder}/sinfo; }}
run_job output_dir={folder}/out
"""


class LaunchedJob:
    """Attempts of a job in one folder, whose driver is a line of bash."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, folder / "out/logs/attempts.tsv"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        driver: str,
        *,
        hold: str = "cat >/dev/null",
        wait: str = "true",
        reason: str = "None",
        sinfo: str = "",
        excluded: str = "(null)",
        examine: str = "true",
    ) -> subprocess.Popen[bytes]:
        (self.folder / "sinfo").write_text(sinfo)
        script = JOB.format(
            root=ROOT,
            folder=self.folder,
            driver=shlex.quote(driver),
            hold=hold,
            wait=wait,
            reason=reason,
            excluded=excluded,
            examine=examine,
        )
        usual = {"PATH": os.environ["PATH"], "MCORE_RL_PYTHON": sys.executable}
        usual |= {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "p"}
        with (self.folder / "printed").open("w") as printed:
            process = subprocess.Popen(
                ["bash", "-c", script], env=usual, stdout=printed, stderr=printed,
                start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def run(self, driver: str, **options: str) -> str:
        """Return what it printed."""
        self.start(driver, **options).wait(100)
        return self.printed

    def kill(self) -> None:
        """All that its scripts have started, too."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def printed(self) -> str:
        return (self.folder / "printed").read_text()

    def build_driver(self, step: int, driver: str) -> str:
        """A driver that has trained it before."""
        return f"echo '{{\"step\": {step}}}' >{self.folder}/out/metrics.jsonl; {driver}"

    @property
    def requeues(self) -> int:
        calls = self.folder / "scontrol"
        return calls.read_text().splitlines().count("requeue 7") if calls.exists() else 0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LaunchedJob]:
    made = LaunchedJob(tmp_path)
    yield made
    made.kill()


def send_limit_signals(job: LaunchedJob, process: subprocess.Popen[bytes]) -> None:
    """SIGUSR1 in good time, and SIGTERM in the end, as SLURM sends them to a batch script."""
    wait_until((job.folder / "busy").exists)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "SIGUSR1" in job.printed)
    process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(("reason", "requeues"), [("TimeLimit", 1), ("None", 0)])
def test_a_step_that_outlasts_the_warning_is_queued_again_and_a_cancelled_job_is_not(
    job, reason, requeues
):
    """SIGUSR1, SIGTERM at the limit, SIGKILL after KillWait: the driver ends with none of them."""
    busy = f'trap "" USR1; touch {job.folder}/busy; while :; do sleep 0.1; done'
    process = job.start(job.build_driver(5, busy), reason=reason)
    send_limit_signals(job, process)
    wait_until(lambda: "SIGTERM" in job.printed)
    wait_until(lambda: job.requeues == requeues)  # its row is written before
    job.kill()
    assert job.requeues == requeues
    assert job.rows.read_text().splitlines() == ["1\tstarted\t-", "1\t75\t5"][: 1 + requeues]


def test_a_driver_that_saves_after_the_limit_is_queued_again_once(job):
    saving = f'trap "sleep 1; exit 75" USR1; touch {job.folder}/busy; while :; do sleep 0.1; done'
    process = job.start(saving, reason="TimeLimit")
    send_limit_signals(job, process)
    assert process.wait(100) == 75, job.printed
    assert job.requeues == 1
    assert job.rows.read_text() == "1\tstarted\t-\n1\t75\t-\n"


def test_a_job_that_fails_twice_at_a_step_is_not_queued_again_whatever_its_status(job):
    assert "ended twice" not in job.run(job.build_driver(5, "exit 1"))
    assert "ended twice after step 5; not started again" in job.run("exit 143")
    assert job.requeues == 1
    assert job.rows.read_text().splitlines()[1::2] == ["1\t1\t5", "2\t143\t5"]


def test_a_script_that_was_killed_counts_as_a_failure_at_its_step(job):
    process = job.start(job.build_driver(5, f"touch {job.folder}/busy; sleep 100"))
    wait_until((job.folder / "busy").exists)
    process.kill()
    process.wait()
    assert "ended twice after step 5" in job.run("exit 1")


def test_a_job_goes_on_that_fails_once_after_a_save_or_further_on(job):
    job.run(job.build_driver(5, "exit 75"))
    assert "ended twice" not in job.run("exit 1")  # a node was lost as it went on
    assert "ended twice" not in job.run(job.build_driver(6, "exit 1"))
    assert job.requeues == 3


def test_a_step_that_no_time_limit_has_room_for_is_not_begun_for_ever(job):
    job.run(job.build_driver(5, "exit 75"))
    assert "ended twice after step 5" in job.run("exit 75")


@pytest.mark.parametrize(
    ("other", "is_spare"),
    [("idle", True), ("alloc", True), ("drain", False), ("drng", False), ("maint", False)],
)
def test_a_node_is_left_out_where_another_may_be_given(job, other, is_spare):
    hold = f"echo n1: no memory >{job.folder}/out/logs/attempt_1/n1.failed"
    printed = job.run("exit 1", hold=hold, wait="false", sinfo=f"n1 idle\nn2 {other}\n")
    assert ("next time without n1\n" in printed) == is_spare
    assert ("n1 is not left out: 0 other nodes of the 1" in printed) != is_spare


def test_nodes_that_were_left_out_before_stay_so(job):
    hold = f"echo n1: no memory >{job.folder}/out/logs/attempt_1/n1.failed"
    printed = job.run(
        "exit 1", hold=hold, wait="false", excluded="n7", sinfo="n1 idle\nn2 idle\nn7 idle\n"
    )
    assert "next time without n7,n1\n" in printed


def test_a_start_of_ray_that_ends_at_once_is_not_waited_for(job):
    """srun ends so if it cannot create a step; nothing of it would join."""
    hold = "echo srun: error: Unable to create step; exit 1"
    printed = job.run("exit 0", hold=hold, wait="exec sleep 1000")
    assert "no node runs Ray: what was to start it has ended, for the reason above" in printed
    assert "run the driver" not in printed
    assert job.requeues == 1


def test_a_node_on_which_ray_fails_at_once_is_named_by_what_waits(job):
    failed = f"{job.folder}/out/logs/attempt_1/n1.failed"
    wait = f"{{ sleep 2; echo told: $(cat {failed}); exit 2; }}"
    printed = job.run("exit 0", hold=f"echo n1: no memory >{failed}; exit 2", wait=wait)
    assert "told: n1: no memory" in printed and "Ray did not start" in printed


def test_a_job_of_unfit_nodes_is_queued_again_without_them(job):
    mark = f"touch {job.folder}/out/logs/attempt_1/n1.failed; return 1"
    printed = job.run("exit 0", examine=mark, sinfo="n1 idle\nn2 idle\n")
    assert "the nodes are not fit for a run" in printed and "next time without n1\n" in printed


def test_a_job_that_has_to_end_while_ray_starts_does_not_wait_for_it(job):
    process = job.start("exit 0", wait="exec sleep 1000")
    wait_until(lambda: "start Ray" in job.printed)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(100) == 75, job.printed
    assert "run the driver" not in job.printed
    assert job.requeues == 1
