"""A script that runs a recipe by `import mcore_rl`, with a loop and a trainer of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_resume import ONE_RANK

pytestmark = pytest.mark.job
ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, json, sys, threading
import ray
import mcore_rl
from mcore_rl.agents.environments.base import EnvironmentStep
from mcore_rl.examples.rft import RejectionSampling

STEPS = 2

class Loop(RejectionSampling):
    pass

def score(text, answer):
    return sum(map(ord, text + answer)) % 2

def center(inputs):
    return inputs.rewards - inputs.rewards.mean()

def weigh(inputs):
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    return -STEPS * ratio * inputs.advantages, {"twice": STEPS * ratio.detach()}

class Echo:
    tools = ()

    def __init__(self, fields):
        pass

    async def reset(self):
        return []

    async def step(self, turn):
        return EnvironmentStep(reward=len(turn.content) / 100, is_done=True)

    async def close(self):
        pass

async def run_cell(config):  # a notebook runs its cells in an event loop
    return mcore_rl.run(config)

def show(result):
    is_exported = (result.checkpoint / "config.json").is_file()
    print(json.dumps([result.metrics, len(result.warm_start), is_exported]))

folder, model = sys.argv[1:3]
with open(f"{folder}/starts", "a") as file:
    file.write("x")
config = mcore_rl.load_recipe("quickstart", *sys.argv[3:], f"output_dir={folder}/first")
config.reward.name = lambda text, fields: score(text, fields["answer"])
config.trainer.mode = Loop
result = asyncio.run(run_cell(config))
assert result.metrics == mcore_rl.load_run(config.output_dir).metrics
show(result)

ray.init(num_cpus=1, resources={"rank": 1}, include_dashboard=False)
rows = [{"prompt": f"Start with {n}.", "answer": str(n)}
        for n in range(8)]
settings = {
    "algorithm.advantage": center, "algorithm.loss": weigh, "agent.loop": "environment",
    "agent.environment": Echo, "trainer.num_steps": STEPS, "trainer.prompts_per_step": 4,
    "algorithm.group_size": 2, "rollout.max_response_tokens": 12, "rollout.max_num_seqs": 8,
    "data.max_prompt_tokens": 200, "rollout.kv_cache_bytes": 64 << 20,
}
def train():
    result = mcore_rl.grpo(model, lambda text: 0, rows,
                           output_dir=f"{folder}/second", settings=settings)
    show(result)
thread = threading.Thread(target=train)
thread.start()
thread.join()
assert ray.is_initialized() and ray.cluster_resources()["rank"] == 1
"""


def test_a_script_runs_twice_with_functions_of_its_own(tmp_path, user_task_settings):
    """In an event loop with Ray of its own; then in a thread beside the Ray of the script."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    model = next(s for s in user_task_settings if s.startswith("model.path=")).partition("=")[2]
    overrides = [
        *user_task_settings, *ONE_RANK, "agent.loop=tests/e2e/own_agents.py:AsksOnce",
        "algorithm.num_mini_batches=1",
        "warm_start.num_steps=2", "trainer.num_steps=2", "trainer.prompts_per_step=8",
        "trainer.eval_samples=8", "actor.optimizer.warmup_steps=0",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, script, tmp_path, model, *overrides],
        capture_output=True, text=True, timeout=500, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "starts").read_text() == "x"  # no process imports a script without a guard
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line[:2] == "[[")
    metrics, num_warm, is_exported = first
    assert ([row["step"] for row in metrics], num_warm, is_exported) == ([1, 2], 2, True)
    for row in metrics:  # examples/rft.py: as many count as got the whole reward, once a group
        assert 0 < row["samples/accepted"] <= 1
        assert row["actor/loss"] > 0 and row["actor/grad_norm"] > 0
        assert "max_logprob_gap" not in row  # no pass over samples: nothing is compared
    metrics, num_warm, is_exported = second
    assert ([row["step"] for row in metrics], num_warm, is_exported) == ([1, 2], 0, True)
    for row in metrics:
        assert row["actor/twice"] == pytest.approx(2, rel=1e-4)  # one mini-batch: ratios are 1
        assert row["reward"] > 0 and row["actor/grad_norm"] > 0
