"""The log-prob head against plain cross-entropy: time, memory beyond the inputs, agreement.

Forward and backward passes of 4,096 tokens over a vocabulary of 151,936, hidden size 4,096, in
bfloat16; the plain way makes all logits. The reference of both is the plain way in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import measure
import torch
import torch.nn.functional as F

from mcore_rl.engine.logprob import VocabShard, compute_log_probs


def check(arguments: argparse.Namespace) -> measure.Result:
    tokens, width, vocab = (64, 32, 517) if arguments.dry else (4096, 4096, 151_936)
    device, dtype = measure.device(), torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device=device).to(dtype)
    head = (torch.randn(vocab, width, generator=generator, device=device) * 0.02).to(dtype)
    targets = torch.randint(vocab, (tokens,), generator=generator, device=device)
    hidden.requires_grad_()
    head.requires_grad_()

    def gradients(log_probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden.grad = head.grad = None
        (-log_probs.float().mean()).backward()
        return log_probs.detach(), hidden.grad, head.grad

    def tiled(chunk_bytes: int, with_entropy: bool = False) -> Callable[[], object]:
        shard = VocabShard(0, vocab, None)
        options = {"chunk_bytes": chunk_bytes, "with_entropy": with_entropy}
        return lambda: gradients(
            compute_log_probs(hidden, head, targets, shard, **options).log_probs
        )

    def plain() -> object:
        return gradients(-F.cross_entropy((hidden @ head.t()).float(), targets, reduction="none"))

    logits = (hidden.detach().float() @ head.detach().float().t()).log_softmax(-1)
    reference = logits.gather(1, targets[:, None])[:, 0].clone()
    del logits
    flops = 2 * tokens * width * vocab
    ways = {"plain cross-entropy": plain}
    for mib in (1,) if arguments.dry else (32, 128, 256, 512, 1024):
        ways[f"tiles of {mib} MiB"] = tiled(mib << 20)
    ways["tiles, with entropy"] = tiled((1 if arguments.dry else 256) << 20, with_entropy=True)
    result: measure.Result = {}
    for name, way in ways.items():
        log_probs = way()[0]
        seconds = measure.median_seconds(way, repeats=3)
        result[name] = {
            "s": seconds,
            "peak_gib": measure.peak_bytes(way) / 2**30,
            "gap": float((log_probs - reference).abs().max()),
            # Tiles compute the logits once more in the backward pass.
            "tflops_per_s": flops * (3 if name.startswith("plain") else 4) / seconds / 1e12,
        }
        assert name.startswith("plain") or result[name]["gap"] < 1e-3, result
        hidden.grad = head.grad = None
    return result


if __name__ == "__main__":
    measure.report(check)
