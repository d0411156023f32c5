"""Shards through files: what is in them, who waits for whom, and what is refused.

Real servers take versions this way in e2e/test_rollout_server.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))

import reshard_jobs
import tiny_families
import tiny_models

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.checkpoint_engine import RoutePlan
from mcore_rl.weight_sync.connection import StreamError
from mcore_rl.weight_sync.disaggregated import checkpoint_engine, endpoint_of
from mcore_rl.weight_sync.disk import FolderEndpoint

TRAINING, GENERATION = Layout(tp=2), GenerationLayout(tp=2)
CPU = torch.device("cpu")


class Route:
    """Two ranks of either side in one process: on disk nobody has to be there at the same time."""

    def __init__(self, checkpoint: Path, folder: Path, timeout_s: float) -> None:
        settings = WeightSyncConfig(
            transport="disk", bucket_bytes=16 << 10, verify="full", timeout_s=timeout_s
        )
        plan = RoutePlan(TRAINING, 0, GENERATION, "float32", settings)
        reader = CheckpointReader(checkpoint)
        training, self.served = reshard_jobs.sides(reader.config(), TRAINING, GENERATION)
        self.read = reader.read
        self.weights = [
            LocalWeights(reshard_jobs.filled(training, rank, reader.read)) for rank in range(2)
        ]
        fields = {"path": str(folder), "timeout_s": timeout_s}
        endpoint = endpoint_of(RoutePlan.from_dict(plan.to_dict()), fields)
        assert endpoint == FolderEndpoint(str(folder), timeout_s)
        self.engines = [
            checkpoint_engine(endpoint, plan, reader.config(), rank, CPU) for rank in range(4)
        ]

    def send(self, version: int) -> None:
        for rank, weights in enumerate(self.weights):
            self.engines[rank].send_weights(weights, version)

    def receive(self, version: int, rank: int) -> dict[str, torch.Tensor]:
        """All parameters of a generation rank, NaN where nothing came."""
        found = reshard_jobs.filled(self.served, rank, lambda block: torch.tensor(torch.nan))
        for boxes in self.engines[2 + rank].receive_weights(version):
            for box in boxes:
                slices = tuple(
                    slice(o, o + n) for o, n in zip(box.offset, box.data.shape, strict=True)
                )
                found[box.target][slices] = box.data
        return found


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Any]:
    checkpoint = tiny_families.save_served(
        tiny_models.build_from(tiny_families.served_config("qwen3_moe")), tmp_path / "model"
    )
    folder = tmp_path / "weights"
    folder.mkdir()
    return lambda timeout_s=5.0: Route(checkpoint, folder, timeout_s)


def test_two_versions_arrive_whole_and_the_files_of_the_first_go_when_both_ranks_have_it(
    route, tmp_path
):
    sides = route()
    for version in (1, 2):
        sides.send(version)
        for rank in range(2):
            wanted = reshard_jobs.filled(sides.served, rank, sides.read)
            found = sides.receive(version, rank)
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                torch.testing.assert_close(
                    found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name
                )
        sent = sorted(file.name for file in (tmp_path / "weights").glob("*.safetensors"))
        assert sent == [f"version-{version}-from-{rank}.safetensors" for rank in range(2)]


def test_the_files_hold_each_byte_that_is_missing_once(route, tmp_path):
    sides = route()
    sides.send(1)
    wanted = [reshard_jobs.filled(sides.served, rank, sides.read) for rank in range(2)]
    files = [load_file(file) for file in (tmp_path / "weights").glob("*.safetensors")]
    sent = sum(t.numel() for file in files for n, t in file.items() if not n.endswith("crc32"))
    tensors = [tensor for rank in wanted for tensor in rank.values()]
    assert sent == sum(4 * int((~tensor.isnan()).sum()) for tensor in tensors)  # NaN: padding


def test_a_version_that_does_not_come_is_named_with_its_file(route):
    with pytest.raises(StreamError, match=r"version-7-from-\d\.safetensors of training rank \d"):
        route(0.1).receive(7, 0)


def test_a_file_with_a_flipped_bit_is_refused(route, tmp_path):
    sides = route()
    sides.send(1)
    for file in (tmp_path / "weights").glob("*.safetensors"):
        held = bytearray(file.read_bytes())
        held[-1] ^= 1
        file.write_bytes(held)
    with pytest.raises(ConfigError, match="is damaged: its checksum is"):
        for rank in range(2):
            sides.receive(1, rank)


def test_a_version_that_a_server_has_not_taken_stands_and_stops_the_next(route, tmp_path):
    sides = route(0.1)
    sides.send(1)
    sides.receive(1, 0)
    with pytest.raises(StreamError, match="version 1 was not taken by generation rank 1"):
        sides.send(2)
    assert len(list((tmp_path / "weights").glob("version-1-*"))) == 2


def test_a_folder_that_machines_do_not_share_is_refused(route, tmp_path):
    (tmp_path / "weights").rmdir()
    with pytest.raises(ConfigError, match=r"transport='disk': there is no folder"):
        route()
