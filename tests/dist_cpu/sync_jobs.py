"""What training ranks run for test_shard_sync.py: two versions of the weights to each server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import ranks
import torch
import torch.distributed as dist

from mcore_rl.checkpoint.hf_writer import write_checkpoint
from mcore_rl.config.schema import WeightSyncConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.shards import (
    Places,
    ShardRoute,
    generation_side,
    plan_colocated,
    training_side,
)

BUCKET_BYTES = 32 << 10  # rows of the tiny models are cut, and there are some dozen buckets


def serve_syncs(
    spec: EngineSpec,
    servers: Mapping[str, GenerationLayout],
    key: str,
    folder: Path,
    exported: Path,
) -> ranks.Result:
    """Version 1 has weights times -2, version 2 times 4, which are exported as well."""
    engine = ranks.started(spec)
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = WeightSyncConfig(bucket_bytes=BUCKET_BYTES, verify="full", timeout_s=60)
    routes = {}
    for name, layout in servers.items():
        places = Places(("here",) * world, ("here",) * layout.world_size, world)
        _, generation = generation_side(engine.hf_config, layout)
        training = training_side(engine.hf_config, engine.layout, engine.num_mtp_layers)
        plan = plan_colocated(training, generation, places, 4)
        route = ShardRoute(plan, dist.group.WORLD, engine.device, torch.float32, settings)
        routes[name] = route
        if endpoint := route.endpoint:
            file = folder / f"{key}-{name}-{endpoint.generation_rank}.json"
            file.with_suffix(".partial").write_text(json.dumps(astuple(endpoint)))
            file.with_suffix(".partial").rename(file)
    for version in (1, 2):
        with torch.no_grad():
            for tensor in (t for c in engine.chunks for t in (*c.parameters(), *c.buffers())):
                tensor.mul_(-2)
        for route in routes.values():
            route.send(engine.local_weights(), version)
    if not exported.exists():
        tensors = engine.get_per_tensor_param()
        if rank == 0:
            write_checkpoint(exported, tensors, reference=spec.model.path)
        else:
            assert list(tensors) == []
    dist.barrier()
    return {}
