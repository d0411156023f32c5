"""An environment of verifiers 0.4 with a tool, as its user writes one, trained unchanged."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.agents.verifiers.process import VerifiersSettings
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AgentConfig
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.jobs.make_verifiers import TaskRange, make_verifiers
from mcore_rl.rewards.registry import RewardError
from tests.e2e.outcomes import rows_of
from tests.e2e.test_resume import ONE_RANK
from tests.e2e.verifiers_environment import FOLDERS, interpreter
from tests.pages import ROOT, list_commands
from tests.unit.agents.served import Policy
from tests.unit.agents.test_loops import TOKENIZER, text_of
from tests.unit.agents.test_verifiers import played_through_a_kill

pytestmark = [pytest.mark.job, pytest.mark.nightly]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {"environment": "sums-v1", "folders": FOLDERS, "interpreter": interpreter()}


@pytest.fixture(scope="module")
def tasks(settings, tmp_path_factory) -> str:
    """Write the environment's tasks as a file of rows."""
    file = tmp_path_factory.mktemp("tasks") / "tasks.parquet"
    args = '{"taskset": {"num_tasks": 40}}'
    make_verifiers(VerifiersSettings(**settings, args=args), TaskRange(1, 32), file)
    return str(file)


def test_tasks_are_rows_with_their_prompts(settings, tasks, tmp_path):
    rows = pq.read_table(tasks).to_pylist()
    assert [json.loads(row["task"])["idx"] for row in rows] == list(range(1, 33))
    for row in rows:
        task = json.loads(row["task"])
        assert row["messages"] == [{"role": "user", "content": task["prompt"]}]
        a, b = task["prompt"].removeprefix("How much is ").removesuffix("?").split(" + ")
        assert task["answer"] == str(int(a) + int(b))
    wrong = VerifiersSettings(**settings, args='{"taskset": {"num_task": 40}}')
    with pytest.raises(ConfigError, match=r"cannot load its environment: .*num_task"):
        make_verifiers(wrong, TaskRange(), tmp_path / "tasks.parquet")


def test_the_commands_of_the_page_make_rows(settings, tmp_path):
    # As printed, in a folder with what they name.
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    environment = Path(settings["interpreter"]).parents[1]
    (tmp_path / ".venv-verifiers").symlink_to(environment)
    page = ROOT / "docs/agents.md"
    printed = [c.text for c in list_commands(page) if c.text.startswith("mcore-rl data verifiers")]
    for text in printed:
        _, *arguments = shlex.split(text)
        command = [sys.executable, "-m", "mcore_rl.cli.main", *arguments]
        path = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=tmp_path, env=path, check=True)
    sizes = {name: pq.read_table(tmp_path / f"{name}.parquet") for name in ("train", "test")}
    assert {name: len(table) for name, table in sizes.items()} == {"train": 512, "test": 128}


