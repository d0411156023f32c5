"""Jobs on pictures: what a run, its resume and its samples have, and what the recipe learns."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import transformers

import mcore_rl
from tests.nightly import all_but

pytestmark = pytest.mark.job
SHORT = (
    "trainer.prompts_per_step=8", "trainer.eval_samples=32", "trainer.save_every=1",
    "rollout.max_num_seqs=64",
)  # fmt: skip
# Of a model that has not learned to answer: rewards differ in a group whatever it says.
UNTRAINED = (
    "warm_start.num_steps=4", "warm_start.optimizer.warmup_steps=0", "reward.settings={}",
    "reward.name=tests/e2e/own_functions.py:fingerprint",
)  # fmt: skip


def run_job(start_job, *settings: str, output: Path | None = None):
    job = start_job(*settings, recipe="quickstart_images", output=output)
    assert job.process.wait(600) == 0, job.stderr[-3000:]
    return mcore_rl.load_run(job.output)


@pytest.mark.parametrize("resumes", all_but([False], [False, True]))
def test_a_run_on_pictures_its_resume_and_its_samples(resumes, start_job, tmp_path):
    output, settings = tmp_path / "run", (*SHORT, *UNTRAINED)
    if resumes:
        run_job(start_job, *settings, "trainer.num_steps=2", output=output)
    result = run_job(start_job, *settings, "trainer.num_steps=3", "resume=auto", output=output)
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    for row in result.metrics:  # weight_sync.verify=full: every parameter of every push
        assert 0 < row["max_logprob_gap"] < 1e-4 and row["mean_logprob_gap"] < 1e-5
        assert row["actor/grad_norm"] > 0
    table = pq.read_table(output / "samples" / "step_000003.parquet").to_pylist()
    pad = transformers.AutoTokenizer.from_pretrained(result.checkpoint).convert_tokens_to_ids(
        "<|image_pad|>"
    )
    for row in table:
        [digest] = row["images"]
        assert (output / "images" / digest).stat().st_size
        assert row["prompt_ids"].count(pad) == 4
        assert "images" not in json.loads(row["columns"])
    assert len({row["images"][0] for row in table}) == len({row["group"] for row in table})
    summary = json.loads((output / "summary.json").read_text())
    assert summary["example"]["response"]


@pytest.mark.nightly
def test_turns_with_pictures_are_trained(start_job, tmp_path):
    result = run_job(
        start_job, *SHORT, "warm_start.num_steps=60", "trainer.num_steps=2",
        "agent.loop=environment",
        "agent.environment=tests/e2e/own_gallery.py:Gallery", "rollout.max_response_tokens=96",
        "agent.max_turn_tokens=4", "reward.settings={}", "reward.name=final_number",
    )  # fmt: skip
    for row in result.metrics:
        assert 0 < row["max_logprob_gap"] < 1e-4 and row["actor/grad_norm"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_recipe_learns_to_look_and_not_from_shuffled_rewards(seed, start_job):
    changes = []
    for shuffle in ("false", "true"):
        result = run_job(start_job, f"seed={seed}", f"reward.shuffle={shuffle}")
        sets = result.summary["evaluation"]
        before, after = (sets[when]["test"]["accuracy"] for when in ("before", "after"))
        changes.append(after - before)
    assert changes[0] > 0.2
    assert changes[1] < 0.1
