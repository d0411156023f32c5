"""Both sides of a transport in one process, a thread for each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))

import reshard_jobs
import tiny_families
import tiny_models

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec, build_generation_side
from mcore_rl.weight_sync.transport import WeightUpdate, connect

T = TypeVar("T")
CPU = torch.device("cpu")


def build_newer_update(version: int) -> WeightUpdate:
    """Return an update of a sender that supports a newer format."""
    update = WeightUpdate(version)
    object.__setattr__(update, "format", "delta")
    return update


def save_model(folder: Path, family: str = "qwen3_moe") -> Path:
    """Save a model of four layers: two stages of two chunks each."""
    config = tiny_families.served_config(family)
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types[: 2 if family == "gpt_oss" else None] * 4)[:4]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["dense", *["sparse"] * 3]
    return tiny_families.save_served(tiny_models.build_from(config), folder)


class Route:
    """Training ranks and generation ranks of a transport; by default two of each."""

    def __init__(
        self,
        checkpoint: Path,
        transport: str,
        timeout_s: float = 10.0,
        training: Layout | None = None,
        generation: GenerationLayout | None = None,
        bucket_bytes: int = 16 << 10,
        quantization: str | None = None,
        dtype: str = "float32",
    ) -> None:
        self.training = training or Layout(tp=2)
        self.generation = generation or GenerationLayout(tp=2)
        self.settings = WeightSyncConfig(
            method="disaggregated",
            transport=transport,
            bucket_bytes=bucket_bytes,
            verify="full",
            timeout_s=timeout_s,
        )
        self.reader = CheckpointReader(checkpoint)
        config = self.reader.read_config()
        trained, _ = reshard_jobs.sides(config, self.training, self.generation)
        _, self.served = build_generation_side(config, self.generation, quantization=quantization)
        self.weights = [
            LocalWeights(
                {
                    name: tensor.to(getattr(torch, dtype))
                    for name, tensor in reshard_jobs.filled(trained, rank, self.reader.read).items()
                }
            )
            for rank in range(self.training.world_size)
        ]
        self.rendezvous = RendezvousServer("127.0.0.1")
        endpoint = self.rendezvous.endpoint
        spec = TransferSpec(
            self.training, 0, self.generation, dtype, self.settings, quantization=quantization
        )
        assert TransferSpec.parse(spec.to_dict()) == spec
        self.ends = run_together(
            [lambda r=r: connect(spec, endpoint, config, r, CPU) for r in range(spec.world_size)]
        )

    def send(self, version: int, rank: int, update: WeightUpdate | None = None) -> None:
        self.ends[rank].send(self.weights[rank], update or WeightUpdate(version))

    def receive(self, version: int, rank: int) -> dict[str, torch.Tensor]:
        """Receive all parameters of a generation rank, NaN where nothing arrived."""
        parameters = reshard_jobs.filled(self.served, rank, lambda block: torch.tensor(torch.nan))
        for boxes in self.ends[self.training.world_size + rank].receive(WeightUpdate(version)):
            for box in boxes:
                slices = tuple(
                    slice(o, o + n) for o, n in zip(box.offset, box.data.shape, strict=True)
                )
                assert parameters[box.target][slices].isnan().all(), f"{box.target} comes twice"
                parameters[box.target][slices] = box.data
        return parameters

    def sync(self, versions: Sequence[int]) -> list[list[dict[str, torch.Tensor]]]:
        """Return the parameters of each version on each generation rank; ranks run concurrently."""

        def send(rank: int) -> list[dict[str, torch.Tensor]]:
            for version in versions:
                self.send(version, rank)
            return []

        def receive(rank: int) -> list[dict[str, torch.Tensor]]:
            return [self.receive(version, rank) for version in versions]

        num_training = self.training.world_size
        calls = [partial(send, rank) for rank in range(num_training)]
        calls += [partial(receive, rank) for rank in range(self.generation.world_size)]
        return run_together(calls)[num_training:]

    def read_expected(self, rank: int) -> dict[str, torch.Tensor]:
        """Read the parameters of a generation rank from the checkpoint; padding is NaN."""
        return reshard_jobs.filled(self.served, rank, self.reader.read)


def run_together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run each call in a thread; return the results."""
    return [future.result() for future in run_to_end(calls)]


def run_to_end(calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [threads.submit(call) for call in calls]