def called(a: int, b: int) -> str:
    call = {"name": "add", "arguments": {"a": a, "b": b}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


ROLLOUTS: dict[str, list[str]] = {  # what the policy says in each, one after the other
    "right": [called(3, 4), "It is 7."],
    "wrong": ["It is 8."],
    "raises": ["raise"],
    "limited": [called(3, 4), called(3, 4)],
}


@pytest.fixture(scope="module")
def played(settings) -> dict[str, Any]:
    """Return the outcome of each rollout: by one process with two turns at most; all at once."""
    row = {"task": '{"prompt": "How much is 3 + 4?", "answer": "7"}'}
    messages = [{"role": "user", "content": "How much is 3 + 4?"}]
    results: dict[str, Any] = {}

    async def work() -> None:
        says = [text for texts in ROLLOUTS.values() for text in texts]
        policy = Policy([*says, *["It is 7."] * 16])
        config = AgentConfig(loop="verifiers", settings=settings, max_turns=2)
        runner = AgentRunner(policy, TOKENIZER, None, config, 4096, stops_on_error=True)
        sampling = SamplingParams(n=1, max_tokens=1000)
        try:
            for name in ROLLOUTS:
                prompt = Prompt([], 3, row, row=7, messages=messages)
                try:
                    [results[name]] = await runner.run_all([prompt], sampling)
                except RewardError as error:
                    results[name] = error
            many = [Prompt([], i, row, row=i, messages=messages) for i in range(16)]
            results["many"] = await runner.run_all(many, sampling)
        finally:
            await runner.close()
        results["exit status"] = runner._loop._process._process.returncode

    asyncio.run(work())
    return results


def test_tools_and_rewards_of_the_environment_make_the_samples(played):
    # Its tokens have been compared by token ids with those that its harness was answered.
    right, wrong = played["right"], played["wrong"]
    assert (right.reward, right.status) == (2.25, "finished")
    assert right.reward_parts == {"right": 2.0, "used_the_tool": 0.25, "metrics/length": 8.0}
    trained = [t for t, mask in zip(right.response_ids, right.response_mask, strict=True) if mask]
    assert text_of(trained) == f"{called(3, 4)}<|im_end|>It is 7.<|im_end|>"
    assert "<tool_response>\n7\n</tool_response>" in text_of(right.response_ids)
    assert '"name": "add", "description": "Add two integers."' in text_of(right.prompt_ids)
    assert (wrong.reward, wrong.status) == (0.0, "finished")
    assert [sample.reward for sample in played["many"]] == [2.0] * 16


def test_an_environment_that_raises_fails_its_trajectory(played):
    message = "RolloutFailedError: TaskError: .*ValueError: what a reward of a user raises"
    with pytest.raises(RewardError, match=message):
        raise played["raises"]


def test_a_rollout_at_the_limit_of_turns_is_cut_off_and_scored(played):
    limited = played["limited"]
    assert (limited.reward, limited.status, len(limited.turn_spans)) == (0.25, "truncated", 2)


def test_rollouts_of_a_process_that_is_killed_are_played_again(settings):
    # Two of them, in the middle of a turn: the same prompts, with the same seeds.
    row = {"task": '{"prompt": "How much is 3 + 4?", "answer": "7"}'}
    messages = [{"role": "user", "content": "How much is 3 + 4?"}]
    policy = Policy(["It is 7."] * 4, waits={number: asyncio.Event() for number in range(2)})
    config = AgentConfig(loop="verifiers", settings=settings, max_turns=2)
    prompts = [Prompt([], i, row, row=i, messages=messages) for i in range(2)]
    samples = asyncio.run(played_through_a_kill(policy, config, prompts, 240))
    assert [(s.group_id, s.status, s.reward) for s in samples] == [
        (0, "finished", 2.0),
        (1, "finished", 2.0),
    ]
    seeds = sorted((prompt, sampling.seed) for prompt, sampling, _ in policy.requests)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_its_process_ends_by_itself_and_leaves_nothing(played):
    # As it does when its worker is killed: its input has ended.
    assert played["exit status"] == 0
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if "sums_v1" in line or "mcore_rl_bridge" in line]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Make an untrained model whose chat template shows tools."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=TOKENIZER.eos_token_id,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def examples(played, tmp_path_factory) -> str:
    """Write supervised rows of both turns, with the prompts that the policy gets."""
    prompt = text_of(played["right"].prompt_ids)
    system = prompt.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]
    rows = []
    for a, b in itertools.product(range(10), repeat=2):
        call, answer = called(a, b), f"<tool_response>\n{a + b}\n</tool_response>"
        chat = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"How much is {a} + {b}?"},
        ]
        more = [{"role": "assistant", "content": call}, {"role": "user", "content": answer}]
        rows.append({"messages": chat, "response": call})
        rows.append({"messages": [*chat, *more], "response": f"It is {a + b}."})
    file = tmp_path_factory.mktemp("examples") / "examples.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def test_a_job_trains_the_environment(start_job, model, settings, tasks, examples):
    # Two steps, hence with weights of two versions. The trainer's log-probs of what the policy
    # said are the servers'. A warm start has shown it how to call the tool.
    overrides = ", ".join(f"{name}: '{value}'" for name, value in settings.items())
    job = start_job(
        "task.name=''",
        f"model.path={model}",
        f"data.train_file={tasks}",
        f"data.test_file={tasks}",
        *ONE_RANK,
        f"warm_start.train_file={examples}",
        "warm_start.num_steps=60",
        "warm_start.batch_size=32",
        "warm_start.optimizer.lr=5e-3",
        "agent.loop=verifiers",
        f"agent.settings={{{overrides}}}",
        "agent.max_turn_tokens=40",
        "data.max_prompt_tokens=300",
        "rollout.max_response_tokens=200",
        "algorithm.filter.group_filter=''",
        "trainer.num_steps=2",
        "trainer.prompts_per_step=8",
        "trainer.eval_samples=8",
        "trainer.max_logprob_gap=1e-4",
        "actor.optimizer.warmup_steps=0",
    )
    assert job.process.wait(600) == 0, job.stderr
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        parts = row["reward/right"] + row["reward/used_the_tool"]
        assert parts == pytest.approx(row["reward"])
        assert row["reward/used_the_tool"] > 0 and row["turns"] > 1
        assert row["actor/grad_norm"] > 0
    table = pq.read_table(job.output / "samples" / "step_000002.parquet").to_pylist()
    assert len(table) == 8 * 8
    assert all("Add two integers." in row["prompt"] for row in table)
    assert any("<tool_response>" in row["response"] for row in table)
