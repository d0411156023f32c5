"""GRPO of a GLM-4.5 of the quickstart's size whose servers draft with its prediction layer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))

import tiny_families

from mcore_rl.examples.tasks import last_digit
from tests.e2e.conftest import LIMIT_S
from tests.e2e.outcomes import rows_of

pytestmark = [pytest.mark.job, pytest.mark.nightly]


def save_model(folder: Path) -> None:
    """Replace the model in a folder by a new one with two layers and a prediction layer."""
    fields = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        **{name: fields[name] for name in names},
        hidden_size=128, num_hidden_layers=3, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, n_routed_experts=8, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=128, first_k_dense_replace=1, n_group=1,
        topk_group=1, use_qk_norm=True, bos_token_id=None, dtype="float32",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    tiny_families.make_last_layer_predict(folder)


def test_a_run_learns_while_servers_accept_tokens_of_the_prediction_layer(start_job, tmp_path):
    task = last_digit.prepare(tmp_path / "task", 0, worked_share=0.35)
    save_model(Path(task.model_dir))
    job = start_job(
        "task.name=''",
        f"model.path={task.model_dir}",
        f"data.train_file={task.train_file}",
        f"data.test_file={task.test_file}",
        f"warm_start.train_file={task.warm_start_file}",
        "actor.mtp_loss_coef=0.3",
        "rollout.speculative.num_tokens=2",
        "trainer.num_steps=6",
        "trainer.eval_samples=256",
    )
    assert job.process.wait(LIMIT_S) == 0, job.stderr
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.1
    assert all(row["max_logprob_gap"] < 1e-4 for row in rows)
    for row in rows:
        acceptance, tokens = row["drafts/acceptance"], row["drafts/step_tokens"]
        assert 0.2 < acceptance < 1
        assert tokens == pytest.approx(1 + 2 * acceptance)
    assert job.left() == []
