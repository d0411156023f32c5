"""However a job is ended, nothing of it is left, and nothing half-written."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.processes import lives
from tests.nightly import all_but

STEPS = ("trainer.num_steps=1000", "trainer.prompts_per_step=16", "trainer.eval_samples=16")
WARM_START = (*STEPS, "warm_start.num_steps=1000")
TRAINING = (
    *STEPS, "warm_start.num_steps=0", "warm_start.train_file=''", "actor.layout.tp=1",
    "actor.layout.ep=1", "weight_sync.method=full_export",
)  # fmt: skip
DISAGGREGATED = (
    *STEPS, "warm_start.num_steps=0", "warm_start.train_file=''", "actor.layout.tp=1",
    "actor.layout.ep=1",
    "weight_sync.method=disaggregated", "algorithm.kl_coef=0.001",
    "algorithm.filter.group_filter=''",
)  # fmt: skip
OWN_FUNCTIONS = (
    "algorithm.loss=examples.gspo:gspo", "algorithm.loss_settings.clip_ratio_low=0.1",
    "algorithm.advantage=tests/e2e/own_functions.py:first_token",
    "reward.terms.length.name=tests/e2e/own_functions.py:length", "reward.terms.length.weight=2",
    "reward.terms.length.settings.per_character=0.5", "reward.terms.math.weight=8",
    "reward.terms.overlong.settings.buffer_tokens=16", "reward.on_error=drop",
)  # fmt: skip


def metrics(job, output=None) -> list[dict]:
    """Read the metrics; every line must be complete. `output` is the job's, if elsewhere."""
    file = (output or job.output) / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def is_warm_starting(job) -> bool:
    return any("warm_start/loss" in row for row in metrics(job))


def steps(job, output=None) -> list[dict]:
    return [row for row in metrics(job, output) if "reward" in row]


def is_training(job, output=None) -> bool:
    return bool(steps(job, output))


def interrupt_an_export(job) -> None:
    """Write an export as a signal cuts it short; its own moment is too brief to meet."""
    aside = job.output / ".checkpoint.partial"
    aside.mkdir()
    (aside / "shard-1").write_bytes(b"half a te")


def assert_gone_soon(job, seconds=30) -> None:
    deadline = time.monotonic() + seconds  # a second, on a machine that has nothing else to do
    while left := job.left():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def assert_whole(job) -> None:
    """Check that what has been left can be read to the end."""
    metrics(job)
    for file in job.output.rglob("*.json"):
        json.loads(file.read_text())
    for file in job.output.rglob("*.safetensors"):
        safe_open(file, framework="np")  # checks the length


def assert_ended(job, number, word) -> None:
    """Check the end by a signal that can be handled."""
    assert job.process.wait() == 128 + number
    assert job.left() == []
    assert_whole(job)
    lines = job.stderr.splitlines()
    # A model that earns nothing yet has steps that teach nothing.
    assert [line for line in lines if "warning: step " not in line] == [f"mcore-rl rl: {word}"]


def assert_logs(job) -> None:
    """Check the logs of ranks, servers and Ray."""
    logs = job.output / "logs"
    assert {"actor-0.log", "rollout-0.log", "ray"} <= {path.name for path in logs.iterdir()}
    assert (logs / "ray" / "raylet.out").stat().st_size > 0


def test_a_killed_job_that_trains_leaves_nothing_but_its_logs(start_job, user_task_settings):
    # With servers on devices of their own and a reference model, until a second step.
    #
    # Loss, advantage and reward are files and modules of the folder that it is started in. The
    # reward `math` has processes of its own.
    job = start_job(*user_task_settings, *DISAGGREGATED, *OWN_FUNCTIONS)
    job.wait_until(lambda: len(steps(job)) >= 2, "the second step")
    assert len(job.processes) > 8
    interrupt_an_export(job)
    job.process.kill()
    assert job.process.wait() == -signal.SIGKILL
    assert_gone_soon(job)
    assert_whole(job)
    assert_logs(job)
    *_, line = job.stderr.splitlines()
    assert line.startswith("mcore-rl rl: the driver (process ") and " died" in line
    assert (job.output / "logs" / "error.txt").read_text().startswith("the driver (process ")
    for row in steps(job):
        assert 0 < row["max_logprob_gap"] <= 1e-4
        assert "actor/reference_kl" in row
        assert row["reward/length"] == pytest.approx(row["reward/length/characters"] / 2, rel=1e-5)
        terms = [row[f"reward/{name}"] for name in ("length", "math", "overlong")]
        total = 2 * terms[0] + 8 * terms[1] + terms[2]
        assert row["reward"] == pytest.approx(total, rel=1e-4)
        assert row["reward_errors"] == row["dropped"] == row["reward/math/unchecked"] == 0
        assert row["actor/ratio"] == pytest.approx(1, abs=0.05)
        assert "actor/approx_kl" not in row  # which is of ppo_clip


RAYS = {
    "gcs_server": "GCS",
    "raylet": "raylet",
    "ray::DashboardAgent": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime env agent",
}


