"""Disk space for weights: how much a run needs, and where exports fall back to."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ModelConfig, RLConfig
from mcore_rl.controller.dispatch import RemoteMethod
from mcore_rl.controller.worker_process import WorkerInfo
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.jobs import disk_space
from mcore_rl.jobs.disk_space import (
    check_disk_space,
    compute_critic_bytes,
    compute_export_bytes,
    compute_weight_bytes,
    export_to_any_disk,
    export_weights,
)
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.jobs.run_plan import plan_run

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 128, "hidden_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "intermediate_size": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip
# By hand: embedding and head 2 * 128 * 8, the last norm 8; a layer has two norms 2 * 8, q and o
# 2 * 8 * 8, k and v 2 * 4 * 8, the norms of q and k 2 * 2, the MLP 3 * 16 * 8.
PARAMETERS = 2 * 128 * 8 + 8 + 2 * (16 + 128 + 64 + 4 + 384)
WEIGHT_BYTES = 2 * PARAMETERS  # bytes of the weights in bfloat16
CRITIC_BYTES = (
    WEIGHT_BYTES - 2 * 128 * 8 + 2 * (8 + 1)
)  # without the head, with the value head and its bias


def config(folder: Path) -> RLConfig:
    (folder / "config.json").write_text(json.dumps(DENSE))
    made = RLConfig(output_dir="out", model=ModelConfig(path=str(folder), dtype="bfloat16"))
    made.rollout.num_servers = 3
    return made


def with_warm_start(config: RLConfig) -> None:
    config.warm_start.num_steps = 1


def with_training_checkpoints(config: RLConfig) -> None:
    """Save two and one being written: 2 bytes, 4 in float32 and 8 of Adam per parameter."""
    config.trainer.save_every = 5


def with_a_critic(config: RLConfig) -> None:
    with_training_checkpoints(config)
    config.algorithm.advantage = "gae"


def with_exports(config: RLConfig) -> None:
    """Export after steps 3, 6 and 9."""
    config.trainer.num_steps, config.checkpoint.hf_every = 10, 3


def with_files_on_the_way(config: RLConfig) -> None:
    config.weight_sync.method = "full_export"


@pytest.mark.parametrize(
    ("change", "copies", "parts"),
    [
        (lambda config: None, 1, "the checkpoint)"),
        (with_warm_start, 2, "the warm start's)"),
        (with_training_checkpoints, 1 + 3 * 7, "training checkpoints)"),
        (
            with_a_critic,
            1 + 3 * 7 * (1 + CRITIC_BYTES / WEIGHT_BYTES),
            "training checkpoints of the critic)",
        ),
        (with_exports, 1 + 3, "exports)"),
        (with_files_on_the_way, 2, "weights exported for the servers)"),
    ],
)
def test_check_disk_space_counts_all_that_a_run_writes_at_a_time(
    tmp_path, monkeypatch, change, copies, parts
):
    rl_config = config(tmp_path)
    change(rl_config)
    free = SimpleNamespace(free=round(copies * WEIGHT_BYTES))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    check_disk_space(rl_config, plan_run(rl_config), tmp_path)
    free.free -= 1
    with pytest.raises(ConfigError, match=r"^output_dir='out' has .* left; needed are") as raised:
        check_disk_space(rl_config, plan_run(rl_config), tmp_path)
    assert str(raised.value).endswith(parts)


def test_export_bytes_leave_out_existing_and_past_exports(tmp_path):
    rl_config = config(tmp_path)
    with_exports(rl_config)
    assert compute_export_bytes(rl_config, WEIGHT_BYTES, tmp_path, done=3) == {
        "exports": 2 * WEIGHT_BYTES
    }
    (tmp_path / "hf" / "step_000006").mkdir(parents=True)  # is replaced
    assert compute_export_bytes(rl_config, WEIGHT_BYTES, tmp_path, done=3) == {
        "exports": WEIGHT_BYTES
    }
    assert compute_export_bytes(rl_config, WEIGHT_BYTES, tmp_path, done=9) == {}


def test_critic_bytes_are_those_of_its_checkpoint(tmp_path):
    rl_config = config(tmp_path)
    larger = tmp_path / "larger"
    larger.mkdir()
    (larger / "config.json").write_text(json.dumps(DENSE | {"vocab_size": 256}))
    rl_config.algorithm.advantage = "gae"
    assert compute_critic_bytes(plan_run(rl_config)["critic"]) == CRITIC_BYTES
    rl_config.critic.model_path = str(larger)
    assert compute_critic_bytes(plan_run(rl_config)["critic"]) == CRITIC_BYTES + 2 * 128 * 8


def test_a_router_s_bias_stays_in_float32():
    path = str(find_published("DeepSeek-V3"))
    rl_config = RLConfig(model=ModelConfig(path=path, dtype="bfloat16"))
    in_float32 = RLConfig(model=ModelConfig(path=path, dtype="float32"))
    biases = 59 * 256  # expert layers, the one for prediction too, and the experts of each
    assert 2 * compute_weight_bytes(rl_config) - compute_weight_bytes(in_float32) == 4 * biases


class Model:
    """A group whose rank 0 writes to the folders that it is given room in."""

    def __init__(self, host: str, *full: str) -> None:
        self.host, self.full, self.exports = host, full, []

    def call(self, method: RemoteMethod[..., Any], path: str, num_bytes: int) -> list[str]:
        assert method is ModelWorker.export
        self.exports.append((Path(path), num_bytes))
        return [f"full: {path}" if path.startswith(self.full) else "", "another rank's"]

    @property
    def worker_infos(self) -> dict[int, WorkerInfo]:
        return {
            rank: WorkerInfo(host, "", 0, "") for rank, host in enumerate((self.host, "elsewhere"))
        }


@pytest.fixture
def places(monkeypatch, tmp_path) -> tuple[str, str]:
    """Fallback folders of exports: a disk, then memory."""
    disk, memory = str(tmp_path / "disk"), "/dev/shm"
    monkeypatch.setattr(disk_space, "_FALLBACK_DIRS", (disk, memory))
    return disk, memory


def test_export_writes_to_its_path(places):
    model = Model(socket.gethostname())
    path = Path("/runs/out/checkpoint")
    assert export_to_any_disk(model, path, 7) == (path, f"the weights are in {path}")
    export_weights(model, path, 7)
    assert model.exports == [(path, 7)] * 2


def test_export_to_a_full_disk_fails_with_reason_and_fallback_folder(places):
    model = Model(socket.gethostname(), "/runs", places[0])
    with pytest.raises(RunFailed) as raised:
        export_weights(model, Path("/runs/out/checkpoint"), 7)
    place = model.exports[-1][0]
    assert place.parent.parent == Path("/dev/shm") and place.parent.name.startswith("out-")
    assert [path.name for path, _ in model.exports] == ["checkpoint"] * 3
    assert str(raised.value) == (
        f"full: /runs/out/checkpoint; the weights are in {place} (in memory: gone when it restarts)"
    )


def test_export_names_the_host_of_the_weights(places):
    model = Model("node-7", "/runs")
    place, message = export_to_any_disk(model, Path("/runs/out/checkpoint"), 7)
    assert message.endswith(f"; the weights are in {place} on host node-7")


def test_export_without_any_space_says_that_weights_are_lost(places):
    model = Model(socket.gethostname(), "/")
    with pytest.raises(RunFailed, match=r"^full: /runs/.*; full: .*; the weights are lost$"):
        export_weights(model, Path("/runs/out/checkpoint"), 7)
