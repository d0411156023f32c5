"""Runs whose servers are killed: they go on, and train on the samples that they would have had."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.data.sample_tables import list_tables
from tests.e2e.processes import processes_of
from tests.e2e.test_kill import assert_gone_soon, steps

SETTINGS = (
    "warm_start.num_steps=0", "warm_start.train_file=''", "actor.layout.tp=1", "actor.layout.ep=1",
    "actor.optimizer.warmup_steps=0", "algorithm.filter.group_filter=''",
    "algorithm.advantage_settings={}", "evaluation.before=false", "trainer.eval_samples=4",
    "trainer.prompts_per_step=8", "rollout.num_servers=2", "rollout.max_restarts=100",
    "placement.rollout=own", "weight_sync.method=disaggregated",
)  # fmt: skip


def samples_of(output: Path, step: int) -> list[tuple[int, ...]]:
    """Return ids and rewards."""
    table = pq.read_table(output / "samples" / f"step_{step:06d}.parquet")
    names = ["group", "trajectory", "response_ids", "reward"]
    return sorted(map(str, zip(*(table[name].to_pylist() for name in names), strict=True)))


@pytest.fixture(scope="module")
def job_settings(user_task_settings, tmp_path_factory) -> tuple[list[str], Path]:
    """Return settings of three steps; when the file appears, server 1 generates for seconds."""
    paused = tmp_path_factory.mktemp("pause") / "paused"
    overrides = (
        "trainer.num_steps=3", "reward.settings.after=40", f"reward.settings.file={paused}",
        "reward.settings.log=rollout-1-0.log",
        "reward.name=tests/e2e/own_functions.py:later_pausing_reward",
    )  # fmt: skip
    return [*user_task_settings, *SETTINGS, *overrides], paused


@pytest.fixture(scope="module")
def undisturbed(start_job, job_settings) -> Path:
    """Return the output of such a run, of one server."""
    settings, paused = job_settings
    paused.touch()
    job = start_job(*settings, "rollout.num_servers=1")
    assert job.process.wait(300) == 0, job.stderr
    paused.unlink()
    return job.output


@pytest.mark.nightly  # test_resume.py has such a run of a server's actor
@pytest.mark.parametrize(("place", "name"), [(0, "actor"), (1, "engine")])
def test_a_server_killed_in_mid_generation_changes_no_sample(
    start_job, job_settings, undisturbed, place, name
):
    """Nor does it that servers start without weights."""
    settings, paused = job_settings
    paused.unlink(missing_ok=True)
    job = start_job(*settings, "rollout.load_format=dummy")
    job.wait_until(paused.exists, "the second step generates")
    processes_of(job, 1)[place].kill()
    assert job.process.wait(300) == 0, job.stderr
    assert "rollout-1.collect: rank 0" in job.stdout
    assert "It is started again: 1, rollout.max_restarts=100" in job.stdout
    for step in (1, 2, 3):
        assert samples_of(job.output, step) == samples_of(undisturbed, step)
    assert_gone_soon(job)


@pytest.mark.nightly  # tests/unit/trainers/test_one_step_off.py has when weights can be sent again
def test_all_servers_killed_where_the_actor_has_their_weights_get_these_again(
    start_job, job_settings, undisturbed
):
    """While the second step generates, as without staleness no trainer works beside that."""
    settings, paused = job_settings
    paused.unlink(missing_ok=True)
    job = start_job(*settings, "trainer.mode=one_step_off", "trainer.staleness=0")
    job.wait_until(paused.exists, "the second step generates")
    for server in (0, 1):
        processes_of(job, server)[0].kill()
    assert job.process.wait(300) == 0, job.stderr
    assert job.stdout.count("It is started again: 1, rollout.max_restarts=100") == 2
    for step in (1, 2, 3):
        assert samples_of(job.output, step) == samples_of(undisturbed, step)
    assert_gone_soon(job)


@pytest.mark.nightly
@pytest.mark.parametrize(("server", "place"), [(0, 0), (1, 1)], ids=["actor", "engine"])
def test_a_server_killed_in_a_transfer_does_not_end_the_run(
    start_job, user_task_settings, tmp_path, server, place
):
    # The weights go to the other one, with a connection of those that are left.
    paused = tmp_path / "paused"
    job = start_job(
        *user_task_settings, *SETTINGS, "trainer.num_steps=3", "weight_sync.timeout_s=30",
        "algorithm.loss=tests/e2e/own_functions.py:loss_before_a_pausing_transfer",
        "algorithm.loss_settings={}", f"algorithm.loss_settings.file={paused}",
    )  # fmt: skip
    job.wait_until(paused.exists, "a push")
    processes_of(job, server)[place].kill()
    assert job.process.wait(300) == 0, job.stderr
    assert f"rollout-{server}.receive_weights: rank 0" in job.stdout
    assert len(steps(job)) == 3
    assert_gone_soon(job)


@pytest.mark.nightly  # tests/unit/inference/test_processes.py has how it is noticed
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
@pytest.mark.parametrize("place", [0, 1], ids=["actor", "engine"])
def test_a_server_that_is_stopped_is_started_again_as_one_that_was_killed(
    start_job, user_task_settings, mode, place
):
    job = start_job(
        *user_task_settings, *SETTINGS, f"trainer.mode={mode}", "trainer.num_steps=10000",
        "weight_sync.timeout_s=30", "timeouts.call_s=30",
    )  # fmt: skip
    job.wait_until(lambda: len(steps(job)) >= 2, "two steps")
    processes_of(job, 1)[place].suspend()
    job.wait_until(lambda: "rollout-1 is up again" in job.stdout, "server 1 again")
    last = len(steps(job)) + 2
    job.wait_until(lambda: len(steps(job)) >= last, "two more steps")
    assert "stopped by a signal" in job.stdout
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(100) == 128 + signal.SIGINT
    assert_gone_soon(job)


PLACED = {
    "own": ["placement.rollout=own", "weight_sync.method=disaggregated"],
    "shared": ["placement.rollout=shared", "weight_sync.method=colocated", "actor.layout.dp=2"],
    "fully_async": ["placement.rollout=own", "trainer.mode=fully_async"],
}


@pytest.mark.nightly  # test_server_pool.py has servers that leave and join while groups run
@pytest.mark.parametrize("placed", PLACED)
def test_a_server_leaves_and_joins_a_run_that_goes_on(start_job, user_task_settings, placed):
    job = start_job(*user_task_settings, *SETTINGS, *PLACED[placed], "trainer.num_steps=10000")

    def change_servers(change: str, message: str) -> None:
        command = [sys.executable, "-m", "mcore_rl.cli.main", "servers", str(job.output)]
        subprocess.run([*command, change, "1"], check=True, timeout=60)
        job.wait_until(lambda: message in job.stdout, message)

    def two_more_steps() -> None:
        last = len(steps(job)) + 2
        job.wait_until(lambda: len(steps(job)) >= last, f"step {last}")

    two_more_steps()
    change_servers("--remove", "rollout-1 has left, as is wanted")
    job.wait_until(lambda: not processes_of(job, 1), "server 1 is gone")
    two_more_steps()
    change_servers("--add", "rollout-1 is started, as is wanted")
    job.wait_until(lambda: processes_of(job, 1), "server 1")
    two_more_steps()
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(100) == 128 + signal.SIGINT
    assert "rollout-1 died" not in job.stdout
    assert_gone_soon(job)


def killed(job, times: int) -> list[dict[str, list]]:
    """Kill `times` processes of a run's servers at any moment; return the tables of its steps.

    One at a time, of the actors and engines of two servers. It goes on for 3 steps after the last.
    """
    draw = random.Random(0)
    for number in range(times):
        job.wait_until(
            lambda killed=number: job.stdout.count("is up again") == killed, "it is up again"
        )
        before = len(steps(job))
        job.wait_until(lambda before=before: len(steps(job)) > before + 1, "two more steps")
        time.sleep(draw.random() * 3)
        draw.choice(processes_of(job, draw.randrange(2))).kill()
    job.wait_until(lambda: job.stdout.count("is up again") == times, "all are up again")
    return tables_at_the_end(job)


def tables_at_the_end(job) -> list[dict[str, list]]:
    """Return the tables of steps up to the third from now, and end the run."""
    last = len(steps(job)) + 3
    job.wait_until(lambda: len(steps(job)) >= last, "it goes on")
    tables = list_tables(job.output)
    assert [*tables][:last] == [*range(1, last + 1)]
    rows = [pq.read_table(tables[step]).to_pydict() for step in range(1, last + 1)]
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(100) == 128 + signal.SIGINT
    assert_gone_soon(job)
    return rows


def assert_whole_groups(table: dict[str, list], num_groups: int = 8) -> list[int]:
    """Return the ids of groups; each must have its 8 trajectories."""
    groups = Counter(table["group"])
    assert len(groups) == num_groups and set(groups.values()) == {8}
    assert len({*zip(table["group"], table["trajectory"], strict=True)}) == 8 * num_groups
    return sorted(groups)


def assert_each_step_has_its_own(tables: list[dict[str, list]], age: int = 0) -> None:
    """Check that each group comes once, complete, with the version that is `age` steps old."""
    for step, table in enumerate(tables, 1):
        assert assert_whole_groups(table) == list(range(8 * (step - 1), 8 * step))
        assert {v for row in table["weight_versions"] for v in row} == {max(step - 1 - age, 0)}


def assert_each_group_is_trained_once_and_in_time(tables, staleness: int) -> None:
    trained = [group for table in tables for group in assert_whole_groups(table)]
    assert len(set(trained)) == len(trained)
    # Groups are begun by number, and none that a step has left is left by `staleness` later ones.
    assert set(range(8 * (len(tables) - staleness))) <= set(trained)
    for step, table in enumerate(tables, 1):
        versions = {v for row in table["weight_versions"] for v in row}
        assert versions <= set(range(step - 1 - staleness, step))


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["disaggregated", "full_export"])
def test_twenty_kills_at_any_moment_lose_no_sample_and_serve_no_old_weights(
    start_job, user_task_settings, method
):
    sync = f"weight_sync.method={method}", "weight_sync.timeout_s=30"
    job = start_job(*user_task_settings, *SETTINGS, "trainer.num_steps=10000", *sync)
    assert_each_step_has_its_own(killed(job, 20))


@pytest.mark.nightly
def test_kills_of_one_of_two_servers_beside_a_trainer_lose_no_sample_and_serve_no_old_weights(
    start_job, user_task_settings
):
    # Each after two steps or more: a server that is started again has other weights.
    mode = "trainer.mode=one_step_off", "weight_sync.timeout_s=30"
    job = start_job(*user_task_settings, *SETTINGS, "trainer.num_steps=10000", *mode)
    assert_each_step_has_its_own(killed(job, 3), age=1)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["colocated", "full_export"])
def test_kills_of_servers_on_shared_devices_lose_no_sample_and_serve_no_old_weights(
    start_job, user_task_settings, method
):
    # Those that join start while the actor is off the devices.
    shared = (
        "placement.rollout=shared", "actor.layout.dp=2", f"weight_sync.method={method}",
        "weight_sync.timeout_s=30",
    )  # fmt: skip
    job = start_job(*user_task_settings, *SETTINGS, *shared, "trainer.num_steps=10000")
    assert_each_step_has_its_own(killed(job, 2))


@pytest.mark.nightly
def test_kills_of_servers_that_generate_all_the_time_lose_no_group_and_leave_no_old_token(
    start_job, user_task_settings
):
    # Pushes come in the middle of responses; what a dead server had begun keeps its bound.
    staleness = 2
    job = start_job(
        *user_task_settings, *SETTINGS, "trainer.mode=fully_async", "trainer.num_steps=10000",
        f"trainer.staleness={staleness}", "trainer.asynchronous.max_groups=6",
        "weight_sync.timeout_s=30",
    )  # fmt: skip
    tables = killed(job, 6)
    assert_each_group_is_trained_once_and_in_time(tables, staleness)
    rows = [set(row) for table in tables for row in table["weight_versions"]]
    assert any(len(row) > 1 for row in rows)
