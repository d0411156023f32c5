"""A vLLM server on the GPU that trains: answers, sleep, wake, and weights from an engine beside it.

Two layers of Qwen3-30B-A3B with random weights. Log-probs are compared with transformers in
float32 on the same GPU. `runner1` and `runner2` are vLLM's model runners, `graphs` the second one
with compiled graphs instead of eager, `float8` the second one with rollout.quantization. `drafts`
is a small GLM-4.5 whose prediction layer proposes tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import tiny_families
import torch

from mcore_rl.config.schema import (
    EngineConfig,
    Layout,
    ModelConfig,
    RolloutConfig,
    SpeculativeConfig,
    WeightSyncConfig,
)
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import WeightUpdate, connect

NUM_PROMPTS, LONGEST = 64, 256
# Nats, the largest and the mean, of log-probs in bfloat16 from those in float32: a router near a
# tie may choose another expert. Then the same of servers with 4 significant bits in place of 8.
GAP_LIMITS = 0.5, 0.03
FLOAT8_GAP_LIMITS = 2.0, 0.15


class Timer(dict):
    """Seconds by name."""

    async def measure(self, name: str, awaitable: Any) -> Any:
        start = time.perf_counter()
        result = await awaitable
        self[name] = time.perf_counter() - start
        print(f"{name}: {self[name]:.1f} s", file=sys.stderr, flush=True)
        return result


def log_prob_gaps(path: Path, prompts: list[list[int]], completions: list[Completion]) -> list:
    """Return the largest and the mean distance of log-probs from those of transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = model.to(measure.device())
    gaps = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + completion.token_ids], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        gaps.append((chosen - torch.tensor(completion.log_probs)).abs())
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return [float(torch.cat(gaps).max()), float(torch.cat(gaps).mean())]


def check_gaps(result: measure.Result, name: str, limits: tuple[float, float]) -> None:
    (largest, mean), (largest_limit, mean_limit) = result[name], limits
    assert largest < largest_limit and mean < mean_limit, f"{name}, limits {limits}: {result}"


async def generate(server: VLLMServer, vocab: int, length: int) -> tuple[list, list[Completion]]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, vocab, (n % 40 + 5,), generator=generator).tolist()
               for n in range(NUM_PROMPTS)]  # fmt: skip
    sampling = SamplingParams(max_tokens=length, seed=7)
    answers = await asyncio.gather(*(server.submit(prompt, sampling) for prompt in prompts))
    return prompts, [completions[0] for completions in answers]


