"""Jobs whose responses have several turns."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from tests.e2e.outcomes import rows_of
from tests.e2e.test_resume import LORA, ONE_RANK
from tests.nightly import nightly

pytestmark = pytest.mark.job
OWN = "tests/e2e/own_agents.py"


REPLAY = "actor.moe.router_replay=rollout"
TWO_STAGES = ("actor.layout.tp=1", "actor.layout.ep=1", "actor.layout.pp=2",
    "actor.layout.first_stage_layers=1")  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [(*ONE_RANK, REPLAY), nightly(((*TWO_STAGES, *LORA, REPLAY),)), nightly((ONE_RANK,))],
    ids=["replay", "two stages with adapters", "without replay"],
)
def test_turns_of_an_environment_are_trained_and_what_it_says_is_not(
    settings, start_job, own_model_and_data
):
    """Two steps, hence with the servers' weights of two versions; trainer and servers agree.

    With the experts that the servers have used in each of the turns.
    """
    job = start_job(
        *own_model_and_data,
        *settings,
        "warm_start.num_steps=0",
        "warm_start.train_file=''",
        "agent.loop=environment",
        f"agent.environment={OWN}:Twice",
        "agent.max_turn_tokens=12",
        "rollout.max_response_tokens=64",
        "algorithm.samples.group_filter=''",
        "trainer.num_steps=2",
        "trainer.prompts_per_step=8",
        "trainer.eval_samples=8",
        "trainer.max_logprob_gap=1e-4",
        "actor.optimizer.warmup_steps=0",
    )
    assert job.process.wait(300) == 0, job.stderr
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 1 <= row["turns"] <= 2
        assert row["actor/grad_norm"] > 0
    table = pq.read_table(job.output / "samples" / "step_000002.parquet").to_pylist()
    again = "<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert any(again in row["response"] for row in table)
