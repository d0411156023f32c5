"""Adam on the host (optimizer.cpu_offload): steps before and after the engine was away.

The same steps are taken by an engine whose optimizer stays on the GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import measure
import tiny_models
import torch

from mcore_rl.config.schema import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.trainers.policy_loss import PolicyLoss

LOSS = PolicyLoss(AlgorithmConfig(kl_coef=0.1))


def steps(path: Path, *, cpu_offload: bool) -> list[tuple[float, float]]:
    """Take two steps, move the engine to the host and back, and take two more."""
    adam = OptimizerConfig(lr=1e-3, distributed=True, cpu_offload=cpu_offload)
    settings = EngineConfig(optimizer=adam, max_tokens_per_micro_batch=132)
    spec = EngineSpec(ModelConfig(str(path), "bfloat16"), settings, seed=3, total_steps=6)
    engine = MegatronEngine(spec)
    engine.initialize()
    batch = tiny_models.make_batch()
    results = [engine.train_batch(batch, LOSS) for _ in range(2)]
    for _ in range(2):
        engine.to("host")
        engine.to("device")
        results.append(engine.train_batch(batch, LOSS))
    engine.close()
    return [(result["loss"], result["grad_norm"]) for result in results]


def check(arguments: argparse.Namespace) -> measure.Result:
    measure.join_alone()
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.save("qwen3_moe", Path(folder))
        on_device = steps(path, cpu_offload=False)
        on_host = steps(path, cpu_offload=not arguments.dry)
    torch.testing.assert_close(on_host, on_device, rtol=2e-2, atol=2e-2)
    return {"on_host": on_host, "on_device": on_device}


if __name__ == "__main__":
    measure.report(check)
