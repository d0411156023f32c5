"""Files that a run leaves when its disk is full, or its cluster has too little."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from safetensors.torch import load_file

from tests.e2e.test_kill import TRAINING, is_training


@pytest.mark.nightly
def test_a_disk_that_is_full_in_the_end_costs_no_weights(start_job, user_task_settings):
    # Of two ranks, the one that does not write among them.
    settings = (
        *TRAINING,
        "actor.layout.tp=2",
        "actor.layout.ep=2",
        "trainer.num_steps=2",
        "actor.optimizer.warmup_steps=0",
    )
    job = start_job(*user_task_settings, *settings, disk="24m")
    inside = Path(f"/proc/{job.process.pid}/root{job.output}")
    job.wait_until(lambda: is_training(job, inside), "the first step")
    with (inside / "filler").open("wb") as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(1 << 16))
            filler.flush()
    assert job.process.wait() == 1
    # A model that earns nothing yet has steps that teach nothing, and tables find no room either.
    *warnings, error = job.stderr.splitlines()
    assert all(line.startswith("mcore-rl: warning: ") for line in warnings)
    assert error.startswith("mcore-rl rl: ") and "No space left on device" in error
    [place] = re.findall(r"the weights are in (\S+)", error)
    assert Path(place).is_relative_to(job.temp)
    assert Path(place).parent.stat().st_mode & 0o777 == 0o700
    tensors = load_file(Path(place) / "model.safetensors")
    model = next(s for s in user_task_settings if s.startswith("model.path")).partition("=")[2]
    start = load_file(Path(model) / "model.safetensors")
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in start.items()}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert (Path(place) / "tokenizer.json").exists()
    assert job.left() == [str(Path(place).parent)]


JOINS = """
import sys
from pathlib import Path
import ray
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import register
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup

class Worker:
    def __init__(self):
        print("born", flush=True)

    @register()
    def say(self, word):
        print(word, file=sys.stderr)

if __name__ == "__main__":
    with ray_session(log_to_driver=False):
        for name, log_dir in (("here", sys.argv[1]), ("nowhere", "/nowhere")):
            with (
                ResourcePool(1, {"CPU": 0.5}, log_dir=Path(log_dir)) as pool,
                WorkerGroup(
                    Worker, layout=Layout(), pool=pool, timeouts=TimeoutsConfig(), name=name
                ) as group,
            ):
                group.call(Worker.say, f"a word from {name}")
        print("ready", flush=True)
        input()
"""


def test_on_a_joined_cluster_ranks_print_into_the_folder_of_the_run_where_there_is_one(
    cluster, tmp_path
):
    script, logs = tmp_path / "driver.py", tmp_path / "logs"
    script.write_text(JOINS)
    logs.mkdir()
    driver = subprocess.Popen(
        [sys.executable, script, logs],
        env=os.environ | {"RAY_ADDRESS": cluster, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    driver.kill()
    driver.communicate()
    ray_logs = Path(ray._private.worker._global_node.get_logs_dir_path()).glob("worker-*.err")
    printed = "".join(file.read_text() for file in ray_logs)
    lines = (logs / "here-0.log").read_text().splitlines()
    assert [line for line in lines if "actor_name" not in line] == ["born", "a word from here"]
    assert "/nowhere/nowhere-0.log cannot be written, so this is the log" in printed
    assert "a word from nowhere" in printed
    assert "a word from here" not in printed


def test_a_cluster_without_the_resource_is_refused_at_once_and_leaves_no_folder(
    cluster, user_task_settings, tmp_path
):
    done = subprocess.run(
        [
            Path(sys.executable).with_name("mcore-rl"), "rl", "recipe=quickstart",
            *user_task_settings, *TRAINING, f"output_dir={tmp_path / 'runs' / 'out'}",
        ],
        env=os.environ | {"RAY_ADDRESS": cluster},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"mcore-rl rl: the Ray cluster at RAY_ADDRESS='{cluster}' has too little of what the run "
        "needs: 1 of 'rank' (it has 0); allowed: a smaller layout, or nodes with more (ray start "
        "--resources)\n"
    )
    assert list(tmp_path.iterdir()) == []
