"""A run over several nodes of Ray, one of which dies: it goes on, and one that comes is used."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator

import psutil
import pyarrow.parquet as pq
import pytest
from ray.cluster_utils import Cluster

from mcore_rl.controller.ray_patches import HEALTH_CONFIG, RAY_CONFIG, skip_node_services
from mcore_rl.data.sample_tables import list_tables
from tests.e2e.processes import lives
from tests.e2e.test_kill import steps
from tests.e2e.test_server_deaths import (
    SETTINGS,
    assert_each_group_is_trained_once_and_in_time,
    assert_each_step_has_its_own,
    tables_at_the_end,
)

pytestmark = [pytest.mark.job, pytest.mark.nightly]

STORE = {"object_store_memory": 200 << 20}
DEVICE = {"num_cpus": 1, "resources": {"rank": 1}}
STALENESS = 2
ASYNCHRONOUS = (
    "trainer.mode=fully_async", f"trainer.staleness={STALENESS}",
    "trainer.asynchronous.max_groups=6",
)  # fmt: skip


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """That jobs join: the driver's, and three with a device each."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": RAY_CONFIG | HEALTH_CONFIG}
    with skip_node_services():
        cluster = Cluster(True, head_node_args=head | STORE)
        try:
            for _ in range(3):
                cluster.add_node(**DEVICE, **STORE)
            monkeypatch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()


def kill_node_of(log: str) -> None:
    """Kill the raylet of the worker with that log, and all that has descended from it."""
    everything = psutil.Process().children(recursive=True)
    worker = next(process for process in everything if _writes(process, log))
    raylet = next(process for process in worker.parents() if process.name() == "raylet")
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _writes(process: psutil.Process, log: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.realpath(f"/proc/{process.pid}/fd/2").endswith(f"/{log}") and lives(process)
    return False


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_node_that_dies_loses_no_sample_and_another_takes_its_place(
    nodes, start_job, user_task_settings, mode
):
    settings = ASYNCHRONOUS if mode == "fully_async" else ()
    job = start_job(
        *user_task_settings, *SETTINGS, *settings, "trainer.num_steps=10000",
        "weight_sync.timeout_s=30",
    )  # fmt: skip
    job.wait_until(lambda: len(steps(job)) > 1, "it trains")
    kill_node_of("rollout-1-0.log")
    before = len(steps(job))
    job.wait_until(lambda: len(steps(job)) > before + 4, "it goes on with a server less")
    assert "It is started again: 1," in job.stdout and "is up again" not in job.stdout
    nodes.add_node(**DEVICE, **STORE)
    job.wait_until(lambda: "rollout-1 is up again" in job.stdout, "another node")
    tables = tables_at_the_end(job)
    if mode == "sync":
        assert_each_step_has_its_own(tables)
    else:
        assert_each_group_is_trained_once_and_in_time(tables, STALENESS)


def test_a_node_that_has_just_died_with_samples_is_missed_before_a_step_trains_on_them(
    nodes, start_job, user_task_settings, tmp_path
):
    # One server still generates for a second when the other's node dies; Ray needs five.
    paused = tmp_path / "paused"
    job = start_job(
        *user_task_settings, *SETTINGS, "trainer.num_steps=3",
        "reward.name=tests/e2e/own_functions.py:later_pausing_reward", "reward.settings.after=40",
        f"reward.settings.file={paused}", "reward.settings.log=rollout-0-0.log",
        "reward.settings.seconds=5",
    )  # fmt: skip
    job.wait_until(paused.exists, "the second step generates")
    time.sleep(4)  # the other has long ended its groups
    kill_node_of("rollout-1-0.log")
    assert job.process.wait(300) == 0, job.stderr
    assert re.search(r"\d groups of samples died with their node", job.stdout), job.stdout
    assert_each_step_has_its_own(
        [pq.read_table(table).to_pydict() for table in list_tables(job.output).values()]
    )
