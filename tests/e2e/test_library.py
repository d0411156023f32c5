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
import asyncio, json, sys
import mcore_rl

async def run_cell(config):  # a notebook runs its cells in an event loop
    return mcore_rl.run(config)

if __name__ == "__main__":
    config = mcore_rl.load_recipe("quickstart", *sys.argv[1:])
    result = asyncio.run(run_cell(config))
    assert result.metrics == mcore_rl.load_run(config.output_dir).metrics
    is_exported = (result.checkpoint / "config.json").is_file()
    print(json.dumps([result.metrics, len(result.warm_start), is_exported]))
"""


def test_a_script_gets_the_metrics_of_a_run_whose_trainer_imitates_accepted_responses(
    tmp_path, user_task_settings
):
    # examples/rft.py: as many responses count as got the whole reward, once a group.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    overrides = [
        *user_task_settings, *ONE_RANK, "reward.name=tests/e2e/own_functions.py:fingerprint",
        "agent.loop=tests/e2e/own_agents.py:AsksOnce",
        f"trainer.mode={ROOT}/examples/rft.py:RejectionSampling", "algorithm.num_mini_batches=1",
        "warm_start.num_steps=2", "trainer.num_steps=2", "trainer.prompts_per_step=8",
        "trainer.eval_samples=8", "actor.optimizer.warmup_steps=0", f"output_dir={tmp_path}/run",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, script, *overrides],
        capture_output=True, text=True, timeout=400, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    metrics, num_warm, is_exported = json.loads(done.stdout.splitlines()[-1])
    assert ([row["step"] for row in metrics], num_warm, is_exported) == ([1, 2], 2, True)
    for row in metrics:
        assert 0 < row["samples/accepted"] <= 1
        assert row["actor/loss"] > 0 and row["actor/grad_norm"] > 0
        assert "max_logprob_gap" not in row  # no pass over samples: nothing is compared
