"""A run of a model whose family is that of examples/my_family.py, with vLLM servers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import mcore_rl
from mcore_rl.examples.tasks import last_digit
from mcore_rl.testing.family import save_random_checkpoint

# tests/unit/models/test_user_families.py and tests/unit/testing have the parts.
pytestmark = [pytest.mark.job, pytest.mark.nightly]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a task whose model is a small Mistral with its tokenizer."""
    folder = tmp_path_factory.mktemp("mistral") / "task"
    last_digit.prepare(folder, seed=0, worked_share=0.35)
    model = folder / "model"
    fields = json.loads((model / "config.json").read_text())
    config = transformers.MistralConfig(
        vocab_size=fields["vocab_size"], hidden_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96,
        max_position_embeddings=256, sliding_window=None, dtype="float32",
        **{name: fields.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )  # fmt: skip
    tokenizer = {file.name for file in model.iterdir() if "token" in file.name}
    shutil.move(model, folder / "before")
    save_random_checkpoint(config, model)
    for file in (folder / "before").iterdir():
        if file.name in tokenizer or file.suffix == ".jinja":
            shutil.copy(file, model / file.name)
    return folder


@pytest.mark.parametrize(
    ("method", "transport"),
    [
        ("disaggregated", "examples/file_transport.py:FileTransport"),
        ("disaggregated", "process_group"),
        ("full_export", "process_group"),
    ],
    ids=["over files", "disaggregated", "full_export"],
)
def test_servers_verify_the_weights_of_a_users_family(task, method, transport, tmp_path):
    settings = (
        "model.family=examples/my_family.py:FAMILY", f"model.path={task / 'model'}",
        f"data.train_file={task / 'train.parquet'}", "data.max_prompt_tokens=64",
        f"weight_sync.method={method}", f"weight_sync.transport={transport}",
        "weight_sync.verify=full", "actor.layout.tp=2",
        "rollout.max_response_tokens=16", "rollout.kv_cache_bytes=83886080",
        "trainer.num_steps=2", "trainer.prompts_per_step=8", "algorithm.group_size=2",
        "evaluation.before=false",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli.main", "rl", *settings, f"output_dir={tmp_path}/run"],
        capture_output=True, text=True, timeout=500, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = mcore_rl.load_run(tmp_path / "run")
    assert [row["step"] for row in result.metrics] == [1, 2]
    assert all(row["max_logprob_gap"] < 1e-3 for row in result.metrics)
    exported = json.loads((result.checkpoint / "config.json").read_text())
    assert exported["architectures"] == ["MistralForCausalLM"]
