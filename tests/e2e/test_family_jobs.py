"""GRPO of new models of the quickstart's size: what their families need of trainer and servers.

A Qwen3-Next has gated delta nets in packs; a GLM-4.5 has a prediction layer that servers draft
with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3NextConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))

import tiny_families

from mcore_rl.examples.tasks import last_digit
from tests.e2e.conftest import LIMIT_S, Job
from tests.e2e.outcomes import rows_of

pytestmark = [pytest.mark.job, pytest.mark.nightly]

SHAPE: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "bos_token_id": None, "dtype": "float32",
}  # fmt: skip
HYBRID = {
    "num_experts": 8, "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_nextn_predict_layers": 0,
}  # fmt: skip
DRAFTING = {
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "use_qk_norm": True,
}  # fmt: skip


@pytest.fixture
def task(tmp_path: Path) -> Any:
    return last_digit.prepare(tmp_path / "task", 0, worked_share=0.35)


def replace_model(folder: Path, kind: type, fields: dict[str, Any]) -> None:
    """Replace the model in a folder by a new one, with the tokenizer that is there."""
    stored = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")
    torch.manual_seed(0)
    config = kind(**{name: stored[name] for name in names}, **SHAPE, **fields)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


def train(start_job: Callable[..., Job], task: Any, *settings: str) -> list[dict[str, Any]]:
    """Run a warm start and six steps; return the metrics of the steps."""
    job = start_job(
        "task.name=''",
        f"model.path={task.model_dir}",
        f"data.train_file={task.train_file}",
        f"data.test_file={task.test_file}",
        f"warm_start.train_file={task.warm_start_file}",
        "trainer.num_steps=6",
        "trainer.eval_samples=256",
        *settings,
    )
    assert job.process.wait(LIMIT_S) == 0, job.stderr
    assert job.left() == []
    return [row for row in rows_of(job.output) if "reward" in row]


def test_a_hybrid_model_learns_to_show_its_work(start_job, task):
    replace_model(Path(task.model_dir), Qwen3NextConfig, HYBRID)
    rows = train(
        start_job,
        task,
        "model.dtype=bfloat16",  # vLLM's delta nets on a CPU take nothing else
        f"rollout.kv_cache_bytes={256 << 20}",
    )
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.2
    assert all(row["mean_logprob_gap"] < 0.01 for row in rows)


def test_a_run_learns_while_servers_accept_tokens_of_the_prediction_layer(start_job, task):
    folder = Path(task.model_dir)
    replace_model(folder, Glm4MoeConfig, DRAFTING)
    tiny_families.make_last_layer_predict(folder)
    rows = train(start_job, task, "actor.mtp_loss_coef=0.3", "rollout.speculative.num_tokens=2")
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.1
    assert all(row["max_logprob_gap"] < 1e-4 for row in rows)
    for row in rows:
        acceptance, tokens = row["drafts/acceptance"], row["drafts/step_tokens"]
        assert 0.2 < acceptance < 1
        assert tokens == pytest.approx(1 + 2 * acceptance)
