"""A program: a trainer of one rank that stops in the middle of an update, and waits to be killed.

    python -m tests.e2e.dying_trainer CHECKPOINT VERSION

It prints an endpoint and a spec, and a line when it has stopped.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))
sys.path.insert(0, str(Path(__file__).parent))

import shards
import torch
import torch.distributed as dist

from mcore_rl.weight_sync import shared_memory
from mcore_rl.weight_sync.transport import WeightUpdate, connect

_describe_slice = shared_memory._describe_slice
_count = 0


def stopping(*arguments: Any) -> list[Any]:
    global _count
    _count += 1
    if _count == 12:
        print("half-way", flush=True)
        time.sleep(600)
    return _describe_slice(*arguments)


def main(checkpoint: Path, version: int) -> None:
    shared_memory._describe_slice = stopping
    trainer = shards.Trainer([checkpoint])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spec, endpoint = trainer.spec(), trainer.rendezvous.endpoint
    print(json.dumps([asdict(endpoint), spec.to_dict()]), flush=True)
    transport = connect(spec, endpoint, trainer.config, 0, torch.device("cpu"))
    transport.send(trainer.weights[0], WeightUpdate(version))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
