"""A run whose actor is the engine of examples/hf_engine.py, with a resume from its checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mcore_rl
from mcore_rl.checkpoint.hf import CheckpointReader

pytestmark = pytest.mark.job
ROOT = Path(__file__).parents[2]
SETTINGS = (
    "recipe=quickstart", "actor.backend=examples/hf_engine.py:BACKEND", "actor.layout.tp=1",
    "actor.layout.ep=1", "actor.layout.dp=2", "warm_start.moe_aux_loss_coef=0",
    "warm_start.num_steps=60", "trainer.prompts_per_step=16", "trainer.eval_samples=16",
    "trainer.save_every=1", "algorithm.num_mini_batches=1", "algorithm.kl_coef=0.01",
)  # fmt: skip


def run(folder: Path, *settings: str) -> mcore_rl.RunResult:
    command = [sys.executable, "-m", "mcore_rl.cli.main", "rl", *SETTINGS, *settings]
    done = subprocess.run(
        [*command, f"output_dir={folder}"],
        capture_output=True, text=True, timeout=500, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return mcore_rl.load_run(folder)


def test_servers_verify_the_weights_of_a_users_engine_and_its_run_is_resumed(tmp_path):
    result = run(tmp_path / "run", "trainer.num_steps=2")
    assert len(result.warm_start) == 60
    assert [row["step"] for row in result.metrics] == [1, 2]
    for row in result.metrics:  # weight_sync.verify=full: every parameter of every push
        assert row["max_logprob_gap"] < 1e-3 and row["mean_logprob_gap"] < 1e-5
        assert row["actor/grad_norm"] > 0 and row["actor/kl_loss"] >= 0
    # The export is the checkpoint that it began with, tensor by tensor.
    exported = CheckpointReader(result.checkpoint).get_shapes()
    assert exported == CheckpointReader(tmp_path / "run" / "warm_start").get_shapes()
    resumed = run(tmp_path / "run", "trainer.num_steps=3", "resume=auto")
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3]
    assert resumed.metrics[-1]["max_logprob_gap"] < 1e-3
