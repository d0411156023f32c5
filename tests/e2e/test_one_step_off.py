"""Whole jobs that train one step off: as the synchronous one does, or one version older."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.outcomes import list_gaps, rows_of, timeless
from tests.e2e.test_kill import steps
from tests.e2e.test_placement import _is
from tests.e2e.test_resume import assert_the_same_run, ended, kill_and_resume

pytestmark = pytest.mark.job

SETTINGS = (
    "warm_start.num_steps=0", "warm_start.train_file=''", "trainer.eval_samples=8",
    "trainer.prompts_per_step=8", "actor.layout.tp=1", "actor.layout.ep=1",
    "actor.optimizer.warmup_steps=1", "actor.optimizer.lr=1e-3",
    "reward.name=tests/e2e/own_functions.py:fingerprint",
)  # fmt: skip
# Rounds of generation for each step, and samples of earlier steps.
ROUNDS = (
    "algorithm.filter.max_rounds=2", "algorithm.filter.prompts_per_round=4",
    "algorithm.filter.replay.share=0.25", "algorithm.filter.replay.max_age=3",
)  # fmt: skip
WITHOUT_FILTER = ("algorithm.filter.group_filter=''", "trainer.num_steps=3")
NUM_STEPS = 5


def finished(start_job, *settings: str) -> list[dict[str, float]]:
    return [row for row in timeless(ended(start_job(*SETTINGS, *settings))) if "reward" in row]


@pytest.fixture(scope="module")
def undisturbed(start_job, user_task_settings) -> Path:
    """Run with two mini-batches a step, so that the second is off the policy in any mode."""
    overrides = (*user_task_settings, *SETTINGS, *ROUNDS, f"trainer.num_steps={NUM_STEPS}")
    return ended(start_job(*overrides, "trainer.mode=one_step_off"))


@pytest.fixture(scope="module")
def sync(start_job, user_task_settings) -> list[dict[str, float]]:
    return finished(start_job, *user_task_settings, *WITHOUT_FILTER)


@pytest.mark.nightly  # tests/unit/trainers has it of both modes
@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_staleness_0_is_the_synchronous_run_to_the_digit(start_job, user_task_settings, sync, mode):
    # Samples, rewards, losses, gradients, gaps.
    overrides = (*user_task_settings, *WITHOUT_FILTER, "trainer.staleness=0")
    metrics = finished(start_job, *overrides, f"trainer.mode={mode}")
    assert [{n: v for n, v in row.items() if not n.startswith("queue/")} for row in metrics] == sync
    assert len({row["reward/fingerprint"] for row in sync}) == 3
    assert all(row["actor/grad_norm"] > 0 and "max_logprob_gap" in row for row in sync)


def test_no_token_is_more_than_one_version_old(undisturbed):
    # The gaps of log-probs, of the first step alone, are those of one policy in two engines.
    rows = [row for row in rows_of(undisturbed) if "reward" in row]
    assert [row["samples/age"] for row in rows] == [0, 1, 1, 1, 1]
    assert ["max_logprob_gap" in row for row in rows] == [True] + [False] * (NUM_STEPS - 1)
    drift = [row["mismatch/k3_kl"] for row in rows]
    assert drift[0] < 1e-6 and min(drift[1:]) > 10 * drift[0]
    assert all(0 < row["correction/weight_mean"] < 2 for row in rows)
    waits = [(row["time/generate_s"], row["time/servers_idle_s"]) for row in rows]
    assert all(min(pair) >= 0 for pair in waits)


@pytest.mark.nightly  # tests/e2e/test_resume.py has a run that is synchronous, each change
def test_a_run_that_is_killed_and_goes_on_is_the_undisturbed_one(
    start_job, user_task_settings, undisturbed, tmp_path
):
    # It trains on the samples that were ahead, and draws the prompts that would have come next.
    overrides = (*user_task_settings, *SETTINGS, *ROUNDS, f"trainer.num_steps={NUM_STEPS}")
    overrides += ("trainer.mode=one_step_off",)
    output = kill_and_resume(start_job, tmp_path / "run", NUM_STEPS, *overrides)
    assert_the_same_run(output, undisturbed, NUM_STEPS)


@pytest.mark.nightly  # test_router_replay.py restores the columns, in its process
def test_a_killed_run_that_replays_routing_goes_on_in_other_pipeline_ranks(
    start_job, user_task_settings, tmp_path
):
    # The samples ahead bring the experts of the servers, by layer.
    overrides = (
        *user_task_settings, *SETTINGS, "trainer.mode=one_step_off",
        f"trainer.num_steps={NUM_STEPS}", "algorithm.filter.group_filter=''",
        "actor.moe.router_replay=rollout",
        # Else the rounding of gradients near 0 decides the sign of Adam's step.
        "actor.optimizer.eps=1e-3",
    )  # fmt: skip
    expected = ended(start_job(*overrides))
    layout = "actor.layout.pp=2", "actor.layout.first_stage_layers=1"
    output = kill_and_resume(start_job, tmp_path / "run", NUM_STEPS, *overrides, resumed=layout)
    rows, expected_rows = (
        [row for row in timeless(folder) if "reward" in row] for folder in (output, expected)
    )
    gaps = list_gaps(rows, expected_rows)
    assert len(gaps) > 20 and gaps["reward/fingerprint"] == 0  # the same samples
    gaps.pop("max_logprob_gap", None)  # the largest of some thousand roundings
    assert max(gaps.values()) < 1e-5, sorted(gaps.items(), key=lambda gap: -gap[1])[:5]


@pytest.mark.nightly  # test_server_deaths.py has a server that comes back, test_kill.py a rank
@pytest.mark.parametrize(
    ("victim", "message"),
    [("servers", ""), ("actor", r"actor\.\w+: rank 0 \(host .* died")],
)
def test_of_what_dies_while_samples_are_generated_ahead_servers_come_back_and_others_end_the_job(
    start_job, user_task_settings, tmp_path, victim, message
):
    # The samples of the second step, while the first is trained on.
    paused, function = tmp_path / "paused", "tests/e2e/own_functions.py:later_pausing_reward"
    job = start_job(
        *user_task_settings, *SETTINGS, "trainer.mode=one_step_off", "trainer.num_steps=3",
        "evaluation.before=false", "algorithm.filter.group_filter=''", f"reward.name={function}",
        f"reward.settings.file={paused}", "reward.settings.after=64",
        "reward.settings.log=rollout-0.log",
    )  # fmt: skip
    job.wait_until(paused.exists, "samples of the second step")
    [process] = [
        p for p in set(job.processes) if _is(p, "actor" if victim == "actor" else "engine")
    ]
    (process if victim == "actor" else process.parent()).kill()
    assert job.process.wait(240) == (1 if message else 0)
    assert job.left() == []
    assert len(steps(job)) == (0 if message else 3)
    if not message:
        return
    assert re.search(f"(?m)^mcore-rl rl: {message}", job.stderr), job.stderr
    assert len(re.findall("(?m)^mcore-rl rl: ", job.stderr)) == 1
