"""GRPO of model families that the recipes' tasks do not have, at the quickstart's size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    Glm4MoeConfig,
    MiniMaxM2Config,
    Qwen3NextConfig,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))

import tiny_families

from mcore_rl.examples.tasks import last_digit
from tests.e2e.conftest import LIMIT_S, list_task_settings
from tests.e2e.outcomes import rows_of

pytestmark = [pytest.mark.job, pytest.mark.nightly]

SIZES = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32,
    "num_experts_per_tok": 2, "bos_token_id": None, "dtype": "float32",
}  # fmt: skip


def save_new_model(folder: Path, config_class: Any, **fields: Any) -> None:
    """Replace the model in a folder by a new one of another family with its tokenizer."""
    old = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")
    torch.manual_seed(0)
    config = config_class(**{name: old[name] for name in names}, **fields)
    model = AutoModelForCausalLM.from_config(config).float()
    # transformers sets the padding token's to 0, from which an indexer scores all keys alike.
    with torch.no_grad():
        model.get_input_embeddings().weight[config.pad_token_id].normal_(0, 0.02)
    model.save_pretrained(folder)


@pytest.fixture
def start_family_job(start_job, tmp_path):
    """start_family_job(settings, config_class, **fields) trains a new model on last_digit.

    `has_mtp`: Its last layer is a prediction layer.
    """

    def start(
        settings: list[str], config_class: Any, *, has_mtp: bool = False, **fields: Any
    ) -> Any:
        task = last_digit.prepare(tmp_path / "task", 0, worked_share=0.35)
        save_new_model(Path(task.model_dir), config_class, **fields)
        if has_mtp:
            tiny_families.make_last_layer_predict(Path(task.model_dir))
        return start_job(*list_task_settings(task), *settings)

    return start


def wait_for_steps(job: Any) -> list[dict[str, float]]:
    """Return the metrics of each step of a job that ends well."""
    assert job.process.wait(LIMIT_S) == 0, job.stderr
    assert job.left() == []
    return [row for row in rows_of(job.output) if "reward" in row]


def test_a_hybrid_model_learns_to_show_its_work(start_family_job):
    settings = [
        "model.dtype=bfloat16",  # vLLM's delta nets on a CPU take nothing else
        f"rollout.kv_cache_bytes={256 << 20}",
        "trainer.num_steps=6",
        "trainer.eval_samples=256",
    ]
    job = start_family_job(
        settings, Qwen3NextConfig, **SIZES, intermediate_size=256, num_key_value_heads=2,
        num_experts=8, moe_intermediate_size=128, shared_expert_intermediate_size=64,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=128,
        linear_value_head_dim=128, num_nextn_predict_layers=0,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    )  # fmt: skip
    rows = wait_for_steps(job)
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.2
    assert all(row["mean_logprob_gap"] < 0.01 for row in rows)


TWO_STEPS = [
    "warm_start.num_steps=0", "warm_start.train_file=''", "trainer.num_steps=2",
    "trainer.prompts_per_step=8", "trainer.eval_samples=8", "actor.optimizer.warmup_steps=1",
    "actor.optimizer.lr=1e-3", "algorithm.filter.group_filter=''",
    "reward.name=tests/e2e/own_functions.py:fingerprint",
]  # fmt: skip


def test_log_probs_of_a_model_with_sparse_attention_are_those_of_transformers(start_family_job):
    """Indexers are trained, too: log-probs of the second step depend on weights of the first."""
    settings = [
        *TWO_STEPS,
        "rollout.backend=examples/hf_server.py:HFServer",
        "actor.indexer_loss_coef=1.0",
        "actor.indexer_replay=record",
        "actor.max_tokens_per_micro_batch=256",  # scores of all pairs of a pack are computed
    ]
    job = start_family_job(
        settings, DeepseekV32Config, **SIZES, intermediate_size=256, num_key_value_heads=4,
        n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=128, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=32, index_n_heads=20, index_head_dim=32, index_topk=8,
    )  # fmt: skip
    rows = wait_for_steps(job)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/indexer_loss"] > 0 and row["actor/grad_norm"] > 0 for row in rows)
    assert rows[1]["actor/indexer_loss"] < rows[0]["actor/indexer_loss"]
    assert all(row["max_logprob_gap"] < 1e-4 for row in rows)


def test_log_probs_of_minimax_m2_are_those_of_the_servers(start_family_job):
    job = start_family_job(
        TWO_STEPS, MiniMaxM2Config, **SIZES, intermediate_size=128, num_key_value_heads=2,
        num_local_experts=8, rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True,
    )  # fmt: skip
    rows = wait_for_steps(job)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert all(row["max_logprob_gap"] < 1e-4 for row in rows)


def test_a_run_learns_while_servers_accept_tokens_of_the_prediction_layer(start_family_job):
    settings = [
        "actor.mtp_loss_coef=0.3", "rollout.speculative.num_tokens=2", "trainer.num_steps=6",
        "trainer.eval_samples=256",
    ]  # fmt: skip
    job = start_family_job(
        settings, Glm4MoeConfig, has_mtp=True, **SIZES, intermediate_size=256,
        num_key_value_heads=2, n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=128,
        first_k_dense_replace=1, n_group=1, topk_group=1, use_qk_norm=True,
    )  # fmt: skip
    rows = wait_for_steps(job)
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.1
    assert all(row["max_logprob_gap"] < 1e-4 for row in rows)
    for row in rows:
        acceptance, tokens = row["drafts/acceptance"], row["drafts/step_tokens"]
        assert 0.2 < acceptance < 1
        assert tokens == pytest.approx(1 + 2 * acceptance)
