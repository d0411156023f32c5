"""GRPO of a Qwen3-Next of the quickstart's size: gated delta nets in packs, and on the servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from mcore_rl.examples.tasks import last_digit
from tests.e2e.conftest import LIMIT_S
from tests.e2e.outcomes import rows_of

pytestmark = [pytest.mark.job, pytest.mark.nightly]


def save_hybrid_model(folder: Path) -> None:
    """Replace the model in a folder by a new Qwen3-Next with its tokenizer, of 1.8 M parameters."""
    fields = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **{name: fields[name] for name in names},
        hidden_size=128, num_hidden_layers=3, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=128, shared_expert_intermediate_size=64, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_nextn_predict_layers=0, bos_token_id=None, dtype="float32",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


def test_a_hybrid_model_learns_to_show_its_work(start_job, tmp_path):
    task = last_digit.prepare(tmp_path / "task", 0, worked_share=0.35)
    save_hybrid_model(Path(task.model_dir))
    job = start_job(
        "task.name=''",
        f"model.path={task.model_dir}",
        "model.dtype=bfloat16",  # vLLM's delta nets on a CPU take nothing else
        f"data.train_file={task.train_file}",
        f"data.test_file={task.test_file}",
        f"warm_start.train_file={task.warm_start_file}",
        f"rollout.kv_cache_bytes={256 << 20}",
        "trainer.num_steps=6",
        "trainer.eval_samples=256",
    )
    assert job.process.wait(LIMIT_S) == 0, job.stderr
    rows = [row for row in rows_of(job.output) if "reward" in row]
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.2
    assert all(row["mean_logprob_gap"] < 0.01 for row in rows)
    assert job.left() == []
