"""A program: one training rank of several, which sends shards to a server that joins its group.

    python shard_trainer.py RANK WORLD CHECKPOINT MEETING_POINT VERSION...

The ranks split the model over tp. Rank 0 writes the file MEETING_POINT: an endpoint and a plan.
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
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.disaggregated import (
    GroupEndpoint,
    GroupEngine,
    GroupPlan,
    MeetingPoint,
)


def main(rank: int, world: int, checkpoint: Path, meeting: Path, versions: list[int]) -> None:
    settings = WeightSyncConfig(bucket_bytes=32 << 10, verify="full", timeout_s=60)
    generation = GenerationLayout(tp=2, ep=2)
    plan = GroupPlan(Layout(tp=world), 0, generation, "float32", settings)
    if rank == 0:
        point = MeetingPoint("127.0.0.1", "secret", settings.timeout_s)
        aside = meeting.with_suffix(".partial")
        aside.write_text(json.dumps([asdict(point.endpoint), plan.to_dict()]))
        aside.rename(meeting)
    while not meeting.exists():
        time.sleep(0.02)
    endpoint = GroupEndpoint(**json.loads(meeting.read_text())[0])
    reader = CheckpointReader(checkpoint)
    training, _ = reshard_jobs.sides(reader.config(), plan.training, generation)
    weights = LocalWeights(reshard_jobs.filled(training, rank, reader.read))
    engine = GroupEngine(endpoint, plan, reader.config(), rank, torch.device("cpu"))
    for version in versions:
        engine.send_weights(weights, version)


if __name__ == "__main__":
    rank, world, checkpoint, meeting, *versions = sys.argv[1:]
    main(int(rank), int(world), Path(checkpoint), Path(meeting), [int(v) for v in versions])
