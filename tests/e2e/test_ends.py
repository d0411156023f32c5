"""What a run leaves when its disk is full, or when its cluster has too little."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from safetensors.torch import load_file

from mcore_rl.controller.pool import ray_session
from tests.e2e.test_kill import TRAINING, is_training


def test_a_disk_that_is_full_in_the_end_costs_no_weights(start_job, own_model_and_data):
    """Of two ranks, the one that does not write among them."""
    settings = (*TRAINING, "actor.layout.tp=2", "actor.layout.ep=2", "trainer.num_steps=2")
    job = start_job(*own_model_and_data, *settings, disk="24m")
    inside = Path(f"/proc/{job.process.pid}/root{job.output}")
    job.wait_until(lambda: is_training(job, inside), "the first step")
    with (inside / "filler").open("wb") as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(1 << 16))
            filler.flush()
    assert job.process.wait() == 1
    assert job.stderr.startswith("mcore-rl rl: ") and job.stderr.count("\n") == 1
    assert "No space left on device" in job.stderr
    [place] = re.findall(r"the weights are in (\S+)", job.stderr)
    assert Path(place).is_relative_to(job.temp)
    assert Path(place).parent.stat().st_mode & 0o777 == 0o700
    found = load_file(Path(place) / "model.safetensors")
    model = next(s for s in own_model_and_data if s.startswith("model.path")).partition("=")[2]
    start = load_file(Path(model) / "model.safetensors")
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in start.items()}
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert (Path(place) / "tokenizer.json").exists()
    assert job.left() == [str(Path(place).parent)]


def test_a_cluster_without_the_resource_is_refused_at_once_and_leaves_no_folder(
    own_model_and_data, tmp_path
):
    with ray_session(object_store_bytes=100 << 20, log_to_driver=False):
        address = ray.get_runtime_context().gcs_address
        done = subprocess.run(
            [
                Path(sys.executable).with_name("mcore-rl"), "rl", "recipe=quickstart",
                *own_model_and_data, *TRAINING, f"output_dir={tmp_path / 'runs' / 'out'}",
            ],
            env=os.environ | {"RAY_ADDRESS": address},
            capture_output=True,
            text=True,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"mcore-rl rl: the Ray cluster at RAY_ADDRESS='{address}' has too little of what the run "
        "needs: 2 of 'rank' (it has 0); use a smaller layout, or start nodes with more (ray start "
        "--resources)\n"
    )
    assert list(tmp_path.iterdir()) == []
