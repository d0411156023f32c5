"""Jobs whose servers are no vLLM, or whose weight transport is an example of a user's own."""

from __future__ import annotations

import json

import pytest

from tests import sglang_server
from tests.e2e.outcomes import rows_of
from tests.e2e.test_resume import ended

pytestmark = pytest.mark.job

BACKEND = "rollout.backend=examples/hf_server.py:HFServer"
SETTINGS = (
    BACKEND, "warm_start.num_steps=0", "warm_start.train_file=''", "trainer.eval_samples=8",
    "trainer.prompts_per_step=8", "trainer.num_steps=2", "actor.optimizer.warmup_steps=1",
    "actor.optimizer.lr=1e-3", "algorithm.filter.group_filter=''",
    "reward.name=tests/e2e/own_functions.py:fingerprint",
)  # fmt: skip
ONE_RANK = "actor.layout.tp=1", "actor.layout.ep=1"


# tests/unit/testing/test_server.py has these ways without a job, test_adapters.py a job with a
# backend by its path.
@pytest.mark.parametrize(
    "settings",
    [
        # On the devices of two ranks: sleep, wake, weights through shared memory.
        pytest.param((), id="colocated", marks=pytest.mark.nightly),
        pytest.param(
            (*ONE_RANK, "trainer.mode=fully_async", "weight_sync.method=disaggregated"),
            id="in flight",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            (*ONE_RANK, "weight_sync.method=full_export"),
            id="full export",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_log_probs_of_a_backend_of_ones_own_are_the_trainers(
    start_job, user_task_settings, settings
):
    output = ended(start_job(*user_task_settings, *SETTINGS, *settings))
    rows = [row for row in rows_of(output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    gaps = [row["max_logprob_gap"] for row in rows if "max_logprob_gap" in row]
    assert gaps and max(gaps) < 1e-5


@pytest.mark.parametrize("mode", ["sync", pytest.param("fully_async", marks=pytest.mark.nightly)])
def test_log_probs_of_a_running_sglang_are_the_trainers(start_job, user_task_settings, mode):
    settings = [setting for setting in (*SETTINGS, *ONE_RANK) if setting != BACKEND]
    model = next(setting for setting in user_task_settings if setting.startswith("model.path="))
    words = "--model-path", model.partition("=")[2], "--enable-deterministic-inference"
    with sglang_server.serve(*words) as (url, fake):
        sglang = "rollout.backend=sglang", f"rollout.sglang.url={url}"
        sync = "weight_sync.method=full_export", "placement.rollout=own", f"trainer.mode={mode}"
        output = ended(start_job(*user_task_settings, *settings, *sglang, *sync))
    rows = [row for row in rows_of(output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    gaps = [row["max_logprob_gap"] for row in rows if "max_logprob_gap" in row]
    assert gaps and max(gaps) < 1e-5
    updates = [body for route, body in fake.calls if route == "/update_weights_from_disk"]
    assert [body["weight_version"] for body in updates] == ["0", "1", "2"]


@pytest.mark.nightly  # tests/unit/testing/test_transport.py has the transport alone
def test_servers_of_vllm_take_weights_over_a_transport_of_ones_own(start_job, user_task_settings):
    settings = [setting for setting in SETTINGS if setting != BACKEND]
    transport = "weight_sync.transport=examples/file_transport.py:FileTransport"
    disaggregated = "weight_sync.method=disaggregated", "weight_sync.verify=full", transport
    output = ended(start_job(*user_task_settings, *settings, *disaggregated))
    rows = [row for row in rows_of(output) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["max_logprob_gap"] for row in rows) < 1e-5


@pytest.mark.nightly
def test_the_quickstart_learns_with_a_backend_of_ones_own(start_job):
    job = start_job(BACKEND)
    assert job.process.wait(1200) == 0, job.stderr
    summary = json.loads((job.output / "summary.json").read_text())
    before, after = (
        summary["evaluation"][when]["test"]["accuracy"] for when in ("before", "after")
    )
    assert before < 0.6 and after > 0.85
    gaps = [row["mean_logprob_gap"] for row in rows_of(job.output) if "mean_logprob_gap" in row]
    assert len(gaps) == 20 and max(gaps) < 1e-6
