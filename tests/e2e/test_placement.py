"""A whole job on one pool of devices and on pools of their own: the same run, in less memory."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from mcore_rl.data.sample_tables import get_table_path
from tests.e2e.outcomes import timeless

pytestmark = pytest.mark.job

LOST = r"server 0 on host \S+ is lost: "
ROLES = ("actor", "critic", "reference", "rollout")
SETTINGS = (
    "warm_start.num_steps=0", "warm_start.train_file=''", "actor.layout.tp=1", "actor.layout.ep=1",
    "trainer.num_steps=2", "trainer.eval_samples=8", "trainer.prompts_per_step=24",
    "algorithm.kl_coef=0.01", "algorithm.num_mini_batches=1", "algorithm.filter.group_filter=''",
    "algorithm.advantage=gae", "algorithm.advantage_settings={}", "actor.optimizer.warmup_steps=0",
    "reward.name=tests/e2e/own_functions.py:fingerprint",
    # Much of a cache that sleeps while there is much of what an update needs, long enough to be
    # seen by a look every 4 s.
    "rollout.kv_cache_bytes=600000000", "actor.max_tokens_per_micro_batch=65536",
    "algorithm.loss_settings={}", "algorithm.loss=tests/e2e/own_functions.py:pausing_loss",
)  # fmt: skip


LOADING = {
    "shared": "dummy",
    "own": "checkpoint",
}  # of shared devices the trainer sends all weights
# 4.1 GB are usual with the build of torch for CUDA, 3.3 without.
MAX_SHARED_BYTES = 4_500_000_000


@pytest.fixture(scope="module")
def get_output(start_job, user_task_settings, tmp_path_factory) -> Iterator[Callable[[str], Path]]:
    """get_output(place) is the output of a run whose roles have that placement.

    Its ranks return memory at each turn, as they do where less than half of the memory is free.
    """

    @functools.cache
    def run(place: str) -> Path:
        pause = f"algorithm.loss_settings.file={tmp_path_factory.mktemp('pause') / place}"
        job = start_job(
            *user_task_settings, *SETTINGS, pause, f"rollout.load_format={LOADING[place]}",
            *(f"placement.{role}={place}" for role in ROLES),
        )  # fmt: skip
        assert job.process.wait(900) == 0, job.stderr
        output: Path = job.output
        return output

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
        yield run


def read_summary(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text())


def test_roles_that_take_turns_are_all_trained_in_less_memory_than_at_once(get_output):
    shared = get_output("shared")
    updates = [row for row in timeless(shared) if "actor/loss" in row]
    assert len(updates) == 2
    for row in updates:
        assert row["actor/grad_norm"] > 0 < row["critic/grad_norm"]
        assert row["actor/kl_loss"] >= 0 and row["max_logprob_gap"] <= 1e-4
    assert read_summary(shared)["peak_memory_bytes"] < MAX_SHARED_BYTES


@pytest.mark.nightly  # test_resume.py has a run with servers of their own to the digit
def test_samples_and_losses_are_the_same_to_the_digit_and_memory_is_not(get_output):
    outputs = {place: get_output(place) for place in LOADING}
    shared, separate = map(timeless, outputs.values())
    assert shared == separate
    summaries = {place: read_summary(output) for place, output in outputs.items()}
    for name in ("evaluation", "max_logprob_gap"):
        assert summaries["shared"][name] == summaries["own"][name]
    for step in (1, 2):
        tables = [pq.read_table(get_table_path(output, step)) for output in outputs.values()]
        assert tables[0].equals(tables[1])
    peaks = {place: summary["peak_memory_bytes"] for place, summary in summaries.items()}
    # The cache alone; 1.3 GB less are usual.
    assert peaks["shared"] < min(MAX_SHARED_BYTES, peaks["own"] - 600_000_000)
    assert peaks["own"] > MAX_SHARED_BYTES


PAUSES = {
    "generates": ("reward.name=tests/e2e/own_functions.py:pausing_reward", "reward.settings.file"),
    "trains": (
        "algorithm.loss=tests/e2e/own_functions.py:pausing_loss", "algorithm.loss_settings.file",
    ),
    "pushes": (
        "algorithm.loss=tests/e2e/own_functions.py:loss_before_a_pausing_push",
        "algorithm.loss_settings.file",
    ),
}  # fmt: skip


@pytest.mark.nightly  # test_waits.py and test_server_pool.py have the calls that end of a death
@pytest.mark.parametrize(
    ("while_it", "victim", "message"),
    [
        ("trains", "engine", rf"{LOST}rollout\.wake: rank 0 \(host .* died"),
        ("trains", "actor", r"actor\.update: rank 0 \(host .* died"),
        ("generates", "engine", rf"{LOST}rollout\.collect: rank 0 \(host .* died"),
        ("generates", "actor", r"actor\.apply: rank 0 \(host .* died"),
        ("pushes", "actor", r"actor\.send_weights: rank 0 \(host .* died"),
        ("pushes", "engine", rf"{LOST}rollout\.receive_weights: rank 0 \(host .* died"),
    ],
)
def test_what_is_killed_in_its_turn_or_away_ends_the_job_with_one_line_and_leaves_nothing(
    start_job, user_task_settings, tmp_path, while_it, victim, message
):
    paused, (function, setting) = tmp_path / "paused", PAUSES[while_it]
    job = start_job(
        *user_task_settings, "warm_start.num_steps=0", "warm_start.train_file=''",
        "trainer.num_steps=2", "trainer.eval_samples=4", "trainer.prompts_per_step=4",
        "actor.layout.tp=1", "actor.layout.ep=1", "actor.optimizer.warmup_steps=0",
        "algorithm.num_mini_batches=1", "weight_sync.bucket_bytes=2097152",
        "algorithm.filter.group_filter=''", "algorithm.advantage_settings={}",
        "algorithm.loss_settings={}", function, f"{setting}={paused}", "rollout.max_restarts=0",
    )  # fmt: skip
    job.wait_until(paused.exists, f"a job that {while_it}")
    started = psutil.Process(job.process.pid).children(recursive=True)
    (process,) = [p for p in started if _is(p, victim)]
    process.kill()
    assert job.process.wait(120) == 1
    assert job.left() == []
    assert re.search(f"(?m)^mcore-rl rl: {message}", job.stderr), job.stderr
    assert len(re.findall("(?m)^mcore-rl rl: ", job.stderr)) == 1


def _is(process: psutil.Process, victim: str) -> bool:
    """Rank 0 of the actor, or the engine that the server has forked: by the logs they write."""
    log = "rollout-0.log" if victim == "engine" else "actor-0.log"
    try:
        pids = [process.pid, process.ppid()] if victim == "engine" else [process.pid]
        return all(os.path.realpath(f"/proc/{pid}/fd/1").endswith(log) for pid in pids)
    except (psutil.Error, OSError):
        return False
