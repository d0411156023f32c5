"""Jobs with a frozen model beside the policy, on a server of its own or as an adapter."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.checkpoint.peft import Factors, write_adapters
from mcore_rl.models.base import read_config
from tests.e2e.conftest import Job
from tests.e2e.outcomes import rows_of
from tests.e2e.processes import lives
from tests.e2e.test_resume import ONE_RANK

pytestmark = pytest.mark.job
CONVERSATION = (
    *ONE_RANK,
    "warm_start.num_steps=0",
    "warm_start.train_file=''",
    "agent.loop=user",
    "agent.settings.prompt='You want {answer}.'",
    "agent.settings.greeting='Hello!'",
    "agent.max_turns=2",
    "agent.max_turn_tokens=12",
    "reward.name=tests/e2e/own_functions.py:fingerprint",
    "rollout.max_response_tokens=96",
    "models.user.max_tokens=8",
    "models.user.max_context=256",
    "models.user.kv_cache_bytes=33554432",
    "algorithm.filter.group_filter=''",
    "trainer.prompts_per_step=4",
    "trainer.eval_samples=4",
    "trainer.max_logprob_gap=1e-4",
    "actor.optimizer.warmup_steps=0",
)


def sums(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def model_of(settings: list[str]) -> Path:
    [model] = [s.partition("=")[2] for s in settings if s.startswith("model.path=")]
    return Path(model)


@pytest.mark.nightly  # tests/unit/agents has the loop, and the client with a server that dies
def test_a_policy_learns_from_talks_with_a_frozen_model_that_stays_as_it_is(
    start_job, user_task_settings
):
    # The policy changes, hence what the two say differs from step to step; the other does not.
    model = model_of(user_task_settings)
    before = sums(model)
    job = start_job(
        *user_task_settings, *CONVERSATION, f"models.user.path={model}", "trainer.num_steps=2"
    )
    assert job.process.wait(300) == 0, job.stderr
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 1 <= row["turns"] <= 2
        assert row["actor/grad_norm"] > 0
    assert any(row["turns"] > 1 for row in rows)
    table = pq.read_table(job.output / "samples" / "step_000002.parquet").to_pylist()
    between = r"<\|im_start\|>user\n.*<\|im_end\|>\n<\|im_start\|>assistant\n"
    assert any(re.search(between, row["response"], re.DOTALL) for row in table)
    assert sums(model) == before
    logs = job.output / "logs"
    assert (logs / "models.user-0.log").exists()
    assert job.left() == []


@pytest.mark.nightly  # tests/e2e/test_adapters.py has the log-probs of each policy
def test_a_policy_talks_with_an_earlier_adapter_on_its_own_server_also_after_a_restart(
    start_job, user_task_settings
):
    # The other side is the adapter that a first run has exported, with another rank.
    talk = [s for s in CONVERSATION if "kv_cache_bytes" not in s and "max_context" not in s]
    lora = "rollout.lora=adapter", "actor.lora.targets=[linear_qkv,linear_proj]"
    settings = (*user_task_settings, *talk, *lora, "actor.optimizer.lr=1e-2")
    first = start_job(
        *settings, "actor.lora.rank=6", "agent.loop=single_turn", "agent.settings={}",
        "models={}", "trainer.num_steps=2",
    )  # fmt: skip
    assert first.process.wait(300) == 0, first.stderr
    adapter = first.output / "checkpoint" / "adapter"
    before = sums(adapter)
    job = start_job(
        *settings, "actor.lora.rank=4", f"models.user.adapter={adapter}", "trainer.num_steps=4"
    )
    job.wait_until(
        lambda: (job.output / "metrics.jsonl").exists() and len(rows_of(job.output)) > 1, "a step"
    )
    _part_of_server(job, "rollout-0", "the engine").kill()
    assert job.process.wait(300) == 0, job.stderr
    assert "is up again" in job.stdout
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    table = pq.read_table(job.output / "samples" / "step_000004.parquet").to_pylist()
    between = r"<\|im_start\|>user\n.*<\|im_end\|>\n<\|im_start\|>assistant\n"
    assert any(re.search(between, row["response"], re.DOTALL) for row in table)
    assert sums(adapter) == before
    assert not [*(job.output / "logs").glob("models.*")]  # no server of its own
    assert job.left() == []


@pytest.mark.nightly  # tests/unit/agents/test_models.py has what the model is asked
@pytest.mark.parametrize("is_adapter", [False, True])
def test_a_frozen_model_judges_the_responses_of_a_run(
    start_job, user_task_settings, tmp_path, is_adapter
):
    # One that says anything: its verdicts are read by a function, which finds a score in each.
    # Its conversations may be longer than those of the policy.
    settings = ["models.judge.max_context=512"]
    if is_adapter:
        path = model_of(user_task_settings)
        model = AutoModelForCausalLM.from_pretrained(path)
        weight = model.model.layers[0].self_attn.o_proj.weight
        a, b = torch.randn(2, weight.shape[1]), 0.01 * torch.randn(weight.shape[0], 2)
        factors = Factors("model.layers.0.self_attn.o_proj.weight", a, b)
        config = read_config(path)
        write_adapters(tmp_path / "adapter", lambda: iter([factors]), 2, 1.0, config)
        settings = [
            f"models.judge.adapter={tmp_path / 'adapter'}", "rollout.lora=adapter",
            "actor.lora.rank=4", "actor.lora.targets=[linear_qkv]",
        ]  # fmt: skip
    else:
        settings += ["models.judge.kv_cache_bytes=33554432"]
    job = start_job(
        *user_task_settings,
        *ONE_RANK,
        "warm_start.num_steps=0",
        "warm_start.train_file=''",
        "reward.name=judge",
        "reward.settings.served_by=judge",
        "reward.settings.template='Of {answer}: {response}'",
        "reward.settings.parser=tests/e2e/own_functions.py:letters_of",
        "reward.settings.high=100.0",
        "reward.settings.max_tokens=8",
        *settings,
        "algorithm.filter.group_filter=''",
        "trainer.num_steps=2",
        "trainer.prompts_per_step=4",
        "trainer.eval_samples=4",
        "actor.optimizer.warmup_steps=0",
    )
    assert job.process.wait(300) == 0, job.stderr
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    table = pq.read_table(job.output / "samples" / "step_000001.parquet").to_pylist()
    assert all(row["reward/parsed"] == 1 and not row["reward_error"] for row in table)
    assert len({row["reward"] for row in table}) > 1
    assert job.left() == []


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["the actor", "the engine"])
def test_a_frozen_models_server_that_dies_ends_the_run_with_one_line_that_names_it(
    start_job, user_task_settings, part
):
    # Of a model without a path, which is what the actor begins with.
    overrides = (
        *user_task_settings,
        *CONVERSATION,
        "models.user.num_servers=1",
        "trainer.num_steps=1000",
    )
    job = _job_with_a_kill(start_job, part, overrides)
    killed = time.monotonic()
    assert job.process.wait(120) == 1
    assert time.monotonic() - killed < 60
    assert job.stderr.count("\n") == 1
    assert "models.user: the server at http://" in job.stderr, job.stderr
    assert job.left() == []


@pytest.mark.nightly  # tests/unit/agents/test_remote_deaths.py has the client
@pytest.mark.parametrize("part", ["the actor", "the engine"])
def test_one_of_two_servers_of_a_frozen_model_dies_and_the_run_goes_on(
    start_job, user_task_settings, part
):
    overrides = (
        *user_task_settings,
        *CONVERSATION,
        "models.user.num_servers=2",
        "trainer.num_steps=6",
    )
    job = _job_with_a_kill(start_job, part, overrides)
    assert job.process.wait(300) == 0, job.stderr
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert job.left() == []


def _job_with_a_kill(start_job: Callable[..., Job], part: str, settings: Sequence[str]) -> Job:
    """A run in which, after a step, a part of the first server of `models.user` is killed."""
    job = start_job(*settings)
    job.wait_until(
        lambda: (job.output / "metrics.jsonl").exists() and len(rows_of(job.output)) > 1, "a step"
    )
    _part_of_server(job, "models.user-0", part).kill()
    return job


def _part_of_server(job: Job, name: str, part: str) -> psutil.Process:
    log = job.output / "logs" / f"{name}.log"
    server = {p.pid: p for p in set(job.processes) if lives(p) and _prints_to(p.pid) == str(log)}
    is_inner = {pid: p.ppid() in server for pid, p in server.items()}
    assert sorted(is_inner.values()) == [False, True]
    [pid] = [pid for pid, inner in is_inner.items() if inner == (part == "the engine")]
    return server[pid]


def _prints_to(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    except OSError:
        return ""