async def serve(paths: list[Path], arguments: argparse.Namespace) -> measure.Result:
    dry, eager = arguments.dry, arguments.case != "graphs"
    dtype = "float32" if dry else "bfloat16"
    vocab, length = (512, 8) if dry else (151_936, 128)
    quantization = "fp8_block" if arguments.case == "float8" else None
    rollout = RolloutConfig(
        max_num_seqs=NUM_PROMPTS,
        kv_cache_bytes=(64 << 20) if dry else (4 << 30),
        quantization=quantization,
    )
    timer = Timer()
    server = VLLMServer(str(paths[0]), dtype, LONGEST, rollout, seed=0, can_sleep=True, eager=eager)
    before = measure.used_bytes()
    await timer.measure("start", server.start())
    result: measure.Result = {"server_gb": (measure.used_bytes() - before) / 1e9}
    result["runner"] = server.model_runner
    try:
        await generate(server, vocab, 4)
        prompts, completions = await timer.measure("generate", generate(server, vocab, length))
        result["tokens_per_s"] = sum(len(c.token_ids) for c in completions) / timer["generate"]
        result["first_gaps"] = log_prob_gaps(paths[0], prompts[:8], completions[:8])
        settings = WeightSyncConfig(verify="sampled", timeout_s=60)
        spec = TransferSpec(
            Layout(), 0, GenerationLayout(), dtype, settings, quantization=quantization
        )
        engine = MegatronEngine(
            EngineSpec(ModelConfig(str(paths[1]), dtype), EngineConfig(modules="torch"), seed=0)
        )
        engine.initialize()
        gb = engine.memory_report().parameters_bytes / 1e9
        endpoint = RendezvousServer("127.0.0.1")
        joining = asyncio.to_thread(
            connect, spec, endpoint.endpoint, engine.hf_config, 0, engine.device
        )
        transport, _ = await asyncio.gather(
            joining, server.connect_weights(endpoint.endpoint, spec, 0)
        )
        for version in (1, 2):
            awake = measure.used_bytes()
            await timer.measure(f"sleep {version}", server.sleep())
            asleep = measure.used_bytes()
            await timer.measure(f"wake weights {version}", server.wake("weights"))
            sending = asyncio.to_thread(
                transport.send, engine.get_local_weights(), WeightUpdate(version)
            )
            both = asyncio.gather(sending, server.update(version))
            await timer.measure(f"push {version}", both)
            await timer.measure(f"wake cache {version}", server.wake("kv_cache"))
            prompts, completions = await generate(server, vocab, length)
            result[f"gb_freed {version}"] = (awake - asleep) / 1e9
            result[f"gaps {version}"] = log_prob_gaps(paths[1], prompts[:8], completions[:8])
            versions = {v for c in completions for v in c.weight_versions}
            assert versions == {version}, versions
        result["push_gb_per_s"] = gb / timer["push 2"]
        sending = asyncio.to_thread(transport.send, engine.get_local_weights(), WeightUpdate(3))
        await timer.measure("push awake", asyncio.gather(sending, server.update(3, in_flight=True)))
        prompts, completions = await generate(server, vocab, length)
        result["gaps 3"] = log_prob_gaps(paths[1], prompts[:8], completions[:8])
        transport.close()
        engine.close()
    finally:
        await timer.measure("close", server.close())
        result["seconds"] = dict(timer)
    for name in ("first_gaps", "gaps 1", "gaps 2", "gaps 3"):
        check_gaps(result, name, FLOAT8_GAP_LIMITS if quantization else GAP_LIMITS)
    return result


async def serve_drafts(paths: list[Path], arguments: argparse.Namespace) -> measure.Result:
    """Serve a checkpoint and then another: log-probs are of the served model, drafts are taken."""
    dtype = "float32" if arguments.dry else "bfloat16"
    rollout = RolloutConfig(
        max_num_seqs=8, kv_cache_bytes=64 << 20, speculative=SpeculativeConfig(2)
    )
    server = VLLMServer(str(paths[0]), dtype, LONGEST, rollout, seed=0, can_sleep=True)
    await server.start()
    result: measure.Result = {"runner": server.model_runner}
    prompts = [[3, *range(10 + n, 40)] for n in range(8)]
    sampling = SamplingParams(max_tokens=60, temperature=0.0)
    try:
        for version, path in enumerate(paths, 1):
            await server.load_checkpoint(str(path), version)
            await server.take_draft_counts()
            answers = await asyncio.gather(*(server.submit(p, sampling) for p in prompts))
            counts = await server.take_draft_counts()
            completions = [completions[0] for completions in answers]
            result[f"gaps {version}"] = log_prob_gaps(path, prompts, completions)
            result[f"acceptance {version}"] = counts.num_accepted_tokens / counts.num_draft_tokens
    finally:
        await server.close()
    for version in (1, 2):
        check_gaps(result, f"gaps {version}", GAP_LIMITS)
        assert result[f"acceptance {version}"] > 0.5, result
    return result


def save_with_mtp(folder: Path, seed: int) -> Path:
    """Save a small GLM-4.5 whose tokens are predictable, also by its prediction layer."""
    config = tiny_families.served_config("glm4_moe")
    config.head_dim = 64
    folder.mkdir()
    path = tiny_families.save_with_mtp("glm4_moe", folder, config)
    return tiny_families.make_predictable(path, seed)


def check(arguments: argparse.Namespace) -> measure.Result:
    if arguments.case == "runner1":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    measure.join_alone()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.case == "drafts":
            paths = [save_with_mtp(Path(folder, str(n)), n) for n in (0, 1)]
            return asyncio.run(serve_drafts(paths, arguments))
        config = measure.qwen3_30b(2, arguments.dry)
        paths = [measure.make_checkpoint(config, Path(folder, str(n)), seed=n) for n in (0, 1)]
        return asyncio.run(serve(paths, arguments))


if __name__ == "__main__":
    measure.report(check, "runner1", "runner2", "graphs", "float8", "drafts")
