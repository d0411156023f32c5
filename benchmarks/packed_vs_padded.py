"""Speed of training on packed sequences, compared with padded ones.

    python benchmarks/packed_vs_padded.py

One real engine, one rank, forward and backward passes of the same samples: laid end to end, as the
engine does it, and each extended to the longest of its micro-batch, as a framework that pads does.
Padding is computed everywhere, in the head too, and has no weight in the loss: the two losses must
agree. Runs alternate, and medians are compared.

The ideal speed-up is that of the tokens, padded / real. Attention costs more than its share of
tokens at length, so `ideal_by_cost`, with the pairs of tokens counted, is larger; both are printed.
Exit status 1 below 0.9 of the ideal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

REQUIRED_SHARE = 0.9
VOCAB = 2048


def sample_lengths(num_samples: int, longest: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response lengths: a long tail of responses, cut off at `longest`."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(16, 65, num_samples)
    responses = rng.lognormal(np.log(150), 0.8, num_samples).astype(int)
    return prompts, responses.clip(8, longest)


def make_batch(prompts: np.ndarray, responses: np.ndarray, extra: np.ndarray, seed: int) -> Any:
    """Random tokens; each response is followed by `extra` tokens without a weight in the loss."""
    from mcore_rl.data.batch import Batch, Jagged

    rng = np.random.default_rng(seed)
    prompt_ids = [rng.integers(2, VOCAB, n) for n in prompts]
    response_ids = [rng.integers(2, VOCAB, n) for n in responses]
    weight = 1.0 / responses.sum()
    padding = [np.zeros(n) for n in extra]
    padded = [np.concatenate(pair) for pair in zip(response_ids, padding, strict=True)]
    weights = [
        np.concatenate([np.full(n, weight), zeros])
        for n, zeros in zip(responses, padding, strict=True)
    ]
    return Batch(
        {
            "prompt_ids": Jagged.pack(prompt_ids, np.int64),
            "response_ids": Jagged.pack(padded, np.int64),
            "loss_weights": Jagged.pack(weights, np.float32),
        }
    )


def start_engine(folder: Path, hidden: int, layers: int, threads: int) -> Any:
    import transformers

    from mcore_rl.config.schema import EngineConfig, ModelConfig
    from mcore_rl.engine.base import EngineSpec
    from mcore_rl.engine.megatron.engine import MegatronEngine
    from mcore_rl.parallel.rendezvous import RendezvousServer

    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        intermediate_size=3 * hidden,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.save_pretrained(folder)
    os.environ |= RendezvousServer("127.0.0.1").endpoint.to_environment()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    settings = EngineConfig(max_tokens_per_micro_batch=1 << 30, threads_per_rank=threads)
    model = ModelConfig(path=str(folder), dtype="float32")
    engine = MegatronEngine(EngineSpec(model, settings, seed=0, total_steps=1))
    engine.initialize()
    return engine


def time_pass(engine: Any, micro_batches: list[Any]) -> tuple[float, float]:
    """Run forward and backward over batches of one micro-batch each; return seconds and loss."""
    from mcore_rl.algorithms.losses import negative_log_likelihood

    engine.optimizer_zero_grad()
    start, loss = time.perf_counter(), 0.0
    for batch in micro_batches:
        [result] = engine.forward_backward_batch(batch, negative_log_likelihood, forward_only=False)
        loss += float(result["loss"])
    return time.perf_counter() - start, loss / len(micro_batches)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from mcore_rl.engine.megatron.packing import estimate_model_cost

    packed, padded, real, filled = [], [], [], []
    for seed in range(arguments.micro_batches):
        prompts, responses = sample_lengths(arguments.samples, arguments.longest, seed)
        lengths = prompts + responses
        packed.append(make_batch(prompts, responses, np.zeros_like(lengths), seed))
        padded.append(make_batch(prompts, responses, lengths.max() - lengths, seed))
        real += lengths.tolist()
        filled += [int(lengths.max())] * len(lengths)
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(Path(folder), arguments.hidden, arguments.layers, arguments.threads)
        runs: dict[str, list[tuple[float, float]]] = {"packed": [], "padded": []}
        for repeat in range(arguments.repeats + 1):
            for name, batches in (("packed", packed), ("padded", padded)):
                run = time_pass(engine, batches)
                if repeat:  # the first warms up
                    runs[name].append(run)
    seconds = {n: statistics.median(run[0] for run in pairs) for n, pairs in runs.items()}
    losses = {n: pairs[0][1] for n, pairs in runs.items()}
    if abs(losses["packed"] / losses["padded"] - 1) > 1e-5:
        raise AssertionError(f"packed and padded samples differ in their loss: {losses}")
    cost = estimate_model_cost(engine.chunks[0].config, VOCAB)
    ideal = sum(filled) / sum(real)
    speedup = seconds["padded"] / seconds["packed"]
    return {
        "packed_s": round(seconds["packed"], 3),
        "padded_s": round(seconds["padded"], 3),
        "speedup": round(speedup, 3),
        "ideal": round(ideal, 3),
        "share_of_ideal": round(speedup / ideal, 3),
        "ideal_by_cost": round(sum(map(cost.estimate, filled)) / sum(map(cost.estimate, real)), 3),
        "real_tokens": sum(real),
        "padded_tokens": sum(filled),
        "lengths": {
            "samples": len(real),
            "shortest": min(real),
            "median": statistics.median(real),
            "longest": max(real),
        },
        "settings": vars(arguments),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=12, help="a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--longest", type=int, default=1024, help="response, in tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    report = measure(parser.parse_args())
    print(json.dumps(report, indent=2))
    return 0 if report["share_of_ideal"] >= REQUIRED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
