"""Jobs whose responses have several turns."""

from __future__ import annotations

import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from tests.e2e.outcomes import rows_of
from tests.e2e.test_resume import LORA, ONE_RANK
from tests.nightly import nightly

pytestmark = pytest.mark.job
AGENTS = "tests/e2e/own_agents.py"


REPLAY = "actor.moe.router_replay=rollout"
TWO_STAGES = ("actor.layout.tp=1", "actor.layout.ep=1", "actor.layout.pp=2",
    "actor.layout.first_stage_layers=1")  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "max_gap"),
    [  # without replay a token at a router's tie may take another expert
        ((*ONE_RANK, REPLAY), 1e-4),
        nightly(((*TWO_STAGES, *LORA, REPLAY), 1e-4)),
        nightly((ONE_RANK, 1e-2)),
    ],
    ids=["replay", "two stages with adapters", "without replay"],
)
def test_turns_of_an_environment_are_trained_and_what_it_says_is_not(
    settings, max_gap, start_job, user_task_settings
):
    # Two steps, hence with the servers' weights of two versions; trainer and servers agree.
    #
    # With the experts that the servers have used in each of the turns. Turns in equal states are
    # compared: all begin in that of their prompt.
    job = start_job(
        *user_task_settings,
        *settings,
        "warm_start.num_steps=0",
        "warm_start.train_file=''",
        "agent.loop=environment",
        f"agent.environment={AGENTS}:Twice",
        "agent.max_turn_tokens=12",
        "rollout.max_response_tokens=64",
        "algorithm.filter.group_filter=''",
        "algorithm.advantage=gigpo",
        "trainer.num_steps=2",
        "trainer.prompts_per_step=8",
        "trainer.eval_samples=8",
        f"trainer.max_logprob_gap={max_gap}",
        "trainer.mean_logprob_gap=1e-5",
        "actor.optimizer.warmup_steps=0",
    )
    assert job.process.wait(300) == 0, job.stderr
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 1 <= row["turns"] <= 2
        assert row["actor/grad_norm"] > 0
        assert row["mismatch/log_ratio_p01"] > -1e-5 and row["mismatch/log_ratio_p99"] < 1e-5
    table = pq.read_table(job.output / "samples" / "step_000002.parquet").to_pylist()
    again = "<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert any(again in row["response"] for row in table)
    of_two = next(row for row in table if row["num_turns"] == 2)
    arguments = ["--group", str(of_two["group"]), "--trajectory", str(of_two["trajectory"])]
    command = [sys.executable, "-m", "mcore_rl.cli.main", "samples", str(job.output), *arguments]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (page.returncode, page.stderr) == (0, "")
    head, *_ = page.stdout.splitlines()
    assert head == f"step 2, group {of_two['group']}, trajectory {of_two['trajectory']}"
    assert page.stdout.count("\n[assistant, turn ") == 2 and "[user]\n" in page.stdout
    answers = page.stdout.split(" nats between trainer and servers")[1]
    text = re.sub(r"\n\n\[.*\]\n", "\n", answers).strip()
    assert text.startswith(of_two["prompt"]) and again in text
