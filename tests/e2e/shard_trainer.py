"""A program: one training rank of several, which sends shards to a server by each transport.

    python shard_trainer.py RANK WORLD DP TP CHECKPOINT FOLDER VERSION...

The ranks split the model over tp; the server has DP data-parallel ranks of TP workers. For each
transport rank 0 writes a file into FOLDER, an endpoint and a spec, and all send two versions.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))

import reshard_jobs

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import WeightUpdate, connect

TRANSPORTS = ("process_group", "nixl")
_OPEN = []  # which stay while their groups live


def main(
    rank: int, world: int, generation: GenerationLayout, paths: list[Path], versions: list[int]
) -> None:
    """Send all versions by each transport, one transport after the other."""
    checkpoint, folder = paths
    reader = CheckpointReader(checkpoint)
    for number, transport in enumerate(TRANSPORTS):
        file = folder / f"{transport}.json"
        if rank == 0:
            write(file, transport, world, generation)
        while not file.exists():
            time.sleep(0.02)
        fields, spec_fields = json.loads(file.read_text())
        spec = TransferSpec.parse(spec_fields)
        training, _ = reshard_jobs.sides(reader.read_config(), spec.training, spec.generation)
        weights = LocalWeights(reshard_jobs.filled(training, rank, reader.read))
        endpoint, device = RendezvousEndpoint(**fields), torch.device("cpu")
        end = connect(spec, endpoint, reader.read_config(), rank, device)
        for version in versions[2 * number : 2 * number + 2]:
            end.send(weights, WeightUpdate(version))


def write(file: Path, transport: str, world: int, generation: GenerationLayout) -> None:
    """Write the arguments of both sides."""
    settings = WeightSyncConfig(
        method="disaggregated",
        transport=transport,
        bucket_bytes=32 << 10,
        verify="full",
        timeout_s=60,
    )
    spec = TransferSpec(Layout(tp=world), 0, generation, "float32", settings)
    _OPEN.append(RendezvousServer("127.0.0.1"))
    aside = file.with_suffix(".partial")
    aside.write_text(json.dumps([asdict(_OPEN[-1].endpoint), spec.to_dict()]))
    aside.rename(file)


if __name__ == "__main__":
    rank, world, dp, tp = map(int, sys.argv[1:5])
    layout = GenerationLayout(tp=tp, dp=dp, ep=dp * tp)
    main(rank, world, layout, [Path(p) for p in sys.argv[5:7]], [int(v) for v in sys.argv[7:]])
