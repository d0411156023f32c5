"""Recipes whose responses have several turns, as they are: each raises its held-out reward."""

from __future__ import annotations

import json

import pytest

from tests.e2e.outcomes import rows_of
from tests.pages import select_commands

pytestmark = pytest.mark.job
RECIPES = [command.text.partition("recipe=")[2] for command in select_commands("toy agents")]
# Of the reward of 128 rows or more, whose error is 0.05; docs/agents.md has what was measured.
LEAST_GAIN = {"toy_calculator": 0.2, "toy_countdown": 0.08, "toy_code": 0.2}
LIMIT_S = 900.0


@pytest.mark.nightly  # test_agents.py trains on turns, test_quickstart.py learns
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_several_turns_raises_its_held_out_reward(recipe, start_job):
    job = start_job(recipe=recipe)
    assert job.process.wait(LIMIT_S) == 0, job.stderr
    evaluation = json.loads((job.output / "summary.json").read_text())["evaluation"]
    before, after = (evaluation[when]["test"] for when in ("before", "after"))
    assert before["num_samples"] >= 128
    assert after["reward"] - before["reward"] >= LEAST_GAIN[recipe]
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert rows
    for row in rows:
        assert row["turns"] > 1
        assert row["max_logprob_gap"] <= 1e-4  # context of tools and environments included
