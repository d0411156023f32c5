"""A push of all weights to another process on the same GPU, through memory of CUDA IPC.

The receiver stands for a vLLM worker: it copies each slice into parameters of vLLM's layout and
compares them with the checkpoint. Four layers of Qwen3-30B-A3B, unverified, sampled and in full.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import measure
import reshard_jobs
import torch

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig, WeightSyncConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import WeightUpdate, connect

VERSIONS = 3  # of each way to verify


def receive(path: Path, endpoint: RendezvousEndpoint, spec: TransferSpec) -> None:
    """Take every version as a vLLM worker would; exit with an error if any element differs."""
    device = measure.device()
    reader = CheckpointReader(path)
    config = reader.read_config()
    _, served = reshard_jobs.sides(config, Layout(), GenerationLayout())
    expected = reshard_jobs.filled(served, 0, reader.read)
    parameters = {
        name: torch.full(tensor.shape, torch.nan, dtype=torch.bfloat16, device=device)
        for name, tensor in expected.items()
    }
    transport = connect(spec, endpoint, config, 1, device)
    for version in range(1, VERSIONS + 1):
        for slices in transport.receive(WeightUpdate(version)):
            for piece in slices:
                ends = (o + n for o, n in zip(piece.offset, piece.data.shape, strict=True))
                where = tuple(slice(o, e) for o, e in zip(piece.offset, ends, strict=True))
                parameters[piece.target][where].copy_(piece.data)
    transport.close()
    for name, tensor in expected.items():
        assert torch.equal(parameters[name].cpu().nan_to_num(7), tensor.bfloat16().nan_to_num(7)), (
            f"{name} arrived with other elements"
        )


def push(engine: MegatronEngine, path: Path, verify: str) -> list[float]:
    """Send VERSIONS updates to a process of its own; return the seconds of each."""
    settings = WeightSyncConfig(verify=verify, timeout_s=60)
    spec = TransferSpec(Layout(), 0, GenerationLayout(), "bfloat16", settings)
    rendezvous = RendezvousServer("127.0.0.1")
    orders = json.dumps([str(path), asdict(rendezvous.endpoint), spec.to_dict()])
    receiver = subprocess.Popen(
        [sys.executable, __file__, "--receive"], stdin=subprocess.PIPE, text=True
    )
    assert receiver.stdin is not None
    receiver.stdin.write(orders)
    receiver.stdin.close()
    seconds = []
    try:
        transport = connect(spec, rendezvous.endpoint, engine.hf_config, 0, engine.device)
        for version in range(1, VERSIONS + 1):
            start = time.perf_counter()
            transport.send(engine.get_local_weights(), WeightUpdate(version))
            seconds.append(time.perf_counter() - start)
        assert receiver.wait(60) == 0, "the receiver failed"
        transport.close()
    finally:
        receiver.kill()
    return seconds


def check(arguments: argparse.Namespace) -> measure.Result:
    measure.join_alone()
    result: measure.Result = {}
    with tempfile.TemporaryDirectory() as folder:
        path = measure.make_checkpoint(measure.qwen3_30b(4, arguments.dry), Path(folder))
        spec = EngineSpec(ModelConfig(str(path), "bfloat16"), EngineConfig(), seed=0)
        engine = MegatronEngine(spec)
        engine.initialize()
        gb = engine.memory_report().parameters_bytes / 1e9
        for verify in ("off", "sampled", "full"):
            seconds = push(engine, path, verify)
            result[verify] = {"gb": gb, "s": seconds, "gb_per_s": gb / min(seconds)}
        engine.close()
    return result


if __name__ == "__main__":
    if "--receive" in sys.argv:
        checkpoint, fields, spec_fields = json.loads(sys.stdin.read())
        receive(Path(checkpoint), RendezvousEndpoint(**fields), TransferSpec.parse(spec_fields))
    else:
        measure.report(check)
