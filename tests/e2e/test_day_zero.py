"""A run of a model that no family here has rules of: FSDP2, and vLLM's layout from its loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import mcore_rl
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.examples.tasks import last_digit
from tests import tiny_vision
from tests.e2e.conftest import list_task_settings
from tests.nightly import all_but

pytestmark = pytest.mark.job
SETTINGS = (
    "actor.backend=fsdp", "actor.layout.tp=1", "actor.layout.ep=1", "actor.layout.dp=2",
    "warm_start.moe_aux_loss_coef=0", "warm_start.num_steps=4",
    "warm_start.optimizer.warmup_steps=0", "trainer.prompts_per_step=16",
    "trainer.eval_samples=16", "trainer.save_every=1", "algorithm.num_mini_batches=1",
    # Of a random model: rewards differ in a group whatever it says.
    "reward.name=tests/e2e/own_functions.py:fingerprint",
)  # fmt: skip
# Their tokens are bytes.
WITH_IMAGES = ("data.max_prompt_tokens=256", "rollout.kv_cache_bytes=268435456")


def replace_model(folder: Path, kind: str) -> None:
    """Write a random model into the folder of a task.

    A model with images comes with a tokenizer of bytes.
    """
    if kind in tiny_vision.KINDS:
        for path in folder.iterdir():
            path.unlink()
        tiny_vision.save(folder, kind)
        return
    vocab_size = len(transformers.AutoTokenizer.from_pretrained(folder))
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, sliding_window=16,
        query_pre_attn_scalar=32, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=json.loads((folder / "config.json").read_text())["eos_token_id"],
        pad_token_id=0, dtype="float32",
    )  # fmt: skip
    (folder / "config.json").unlink()
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


# tests/dist_cpu/test_fsdp_engine.py has the resume of such a model, test_own_engine.py of a run.
@pytest.mark.parametrize(
    ("kind", "resumes"),
    all_but(
        [("gemma3_text", False)],
        [("gemma3_text", False), ("gemma3_text", True), ("qwen3_vl_moe", True)],
    ),
)
def test_a_model_without_rules_is_trained_and_served_shard_to_shard(
    kind, resumes, start_job, tmp_path
):
    task = last_digit.prepare(tmp_path / "task", 0, worked_share=0.35)
    replace_model(Path(task.model_dir), kind)
    settings = (
        *SETTINGS, *list_task_settings(task),
        *(WITH_IMAGES if kind in tiny_vision.KINDS else ()),
        *(("algorithm.kl_coef=0.01",) if resumes else ()),  # its reference has ranks of its own
    )  # fmt: skip
    output = tmp_path / "run"
    job = start_job(*settings, "trainer.num_steps=2", output=output)
    assert job.process.wait(400) == 0, job.stderr[-3000:]
    result = mcore_rl.load_run(output)
    assert [row["step"] for row in result.metrics] == [1, 2]
    for row in result.metrics:  # weight_sync.verify=full: every parameter of every push
        assert row["max_logprob_gap"] < 1e-4 and row["mean_logprob_gap"] < 1e-5
        assert row["actor/grad_norm"] > 0
        assert not resumes or row["actor/kl_loss"] >= 0
    exported = CheckpointReader(result.checkpoint).get_shapes()
    assert exported == CheckpointReader(task.model_dir).get_shapes()
    if not resumes:
        return
    job = start_job(*settings, "trainer.num_steps=3", "resume=auto", output=output)
    assert job.process.wait(300) == 0, job.stderr[-3000:]
    resumed = mcore_rl.load_run(output)
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3]
    assert resumed.metrics[-1]["max_logprob_gap"] < 1e-4
