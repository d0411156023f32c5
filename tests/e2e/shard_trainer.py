"""A program: one training rank of several, which sends shards to a server by each transport.

    python shard_trainer.py RANK WORLD CHECKPOINT FOLDER VERSION...

The ranks split the model over tp. For each transport rank 0 writes a file into FOLDER: an endpoint
and a plan, and carries two versions.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))

import reshard_jobs

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.checkpoint_engine import RoutePlan
from mcore_rl.weight_sync.disaggregated import checkpoint_engine, endpoint_of
from mcore_rl.weight_sync.disk import FolderEndpoint

TRANSPORTS = ("process_group", "nixl", "disk")
_OPEN = []  # which stay while their groups live


def main(rank: int, world: int, checkpoint: Path, folder: Path, versions: list[int]) -> None:
    """Every transport carries all of its versions before the next begins."""
    reader = CheckpointReader(checkpoint)
    for number, transport in enumerate(TRANSPORTS):
        file = folder / f"{transport}.json"
        if rank == 0:
            write(file, transport, world)
        while not file.exists():
            time.sleep(0.02)
        fields, plan_fields = json.loads(file.read_text())
        plan = RoutePlan.from_dict(plan_fields)
        training, _ = reshard_jobs.sides(reader.config(), plan.training, plan.generation)
        weights = LocalWeights(reshard_jobs.filled(training, rank, reader.read))
        endpoint, device = endpoint_of(plan, fields), torch.device("cpu")
        engine = checkpoint_engine(endpoint, plan, reader.config(), rank, device)
        for version in versions[2 * number : 2 * number + 2]:
            engine.send_weights(weights, version)


def write(file: Path, transport: str, world: int) -> None:
    """What both sides make their engines from: an endpoint and a plan."""
    settings = WeightSyncConfig(
        transport=transport, bucket_bytes=32 << 10, verify="full", timeout_s=60
    )
    plan = RoutePlan(Layout(tp=world), 0, GenerationLayout(tp=2, ep=2), "float32", settings)
    if transport == "disk":
        endpoint: Any = FolderEndpoint(str(file.parent), settings.timeout_s)
    else:
        _OPEN.append(RendezvousServer("127.0.0.1"))
        endpoint = _OPEN[-1].endpoint
    aside = file.with_suffix(".partial")
    aside.write_text(json.dumps([asdict(endpoint), plan.to_dict()]))
    aside.rename(file)


if __name__ == "__main__":
    rank, world, checkpoint, folder, *versions = sys.argv[1:]
    main(int(rank), int(world), Path(checkpoint), Path(folder), [int(v) for v in versions])
