"""Whole jobs whose servers generate all the time, and take weights in the middle of responses."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.data.sample_tables import list_tables
from tests.e2e.outcomes import rows_of
from tests.e2e.test_one_step_off import SETTINGS
from tests.e2e.test_resume import assert_the_same_run, ended, kill_and_resume
from tests.nightly import nightly

pytestmark = pytest.mark.job

NUM_STEPS, STALENESS = 4, 2
ASYNC = (
    "trainer.mode=fully_async", f"trainer.staleness={STALENESS}",
    f"trainer.num_steps={NUM_STEPS}", "algorithm.filter.group_filter=''",
    "evaluation.every=2",
)  # fmt: skip
FEW = "trainer.asynchronous.max_groups=6"  # a push finds some in the middle
MORE = "trainer.asynchronous.oversampling=0.5"  # some of which are too old before they have ended
REPLAY = "actor.moe.router_replay=rollout"  # test_recorded_experts.py: whose experts they are


def trained(output: Path) -> list[dict[str, float]]:
    return [row for row in rows_of(output) if "reward" in row]


def groups_of(output: Path) -> list[int]:
    """Return the groups that were trained on, step after step, by the sample log."""
    tables = [
        pq.read_table(table).column("group").to_pylist() for table in list_tables(output).values()
    ]
    return [group for groups in tables for group in sorted(set(groups))]


@pytest.mark.parametrize(
    ("rollout", "groups", "replay"),
    [("own", FEW, (REPLAY,)), nightly(("shared", MORE, ())), nightly(("shared", MORE, (REPLAY,)))],
)
def test_tokens_of_several_versions_are_trained_on_and_none_is_too_old(
    start_job, user_task_settings, rollout, groups, replay
):
    # On devices of their own, and on the trainer's by turns; with an evaluation meanwhile.
    overrides = *SETTINGS, *ASYNC, *replay, groups, f"placement.rollout={rollout}"
    output = ended(start_job(*user_task_settings, *overrides))
    rows = trained(output)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    ages = [row["samples/age"] for row in rows]
    assert ages[0] == 0 < max(ages) and max(ages) <= STALENESS
    assert "max_logprob_gap" in rows[0]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert all(0 < row["correction/weight_mean"] < 2 for row in rows)
    assert rows[-1]["queue/trained_total"] == 8 * (NUM_STEPS - 1)
    assert all(row["time/servers_idle_s"] >= 0 for row in rows)
    assert any("eval/test/reward" in row for row in rows[:-1])


@pytest.mark.nightly  # tests/unit/trainers/test_fully_async.py has a run that goes on
def test_a_run_that_is_killed_and_goes_on_trains_on_each_prompt_once(
    start_job, user_task_settings, tmp_path
):
    overrides = *user_task_settings, *SETTINGS, *ASYNC, FEW
    output = kill_and_resume(start_job, tmp_path / "run", NUM_STEPS, *overrides)
    assert [row["step"] for row in trained(output)] == list(range(1, NUM_STEPS + 1))
    assert sorted(groups_of(output)) == list(range(8 * NUM_STEPS))
    assert all(row["samples/age"] <= STALENESS for row in trained(output))


@pytest.mark.nightly  # test_router_replay.py has the samples of a resumed run, in its process
def test_a_killed_run_of_staleness_0_that_replays_routing_is_the_undisturbed_one(
    start_job, user_task_settings, tmp_path
):
    # Each token is of the version that is trained, so that a resumed run has the same tokens, with
    # the same experts.
    overrides = *user_task_settings, *SETTINGS, *ASYNC, "trainer.staleness=0", REPLAY
    expected = ended(start_job(*overrides))
    output = kill_and_resume(start_job, tmp_path / "run", NUM_STEPS, *overrides)
    assert_the_same_run(output, expected, NUM_STEPS)
