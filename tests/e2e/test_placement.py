"""A whole job on one pool of devices and on pools of their own: the same run, in less memory."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.job

ROLES = ("actor", "reference", "rollout")
SETTINGS = (
    "warm_start.num_steps=60", "trainer.num_steps=2", "trainer.eval_samples=8",
    "algorithm.kl_coef=0.01", "algorithm.num_mini_batches=1",
    # Much of a cache that sleeps while there is much of what an update needs.
    "rollout.kv_cache_bytes=600000000", "actor.max_tokens_per_micro_batch=65536",
)  # fmt: skip


@pytest.fixture(scope="module")
def outputs(start_job) -> dict[str, tuple[list[dict[str, float]], dict[str, float]]]:
    """Metrics and summary, by where the roles are."""
    found = {}
    for place in ("shared", "own"):
        job = start_job(*SETTINGS, *(f"placement.{role}={place}" for role in ROLES))
        assert job.process.wait(300) == 0, job.stderr
        lines = (job.output / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((job.output / "summary.json").read_text())
        found[place] = [json.loads(line) for line in lines], summary
    return found


def test_samples_and_losses_are_the_same_to_the_digit(outputs):
    def timeless(place: str) -> list[dict[str, float]]:
        clocks = ("time/", "tokens_per_s", "wall_time_s")
        rows, _ = outputs[place]
        return [{n: v for n, v in row.items() if not n.startswith(clocks)} for row in rows]

    assert timeless("shared") == timeless("own")
    updates = [row for row in timeless("shared") if "actor/loss" in row]
    assert len(updates) == 2
    assert all(row["actor/grad_norm"] > 0 for row in updates)
    for name in ("accuracy_warm_start", "accuracy_grpo", "max_logprob_gap", "example"):
        assert outputs["shared"][1][name] == outputs["own"][1][name]


def test_roles_that_take_turns_need_less_memory(outputs):
    shared, own = (summary["peak_memory_bytes"] for _, summary in outputs.values())
    assert shared < own - (100 << 20)
