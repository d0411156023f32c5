"""A whole job on one pool of devices and on pools of their own: the same run, in less memory."""

from __future__ import annotations

import json
import os
import re

import psutil
import pytest

from tests.e2e.outcomes import timeless
from tests.nightly import all_but

pytestmark = pytest.mark.job

ROLES = ("actor", "reference", "rollout")
SETTINGS = (
    "warm_start.num_steps=10", "trainer.num_steps=2", "trainer.eval_samples=8",
    "algorithm.kl_coef=0.01", "algorithm.num_mini_batches=1",
    "reward.name=tests/e2e/own_functions.py:fingerprint",
    # Much of a cache that sleeps while there is much of what an update needs, long enough to be
    # seen by a look every 4 s.
    "rollout.kv_cache_bytes=600000000", "actor.max_tokens_per_micro_batch=65536",
    "algorithm.loss_settings={}", "algorithm.loss=tests/e2e/own_functions.py:pausing_loss",
)  # fmt: skip


@pytest.fixture(scope="module")
def outputs(
    start_job, tmp_path_factory
) -> dict[str, tuple[list[dict[str, float]], dict[str, float]]]:
    """Return metrics and summary by placement of the roles.

    On shared devices servers read no checkpoint: the trainer sends the first weights, too.
    """
    results = {}
    for place, loading in (("shared", "dummy"), ("own", "checkpoint")):
        pause = f"algorithm.loss_settings.file={tmp_path_factory.mktemp('pause') / place}"
        job = start_job(
            *SETTINGS, pause, f"rollout.load_format={loading}",
            *(f"placement.{role}={place}" for role in ROLES),
        )  # fmt: skip
        assert job.process.wait(900) == 0, job.stderr
        summary = json.loads((job.output / "summary.json").read_text())
        results[place] = timeless(job.output), summary
    return results


def test_samples_and_losses_are_the_same_to_the_digit(outputs):
    assert outputs["shared"][0] == outputs["own"][0]
    updates = [row for row in outputs["shared"][0] if "actor/loss" in row]
    assert len(updates) == 2
    assert all(row["actor/grad_norm"] > 0 for row in updates)
    for name in ("evaluation", "max_logprob_gap", "example"):
        assert outputs["shared"][1][name] == outputs["own"][1][name]


def test_roles_that_take_turns_need_less_memory(outputs):
    shared, separate = (summary["peak_memory_bytes"] for _, summary in outputs.values())
    assert shared < separate - 600_000_000  # the cache alone; 1.4 GB less were found


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


@pytest.mark.parametrize(
    ("while_it", "victim", "message"),
    all_but(
        [
            ("pushes", "engine", r"rollout\.receive_weights: rank 0 \(host .* died"),
        ],
        [
            ("trains", "engine", r"rollout\.wake: rank 0 \(host .* died"),
            ("trains", "actor", r"actor\.update: rank 0 \(host .* died"),
            ("generates", "engine", r"rollout\.collect: rank 0 \(host .* died"),
            ("generates", "actor", r"actor\.apply: rank 0 \(host .* died"),
            ("pushes", "actor", r"actor\.send_weights: rank 0 \(host .* died"),
            ("pushes", "engine", r"rollout\.receive_weights: rank 0 \(host .* died"),
        ],
    ),
)
def test_what_is_killed_in_its_turn_or_away_ends_the_job_with_one_line_and_leaves_nothing(
    start_job, own_model_and_data, tmp_path, while_it, victim, message
):
    paused, (function, setting) = tmp_path / "paused", PAUSES[while_it]
    job = start_job(
        *own_model_and_data, "warm_start.num_steps=0", "warm_start.train_file=''",
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
