"""Both sides of a transport in one process, a thread for each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import WeightUpdate, connect

T = TypeVar("T")
CPU = torch.device("cpu")


def save_model(folder: Path) -> Path:
    model = tiny_models.build_from(tiny_families.served_config("qwen3_moe"))
    return tiny_families.save_served(model, folder)


class Route:
    """Training ranks 0 and 1 (tp=2), generation ranks 0 and 1 (tp=2) behind them."""

    def __init__(self, checkpoint: Path, transport: str, timeout_s: float = 10.0) -> None:
        self.training, self.generation = Layout(tp=2), GenerationLayout(tp=2)
        self.settings = WeightSyncConfig(
            method="disaggregated",
            transport=transport,
            bucket_bytes=16 << 10,
            verify="full",
            timeout_s=timeout_s,
        )
        self.reader = CheckpointReader(checkpoint)
        config = self.reader.config()
        trained, self.served = reshard_jobs.sides(config, self.training, self.generation)
        self.weights = [
            LocalWeights(reshard_jobs.filled(trained, rank, self.reader.read)) for rank in range(2)
        ]
        self.rendezvous = RendezvousServer("127.0.0.1")
        endpoint = self.rendezvous.endpoint
        spec = TransferSpec(self.training, 0, self.generation, "float32", self.settings)
        assert TransferSpec.from_dict(spec.to_dict()) == spec
        self.ends = together(
            [lambda r=r: connect(spec, endpoint, config, r, CPU) for r in range(4)]
        )

    def send(self, version: int, rank: int) -> None:
        self.ends[rank].send(self.weights[rank], WeightUpdate(version))

    def receive(self, version: int, rank: int) -> dict[str, torch.Tensor]:
        """All parameters of a generation rank, NaN where nothing came."""
        found = reshard_jobs.filled(self.served, rank, lambda block: torch.tensor(torch.nan))
        for boxes in self.ends[2 + rank].receive(WeightUpdate(version)):
            for box in boxes:
                slices = tuple(
                    slice(o, o + n) for o, n in zip(box.offset, box.data.shape, strict=True)
                )
                found[box.target][slices] = box.data
        return found

    def wanted(self, rank: int) -> dict[str, torch.Tensor]:
        """The same, out of the checkpoint; NaN is padding of the vocabulary."""
        return reshard_jobs.filled(self.served, rank, self.reader.read)


def together(calls: list[Callable[[], T]]) -> list[T]:
    """What the calls return, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]
