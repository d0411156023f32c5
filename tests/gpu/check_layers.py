"""Four layers at the published width: step time, share of the GPU's peak, host waits, offload.

`dense` has the layers of Qwen3-8B, `moe` those of Qwen3-30B-A3B; `fsdp-...` is the FSDP2 engine,
`te-...` Megatron's with Transformer Engine, `fp8-...` that with matrix products in float8 blocks.
Weights are random.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import measure
import numpy as np
import torch

from mcore_rl.algorithms.aggregation import compute_loss_weights
from mcore_rl.config.schema import (
    AlgorithmConfig,
    EngineConfig,
    Float8Config,
    ModelConfig,
    OptimizerConfig,
)
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import BaseEngine, EngineSpec, create_engine
from mcore_rl.trainers.policy_loss import PolicyLoss

NUM_LAYERS = 4
LOSS = PolicyLoss(AlgorithmConfig())
HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


FSDP = {"backend": "fsdp"}
TRANSFORMER_ENGINE = {"modules": "te"}
FLOAT8 = TRANSFORMER_ENGINE | {"fp8": Float8Config("blockwise")}
SETTINGS = {"": {"modules": "torch"}, "fsdp": FSDP, "te": TRANSFORMER_ENGINE, "fp8": FLOAT8}


def make_batch(num_tokens: int, vocab_size: int) -> Batch:
    """Make samples of uneven length with `num_tokens` tokens in total, a quarter of them prompt."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(min(int(rng.integers(num_tokens // 16, num_tokens // 4)),
                           num_tokens - sum(lengths)))  # fmt: skip
    lengths = [n for n in lengths if n >= 8]
    prompts = [rng.integers(2, vocab_size, n // 4) for n in lengths]
    responses = [rng.integers(2, vocab_size, n - n // 4) for n in lengths]
    mask = Jagged.pack([np.ones(len(r), np.int8) for r in responses], np.int8)
    return Batch(
        {
            "prompt_ids": Jagged.pack(prompts, np.int64),
            "response_ids": Jagged.pack(responses, np.int64),
            "response_mask": mask,
            "log_probs": Jagged.pack([np.full(len(r), -11.0) for r in responses], np.float32),
            "advantages": Jagged.pack([rng.normal(size=len(r)) for r in responses], np.float32),
            "loss_weights": compute_loss_weights(mask, "token_mean"),
        }
    )


def training_flops(config, batch: Batch) -> float:
    """Count the floating-point operations of forward and backward passes, without recomputation."""
    lengths = (batch.lengths("prompt_ids") + batch.lengths("response_ids")).astype(float)
    width, heads, head = config.hidden_size, config.num_attention_heads, config.head_dim
    groups = config.num_key_value_heads
    attention = width * head * (heads + 2 * groups) + heads * head * width
    if getattr(config, "num_experts", 0):
        mlp = 3 * width * config.moe_intermediate_size * config.num_experts_per_tok
    else:
        mlp = 3 * width * config.intermediate_size
    per_token = 2 * config.num_hidden_layers * (attention + mlp)
    scores = 2 * 2 * heads * head * config.num_hidden_layers * (lengths**2 / 2).sum()
    # The head is computed twice in the backward pass too: its logits are not kept.
    head_flops = 2 * width * config.vocab_size * batch.lengths("response_ids").sum()
    return float(3 * (per_token * lengths.sum() + scores + head_flops))


def trace_step(engine: BaseEngine, batch: Batch) -> measure.Result:
    """Trace a training step: calls in which the host waits for the GPU, and the slowest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as trace:
        engine.train_batch(batch, LOSS)
    rows = trace.key_averages()
    counts = {row.key: row.count for row in rows}
    waits = {name: counts.get(name, 0) for name in HOST_WAITS}
    waits["copies to the host"] = sum(n for name, n in counts.items() if "Memcpy DtoH" in name)
    waits["kernels"] = sum(n for name, n in counts.items() if "LaunchKernel" in name)
    slowest = sorted(rows, key=lambda row: -row.self_device_time_total)[:12]
    return {
        "host_waits": waits,
        "slowest_kernels_ms": {r.key[:90]: r.self_device_time_total / 1000 for r in slowest},
    }


def matmul_flops_per_s(dry: bool) -> float:
    """Measure the best rate of a large bfloat16 matrix product."""
    size = 256 if dry else 8192
    a, b = (torch.randn(size, size, device=measure.device(), dtype=torch.bfloat16) for _ in "ab")
    return 2 * size**3 / measure.median_seconds(lambda: a @ b, repeats=10, warmups=3)


def count_state_bytes(engine: BaseEngine) -> int:
    """Count the bytes of parameters and optimizer state."""
    if hasattr(engine, "memory_report"):
        sizes = engine.memory_report()
        return sizes.parameters_bytes + sizes.optimizer_state_bytes
    tensors = engine.list_tensors("parameters") + engine.list_tensors("optimizer state")
    return sum(tensor.nbytes for tensor in tensors)


def offload_cycles(engine: BaseEngine) -> list[dict[str, float]]:
    """Move all of the engine to the host and back, twice: bytes, seconds and GB/s."""
    moved, cycles = count_state_bytes(engine), []
    for _ in range(2):
        start = time.perf_counter()
        engine.to("host")
        measure.synchronize()
        middle = time.perf_counter()
        on_device = torch.cuda.memory_allocated() if measure.has_gpu() else 0
        assert on_device < 0.05 * moved, f"{on_device} bytes of it are on the device"
        engine.to("device")
        measure.synchronize()
        end = time.perf_counter()
        cycles.append({
            "gb": moved / 1e9, "to_host_s": middle - start, "to_device_s": end - middle,
            "to_host_gb_per_s": moved / 1e9 / (middle - start),
            "to_device_gb_per_s": moved / 1e9 / (end - middle),
        })  # fmt: skip
    return cycles


def get_parameters(engine: BaseEngine) -> list[torch.Tensor]:
    """Return this rank's shards of the parameters."""
    parameters = getattr(engine, "parameters", None) or engine.chunks[0].parameters()
    return [getattr(p, "_local_tensor", p).detach() for p in parameters]


def compute_log_probs(engine: BaseEngine, batch: Batch) -> np.ndarray:
    return engine.infer_batch(batch).jagged("log_probs").values.copy()


def check(arguments: argparse.Namespace) -> measure.Result:
    variant, _, kind = arguments.case.rpartition("-")
    choices = SETTINGS["" if arguments.dry and variant != "fsdp" else variant]
    make_config = measure.qwen3_8b if kind == "dense" else measure.qwen3_30b
    config = make_config(NUM_LAYERS, arguments.dry)
    measure.join_alone()
    peak = matmul_flops_per_s(arguments.dry)
    num_tokens = 512 if arguments.dry else 16_384
    batch = make_batch(num_tokens, config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        path = measure.make_checkpoint(config, Path(folder))
        settings = EngineConfig(
            **choices,
            optimizer=OptimizerConfig(lr=1e-5, distributed=True),
            max_tokens_per_micro_batch=num_tokens // 2,
        )
        model = ModelConfig(
            str(path), "bfloat16", family="transformers" if variant == "fsdp" else ""
        )
        spec = EngineSpec(model, settings, seed=0, total_steps=20)
        engine = create_engine("language_model", spec)
        start = time.perf_counter()
        engine.initialize()
        result: measure.Result = {"load_s": time.perf_counter() - start}
    before = engine.train_batch(batch, LOSS)
    seconds = measure.median_seconds(lambda: engine.train_batch(batch, LOSS), repeats=3)
    scoring = measure.median_seconds(lambda: engine.infer_batch(batch), repeats=3)
    flops = training_flops(config, batch)
    result |= {
        "tokens": int(batch.num_tokens.sum()),
        "parameters": sum(p.numel() for p in get_parameters(engine)),
        "train_s": seconds,
        "score_s": scoring,
        "train_tflops_per_s": flops / seconds / 1e12,
        "matmul_tflops_per_s": peak / 1e12,
        "share_of_matmul_rate": flops / seconds / peak,
        "peak_gib_beyond_state": measure.peak_bytes(lambda: engine.train_batch(batch, LOSS))
        / 2**30,
    }
    print(result, file=sys.stderr, flush=True)  # should the time end before the rest
    if measure.has_gpu():
        result |= trace_step(engine, batch)
    weights = [parameter.cpu() for parameter in get_parameters(engine)]
    first, second = (compute_log_probs(engine, batch) for _ in range(2))
    result["offload"] = offload_cycles(engine)
    pairs = zip(weights, [p.cpu() for p in get_parameters(engine)], strict=True)
    assert all(map(torch.equal, *zip(*pairs, strict=True))), "offload changed the weights"
    # Sums of a mixture of experts have no fixed order on a GPU: two passes differ by themselves.
    result["repeat_gap"] = gap = float(abs(first - second).mean())
    result["offload_gap"] = float(abs(first - compute_log_probs(engine, batch)).mean())
    assert result["offload_gap"] <= 2 * gap, f"offload changed the log-probs: {result}"
    after = engine.train_batch(batch, LOSS)
    assert np.isfinite([before["loss"], after["loss"], after["grad_norm"]]).all(), (before, after)
    engine.close()
    return result


if __name__ == "__main__":
    variants = "", "fsdp-", "te-", "fp8-"
    measure.report(check, *(variant + kind for variant in variants for kind in ("dense", "moe")))