@pytest.mark.nightly  # tests/unit/controller/test_process_cleanup.py has a driver without ranks
@pytest.mark.parametrize("name", RAYS)
def test_a_process_of_rays_that_is_killed_ends_the_job_with_one_true_line(
    start_job, user_task_settings, name
):
    job = start_job(*user_task_settings, *TRAINING)
    job.wait_until(lambda: is_training(job), "the first step")
    [victim] = [p for p in set(job.processes) if lives(p) and p.name().startswith(name)]
    killed = time.monotonic()
    victim.kill()
    assert job.process.wait(60) == 1
    assert_gone_soon(job)
    assert time.monotonic() - killed < 45  # not the minute of Ray's own limit
    assert_whole(job)
    # Ray's C++ code in the driver may have logged the raylet's end before the driver was gone.
    lines = [line for line in job.stderr.splitlines() if "core_worker.cc" not in line]
    lines = [line for line in lines if "warning: step " not in line]
    message = f"Ray's {RAYS[name]} (process {victim.pid}) has died, and the run with it"
    trace_file = job.output / "logs" / "error.txt"
    assert lines == [f"mcore-rl rl: {message} (more: {trace_file})"]
    assert trace_file.read_text().startswith(message)
    assert "rank 0" not in job.stdout and "It is started again" not in job.stdout


@pytest.mark.nightly  # tests/unit/jobs/test_output.py has how it is noticed
def test_a_job_whose_folder_is_deleted_ends_with_a_line_and_its_weights(
    start_job, user_task_settings
):
    job = start_job(*user_task_settings, *TRAINING)
    job.wait_until(lambda: is_training(job), "the first step")
    shutil.rmtree(job.output, ignore_errors=True)
    assert job.process.wait(100) == 1
    assert_gone_soon(job)
    *_, line = job.stderr.splitlines()
    assert "metrics.jsonl'; the weights are in " in line
    assert (Path(line.rpartition(" ")[2]) / "model.safetensors").is_file()


@pytest.mark.nightly
def test_of_two_jobs_that_train_the_killed_one_leaves_nothing_and_then_the_interrupted_one(
    start_job, user_task_settings
):
    killed, interrupted = (start_job(*user_task_settings, *TRAINING) for _ in range(2))
    for job in (killed, interrupted):
        job.wait_until(lambda job=job: is_training(job), "the first step")
        assert len(job.processes) >= 8  # five of Ray and its node, three ranks
        interrupt_an_export(job)
    killed.process.kill()
    assert killed.process.wait() == -signal.SIGKILL
    assert_gone_soon(killed)
    assert_whole(killed)
    assert_logs(killed)
    before = len(metrics(interrupted))
    interrupted.wait_until(lambda: len(metrics(interrupted)) > before, "another step")
    os.killpg(interrupted.process.pid, signal.SIGINT)  # as Ctrl-C: whatever is in the foreground
    assert_ended(interrupted, signal.SIGINT, "interrupted")
    assert_logs(interrupted)


@pytest.mark.parametrize(
    "number",
    all_but([signal.SIGHUP], [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]),
)
def test_a_job_that_is_ended_while_it_makes_its_task_leaves_no_half_of_it(start_job, number):
    job = start_job()
    job.wait_until((job.output / ".task.partial").exists, "the task")
    job.process.send_signal(number)
    if number != signal.SIGKILL:
        assert_ended(job, number, {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}[number])
    job.process.wait()
    assert_gone_soon(job)
    assert not (job.output / "config.json").exists()


def test_a_rank_that_dies_ends_the_job_with_one_line_and_a_file_of_traces(
    start_job, user_task_settings
):
    job = start_job(*user_task_settings, *WARM_START)
    job.wait_until(lambda: is_warm_starting(job), "the first step")
    rank = job.rank(0)
    rank.kill()
    assert job.process.wait() == 1
    assert job.left() == []
    assert_whole(job)
    trace_file = job.output / "logs" / "error.txt"
    who = f"rank 0 (host {socket.gethostname()}, pid {rank.pid})"
    assert job.stderr.startswith(f"mcore-rl rl: warm_start.update: {who} died.")
    assert job.stderr.endswith(f" (traceback: {trace_file})\n")
    assert job.stderr.count("\n") == 1
    assert "WorkerError" in trace_file.read_text()


@pytest.mark.nightly  # test_waits.py has ranks that are stopped, the test above how a job ends
def test_a_rank_that_is_stopped_ends_the_job_within_the_limit_with_its_stack(
    start_job, user_task_settings
):
    job = start_job(*user_task_settings, *WARM_START, "timeouts.call_s=25")
    job.wait_until(lambda: is_warm_starting(job), "the first step")
    rank = job.rank(1)
    rank.suspend()
    stopped = time.monotonic()
    assert job.process.wait() == 1
    assert time.monotonic() - stopped < 25 + 60 + 30  # the limit, the look at the ranks, the end
    assert job.left() == []
    assert_whole(job)
    who = f"rank 1 (host {socket.gethostname()}, pid {rank.pid})"
    assert job.stderr.startswith(
        f"mcore-rl rl: warm_start.update: {who} has not answered in 25 s (timeouts.call_s): "
        "stopped by a signal, in "
    )
    trace_file = job.output / "logs" / "error.txt"
    assert job.stderr.endswith(f" (traceback: {trace_file})\n")
    assert job.stderr.count("\n") == 1
    story = trace_file.read_text()
    assert "ModelWorker.update (" in story
    assert f"warm_start.update, {who}:" in story and "warm_start.update, rank 0 (" in story
    assert "died" not in story
