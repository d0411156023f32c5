"""A job that trains the policy by an agent written with OpenAI's package."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

from mcore_rl.data.tokenizer import load_tokenizer
from tests.e2e.openai_agent import RECORDS
from tests.e2e.outcomes import rows_of
from tests.e2e.test_resume import ONE_RANK

pytestmark = pytest.mark.job
AGENT = "tests/e2e/openai_agent.py:asks_twice"
STEPS, PROMPTS, GROUP_SIZE = 2, 4, 4


def test_an_agent_of_openai_is_trained_on_the_tokens_that_it_was_sent(
    start_job, user_task_settings, tmp_path, monkeypatch
):
    # Two steps, hence with weights of two versions. The trainer's log-probs of the tokens with
    # mask 1 are the servers'.
    monkeypatch.setenv(RECORDS, str(tmp_path))
    job = start_job(
        *user_task_settings,
        *ONE_RANK,
        "warm_start.num_steps=0",
        "warm_start.train_file=''",
        "agent.loop=program",
        f"agent.settings={{function: '{AGENT}'}}",
        "rollout.max_response_tokens=64",
        "algorithm.filter.group_filter=''",
        f"trainer.num_steps={STEPS}",
        f"trainer.prompts_per_step={PROMPTS}",
        f"algorithm.group_size={GROUP_SIZE}",
        "trainer.eval_samples=4",
        "trainer.max_logprob_gap=1e-4",
        "actor.optimizer.warmup_steps=0",
    )
    assert job.process.wait(300) == 0, job.stderr
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["turns"] == 2 and row["actor/grad_norm"] > 0 for row in rows)
    # What was trained is what the agent got: prompt, both answers, and what is between them.
    model = next(s for s in user_task_settings if s.startswith("model.path=")).split("=")[1]
    tokenizer = load_tokenizer(model)
    sent: Counter[tuple[object, ...]] = Counter()
    for file in tmp_path.glob("*.json"):
        record = json.loads(file.read_text())
        first, last = record["turns"]
        start = len(first["prompt"])
        before = first["prompt"] + first["new"]
        assert last["prompt"][: len(before)] == before
        assert [len(turn["log_probs"]) for turn in (first, last)] == [
            len(turn["new"]) for turn in (first, last)
        ]
        response = last["prompt"][start:] + last["new"]
        texts = tokenizer.decode(first["prompt"]), tokenizer.decode(response)
        sent[*texts, len(response), record["reward"]] += 1
    trained: Counter[tuple[object, ...]] = Counter()
    for step in range(1, STEPS + 1):
        for row in pq.read_table(job.output / f"samples/step_{step:06d}.parquet").to_pylist():
            trained[row["prompt"], row["response"], row["num_tokens"], row["reward"]] += 1
    assert trained.total() == STEPS * PROMPTS * GROUP_SIZE
    assert trained <= sent
