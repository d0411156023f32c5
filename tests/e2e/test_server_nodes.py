"""A run whose server has each worker on a node of its own, as far as vLLM can tell."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest

from tests.e2e.outcomes import timeless
from tests.e2e.processes import lives
from tests.e2e.test_kill import assert_gone_soon

pytestmark = [pytest.mark.job, pytest.mark.nightly]

SETTINGS = (
    "warm_start.num_steps=5", "trainer.eval_samples=8", "rollout.tp=2", "rollout.max_restarts=0",
)  # fmt: skip


def test_samples_and_losses_are_those_of_a_server_on_one_node(start_job):
    results = []
    for num_nodes in (1, 2):
        nodes = f"rollout.nodes_per_server={num_nodes}"
        job = start_job(*SETTINGS, nodes, "trainer.num_steps=2")
        assert job.process.wait(300) == 0, job.stderr
        results.append(timeless(job.output))
    assert results[0] == results[1]
    assert [row["step"] for row in results[0] if "reward" in row] == [1, 2]


def test_a_worker_of_the_second_node_that_dies_ends_the_run_with_its_rank(start_job):
    job = start_job(*SETTINGS, "rollout.nodes_per_server=2", "trainer.num_steps=1000")
    metrics = job.output / "metrics.jsonl"
    job.wait_until(lambda: metrics.exists() and "reward" in metrics.read_text(), "it trains")
    family = {p.pid: p for p in set(job.processes) if lives(p) and _prints_to(p, "rollout-1.log")}
    (worker,) = [p for p in family.values() if p.ppid() in family]
    worker.send_signal(signal.SIGKILL)
    assert job.process.wait(120) == 1
    assert re.search(r"rollout.*: rank [01] \(host .*died", job.stderr), job.stderr
    assert_gone_soon(job, 60)


def _prints_to(process: psutil.Process, log: str) -> bool:
    return os.path.realpath(f"/proc/{process.pid}/fd/2").endswith(f"/{log}")
