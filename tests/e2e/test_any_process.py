"""Any process of a run is killed or stopped at any moment: the run ends or goes on, in time.

The limit is `timeouts.call_s` and a minute. It names what has died, and leaves nothing.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

from tests.e2e.conftest import Job
from tests.e2e.processes import command_line, lives, prints_to, processes_of
from tests.e2e.test_kill import assert_gone_soon, assert_whole, steps
from tests.e2e.test_server_deaths import SETTINGS

pytestmark = [pytest.mark.job, pytest.mark.nightly]

CALL_S = 60  # which a busy machine may need for a step
RUN = (
    *SETTINGS, "trainer.num_steps=100000", "algorithm.kl_coef=0.001", f"timeouts.call_s={CALL_S}",
    "weight_sync.timeout_s=15", "reward.terms.math.weight=1",
    "reward.terms.length.name=tests/e2e/own_functions.py:length",
    "reward.terms.length.weight=1", "reward.terms.length.settings.per_character=0.5",
)  # fmt: skip
MODES = "sync", "one_step_off", "fully_async"


def living(job: Job) -> list[psutil.Process]:
    return [process for process in set(job.processes) if lives(process)]


def find_by_name(name: str) -> Callable[[Job], list[psutil.Process]]:
    return lambda job: [process for process in living(job) if process.name().startswith(name)]


def find_by_command(word: str) -> Callable[[Job], list[psutil.Process]]:
    return lambda job: [process for process in living(job) if word in command_line(process)]


def find_by_log(log: str) -> Callable[[Job], list[psutil.Process]]:
    return lambda job: [process for process in living(job) if prints_to(process, log)][:1]


FATAL: dict[str, Callable[[Job], list[psutil.Process]]] = {
    "driver": lambda job: [psutil.Process(job.process.pid)],
    "GCS": find_by_name("gcs_server"),
    "raylet": find_by_name("raylet"),
    "dashboard agent": find_by_name("ray::DashboardAgent"),
    "runtime env agent": find_by_name("ray::RuntimeEnvAgent"),
    "actor": find_by_log("actor-0.log"),
    "reference": find_by_log("reference-0.log"),
}
REPLACED: dict[str, Callable[[Job], list[psutil.Process]]] = {
    "reaper": find_by_command("reaper.py"),
    "server": lambda job: processes_of(job, 0)[:1],
    "engine": lambda job: processes_of(job, 1)[1:2],
    "reward": find_by_command("mcore_rl.rewards.processes"),
}
DECK = [
    (number, name)
    for name in (*FATAL, *REPLACED)
    for number in (signal.SIGKILL, signal.SIGSTOP)
    if (number, name) != (signal.SIGSTOP, "driver")  # as a job suspended by its user
]


def deal_cases() -> dict[str, list[tuple[signal.Signals, str]]]:
    """Return ten cases for each loop: 30, so that each of the deck comes once at least."""
    draw = random.Random(0)
    deck = [*draw.sample(DECK, len(DECK)), *draw.sample(DECK, len(DECK))]
    return {mode: deck[10 * index : 10 * index + 10] for index, mode in enumerate(MODES)}


def start(start_job, settings, mode: str) -> Job:
    job = start_job(*settings, *RUN, f"trainer.mode={mode}")
    job.wait_until(lambda: len(steps(job)) >= 1, "a step")
    return job


def assert_end(job: Job, number: signal.Signals, name: str, pid: int, since: float) -> None:
    """Check an end by the death or stop of a process without which no run goes on."""
    status = job.process.wait(CALL_S + 60 - (time.monotonic() - since))
    assert status == (-signal.SIGKILL if name == "driver" else 1)
    assert_gone_soon(job)
    assert_whole(job)
    lines = [line for line in job.stderr.splitlines() if line.startswith("mcore-rl rl: ")]
    assert len(lines) == 1, job.stderr
    assert str(pid) in lines[0], lines[0]
    word = "stopped by a signal" if number == signal.SIGSTOP else "died"
    assert word in lines[0], lines[0]


def assert_continues(job: Job, number: signal.Signals, name: str, pid: int, since: float) -> None:
    """Check that a run goes on which has lost a process that can be replaced."""
    num_steps, server = 0, {"server": "rollout-0", "engine": "rollout-1"}.get(name, "")
    loss = re.compile(rf"{server}\.\w+: rank 0 .*It is started again")
    num_losses = len(loss.findall(job.stdout))

    def has_gone_on() -> bool:
        nonlocal num_steps
        if server and len(loss.findall(job.stdout)) == num_losses:
            return False
        num_steps = num_steps or len(steps(job))
        return len(steps(job)) > num_steps + 2

    while not has_gone_on():
        assert job.process.poll() is None, job.stderr
        assert time.monotonic() < since + CALL_S + 60, f"hangs:\n{job.stdout}{job.stderr}"
        time.sleep(0.2)
    if name == "reaper":
        assert f"the process {pid}, which cleans up" in job.stderr


@pytest.mark.parametrize("mode", MODES)
def test_a_run_ends_or_goes_on_in_time_when_any_process_is_killed_or_stopped(
    start_job, user_task_settings, mode
):
    draw, job, problems = random.Random(mode), None, []
    for number, name in deal_cases()[mode]:
        job = job or start(start_job, user_task_settings, mode)
        before = len(steps(job))
        job.wait_until(lambda job=job, least=before: len(steps(job)) > least, "a step")
        time.sleep(draw.random() * 2)
        find = (FATAL | REPLACED)[name]
        job.wait_until(lambda job=job, find=find: bool(find(job)), f"process of {name}")
        victims = find(job)
        victim = draw.choice(sorted(victims, key=lambda process: process.pid))
        victim.send_signal(number)
        case, since = f"{number.name} to {name} ({victim.pid})", time.monotonic()
        check = assert_end if name in FATAL else assert_continues
        try:
            check(job, number, name, victim.pid, since)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            problems.append(f"{case}: {error}")
        print(f"{mode}, {case}: {time.monotonic() - since:.0f} s, {job.process.poll()}", flush=True)
        if name in FATAL or (problems[-1:] and problems[-1].startswith(case)):
            job.process.kill()
            job = None
    if job is not None:
        job.process.terminate()
        assert job.process.wait(100) == 128 + signal.SIGTERM
        assert_gone_soon(job)
    assert not problems, "\n".join(problems)
