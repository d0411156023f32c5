"""A run whose actor is the engine of examples/hf_engine.py: stopped by a signal, and resumed."""

from __future__ import annotations

import signal

import pytest

import mcore_rl
from mcore_rl.checkpoint.hf import CheckpointReader
from tests.e2e.test_kill import is_training
from tests.e2e.test_resume import assert_saved_after_a_signal, ended

pytestmark = pytest.mark.job
# On one rank: tests/dist_cpu/test_hf_engine.py has the engine on two.
SETTINGS = (
    "actor.backend=examples/hf_engine.py:BACKEND", "actor.layout.tp=1",
    "actor.layout.ep=1", "warm_start.layout.dp=1", "warm_start.moe_aux_loss_coef=0",
    "warm_start.num_steps=2", "warm_start.optimizer.warmup_steps=0", "trainer.save_every=1000",
    "trainer.prompts_per_step=8", "trainer.eval_samples=8",
    "algorithm.num_mini_batches=1", "algorithm.kl_coef=0.01", "algorithm.filter.group_filter=''",
    "actor.optimizer.warmup_steps=0", "reward.name=tests/e2e/own_functions.py:fingerprint",
)  # fmt: skip


def test_servers_verify_the_weights_of_a_users_engine_and_its_run_is_resumed(
    start_job, user_task_settings
):
    settings = (*user_task_settings, *SETTINGS)
    stopped = start_job(*settings, "trainer.num_steps=1000")
    stopped.wait_until(lambda: is_training(stopped), "the first step")
    stopped.process.send_signal(signal.SIGUSR1)
    last = assert_saved_after_a_signal(stopped)
    resumed = start_job(
        *settings, f"trainer.num_steps={last + 1}", "resume=auto", output=stopped.output
    )
    result = mcore_rl.load_run(ended(resumed))
    assert f"going on after step {last}, from " in resumed.stdout
    assert len(result.warm_start) == 2
    assert [row["step"] for row in result.metrics] == list(range(1, last + 2))
    for row in result.metrics:  # weight_sync.verify=full: every parameter of every push
        assert row["max_logprob_gap"] < 1e-3 and row["mean_logprob_gap"] < 1e-5
        assert row["actor/grad_norm"] > 0 and row["actor/kl_loss"] >= 0
    # The export is the checkpoint that it began with, tensor by tensor.
    exported = CheckpointReader(result.checkpoint).get_shapes()
    assert exported == CheckpointReader(stopped.output / "warm_start").get_shapes()
