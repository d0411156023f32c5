"""A server that takes all tensors of a checkpoint, whole: they arrive as the trainer has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import routes

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError, PeerError, StateError
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.reshard.executor import LocalWeights, ReceivedSlice
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.testing.trainer_rank import fill_parameters
from mcore_rl.weight_sync import receiver as receiver_module
from mcore_rl.weight_sync.receiver import TensorReceiver
from mcore_rl.weight_sync.spec import TransferSpec, build_training_side
from mcore_rl.weight_sync.transport import WeightUpdate, connect
from tests.nightly import all_but

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2),
    "tp2ep2": Layout(tp=2, ep=2),
    "pp2vpp2": Layout(pp=2, vpp=2),
    "tp2etp2": Layout(tp=2, etp=2),
}
FAMILIES = (
    "qwen2", "qwen3", "qwen3_moe", "llama", "mixtral", "deepseek_v3", "glm4_moe", "glm4_moe_lite",
)  # fmt: skip
CASES = all_but(
    [("qwen3", "tp2"), ("qwen3_moe", "tp2ep2"), ("deepseek_v3", "pp2vpp2")],
    [
        (family, layout)
        for family in FAMILIES
        for layout in LAYOUTS
        if ("ep" not in layout and "etp" not in layout) or family not in ("qwen2", "qwen3", "llama")
    ],
)


class Trainers:
    """Training ranks of a checkpoint, and receivers of the given number of servers."""

    def __init__(self, path: Path, layout: Layout, num_servers: int = 1) -> None:
        self.reader = CheckpointReader(path)
        self.config = self.reader.read_config()
        settings = WeightSyncConfig(
            method="disaggregated", verify="full", bucket_bytes=16 << 10, timeout_s=30.0
        )
        self.spec = TransferSpec(
            layout,
            0,
            GenerationLayout(dp=num_servers),
            "float32",
            settings,
            weight_format="huggingface",
        )
        assert TransferSpec.parse(self.spec.to_dict()) == self.spec
        side = build_training_side(self.config, layout, 0)
        self.weights = [
            LocalWeights(fill_parameters(side, rank, self.reader.read))
            for rank in range(layout.world_size)
        ]
        self.receivers = [TensorReceiver(str(path), routes.CPU) for _ in range(num_servers)]
        self.rendezvous = RendezvousServer("127.0.0.1")
        endpoint = self.rendezvous.endpoint
        connects: list[Any] = [
            lambda rank=rank: connect(self.spec, endpoint, self.config, rank, routes.CPU)
            for rank in range(layout.world_size)
        ]
        connects += [
            lambda rank=rank, r=r: r.connect(endpoint, self.spec, rank)
            for rank, r in enumerate(self.receivers)
        ]
        self.transports = routes.run_together(connects)[: layout.world_size]

    def push(self, version: int) -> list[Any]:
        """Return what each receiver gets, or the error that it raises."""
        calls: list[Any] = [
            lambda t=t, w=w: t.send(w, WeightUpdate(version))
            for t, w in zip(self.transports, self.weights, strict=True)
        ]
        calls += [lambda r=r: r.receive(version) for r in self.receivers]
        futures = routes.run_to_end(calls)[len(self.transports) :]
        return [future.exception() or future.result() for future in futures]

    def close(self) -> None:
        for end in (*self.transports, *self.receivers):
            end.close()
        self.rendezvous.close()


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Trainers]:
    made = Trainers(routes.save_model(tmp_path / "model", "qwen3"), Layout(tp=2))
    yield made
    made.close()


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_all_tensors_of_a_checkpoint_arrive_bit_for_bit(tmp_path, family, layout):
    path = routes.save_model(tmp_path / "model", family)
    trainers = Trainers(path, LAYOUTS[layout], num_servers=2)
    for tensors in trainers.push(1):
        assert tensors.keys() == trainers.reader.get_shapes().keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                tensor, trainers.reader.read_tensor(name), rtol=0, atol=0, msg=name
            )
    trainers.close()


def test_a_bit_that_flips_is_an_error_with_its_tensor(trainers, monkeypatch):
    write = receiver_module.write_slices

    def flip(slices: list[ReceivedSlice], *args: Any) -> None:
        slices[0].data.view(torch.uint8).flatten()[5] ^= 1
        write(slices, *args)

    monkeypatch.setattr(receiver_module, "write_slices", flip)
    [outcome] = trainers.push(1)
    assert isinstance(outcome, RuntimeError) and not isinstance(outcome, PeerError)
    expected = r"version 1: model\.\S+, box at .* training rank \d: the checksum on generation rank"
    with pytest.raises(RuntimeError, match=expected):
        raise outcome


def test_a_slice_that_does_not_come_is_an_error_with_its_tensor(trainers, monkeypatch):
    write = receiver_module.write_slices

    def lose(slices: list[ReceivedSlice], *args: Any) -> None:
        slices.pop()
        write(slices, *args)

    monkeypatch.setattr(receiver_module, "write_slices", lose)
    [outcome] = trainers.push(1)
    with pytest.raises(RuntimeError, match=r"version 1: \d+ tensors did not arrive completely: "):
        raise outcome


def test_a_receiver_is_connected_first_to_a_trainer_that_sends_whole_tensors(trainers, tmp_path):
    receiver = TensorReceiver(str(tmp_path / "model"), routes.CPU)
    with pytest.raises(StateError, match="the server is connected to no trainer"):
        receiver.receive(1)
    shards = TransferSpec(Layout(), 0, GenerationLayout(), "float32", trainers.spec.settings)
    with pytest.raises(ConfigError, match=r"sends weights in the layout 'vllm'; .* 'huggingface'"):
        receiver.connect(trainers.rendezvous.endpoint, shards, 0)
