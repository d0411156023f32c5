"""A run that chooses its samples: it goes on as if it had never ended."""

from __future__ import annotations

import pytest

from tests.e2e.outcomes import rows_of
from tests.e2e.test_resume import LORA, ONE_RANK, assert_the_same_run, ended, settings

pytestmark = pytest.mark.job

NUM_STEPS = 4
# Half of the groups are dropped as if they were uniform; another quarter of a step is replayed.
POLICIES = (
    "algorithm.filter.group_filter=tests/e2e/own_functions.py:every_second_group",
    "algorithm.filter.max_rounds=4", "algorithm.filter.if_short=stop",
    "algorithm.filter.keep_responses=4", "algorithm.filter.mask_truncated=true",
    "algorithm.filter.replay.share=0.25", "algorithm.filter.replay.max_age=2",
    "algorithm.correction.level=token", "data.curriculum.name=learnability",
    "data.curriculum.min_reward=0.5",
)  # fmt: skip


@pytest.mark.nightly
def test_rounds_fill_a_step_and_a_run_that_goes_on_is_the_undisturbed_one(
    start_job, user_task_settings, tmp_path
):
    # Its replay buffer and its curriculum are in the checkpoint.

    def run(place: str, num_steps: int, resume: str = "never"):
        overrides = (*user_task_settings, *settings(num_steps, 2), *ONE_RANK, *LORA, *POLICIES)
        overrides += ("actor.optimizer.schedule=constant", f"resume={resume}")
        return ended(start_job(*overrides, output=tmp_path / place))

    undisturbed = run("undisturbed", NUM_STEPS)
    assert len(rows_of(run("disturbed", 2))) >= 2
    assert_the_same_run(run("disturbed", NUM_STEPS, "auto"), undisturbed, NUM_STEPS)
    steps = [row for row in rows_of(undisturbed) if "reward" in row]
    assert [row["samples/replayed"] for row in steps] == [0, 2, 2, 2]
    assert all(row["samples/rounds"] == 2 and row["samples/passed"] == 0.5 for row in steps)
    assert all(row["actor/grad_norm"] > 0 for row in steps)
    assert steps[-1]["samples/replayed_age"] > 0 == steps[0]["samples/dropped_surplus"]
    assert (undisturbed / "checkpoints/step_000004/state.safetensors").is_file()
