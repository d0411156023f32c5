"""A job whose model is on a hub, and whose data and result are at URLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.examples.tasks import last_digit
from tests.hub import serve_hub

CONVERSATION = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "#### 4"}]


pytestmark = pytest.mark.nightly  # tests/unit/jobs/test_remote_paths.py has the parts


# Under torchrun each rank reads the settings; on Ray the driver alone.
@pytest.mark.parametrize(
    "launcher",
    [[], ["torchrun", "--nproc-per-node", "2", "--no-python"]],
    ids=["ray", "torchrun"],
)
def test_sft_of_a_model_on_a_hub_is_exported_and_resumed_without_network(tmp_path, launcher):
    last_digit._write_model(tmp_path / "model", 0)
    (tmp_path / "model" / "code.py").write_text("raise SystemExit('code ran')\n")
    data, out = tmp_path / "train.jsonl", tmp_path / "out"
    data.write_text(f"{json.dumps({'messages': CONVERSATION})}\n" * 8)
    programs = Path(sys.executable).parent
    settings = [
        "model.path=hf:org/tiny", f"data.train_file=file://{data}", "data.max_tokens=64",
        "trainer.batch_size=4", "engine.layout.dp=2", "trainer.save_every=1", "resume=auto",
        "trainer.trackers=[]", f"output_dir={out}",
    ]  # fmt: skip

    def run(url: str, *more: str) -> str:
        line = [*launcher, "mcore-rl", "sft", *settings, *more]
        line = [str(programs / word) if word in ("torchrun", "mcore-rl") else word for word in line]
        environment = {
            **os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0", "MCORE_RL_CACHE": str(tmp_path / "cache"),
        }  # fmt: skip
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
        assert not done.returncode, done.stdout + done.stderr
        return done.stderr

    with serve_hub({"org/tiny": tmp_path / "model"}) as hub:
        first = run(
            hub.url, "trainer.num_steps=1", f"checkpoint.export_to=file://{tmp_path}/store/first"
        )
    assert first.count("fetching hf:org/tiny\n") == 1 == first.count(f"fetching file://{data}\n")
    assert set(hub.downloads) >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert "code.py" not in hub.downloads
    assert hub.downloads.count("model.safetensors") == 1
    run(
        "http://127.0.0.1:9",  # nothing listens
        "trainer.num_steps=2", f"checkpoint.export_to=file://{tmp_path}/store/second",
    )  # fmt: skip
    settings_of_run = json.loads((out / "config.json").read_text())
    assert settings_of_run["model"]["path"].startswith(str(tmp_path / "home"))
    assert settings_of_run["data"]["train_file"].startswith(str(tmp_path / "cache"))
    for name in ("first", "second"):
        exported = CheckpointReader(tmp_path / "store" / name)
        assert exported.get_shapes() == CheckpointReader(out / "checkpoint").get_shapes()
