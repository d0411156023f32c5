"""Times, memory and checkpoints of the GPU checks; on a CPU the same calls, for a dry run."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/dist_cpu"), str(ROOT / "tests/unit/engine")]

Result = dict[str, Any]


def choose_first_variants() -> None:
    """Make Triton compile the first variant of each kernel: it would time them all for minutes."""
    if importlib.util.find_spec("triton") is None:
        return
    import triton

    autotune = triton.autotune
    triton.autotune = lambda configs, key, **options: autotune(configs[:1], key, **options)


def has_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda", 0) if has_gpu() else torch.device("cpu")


def synchronize() -> None:
    if has_gpu():
        torch.cuda.synchronize()


def median_seconds(function: Callable[[], Any], repeats: int = 5, warmups: int = 1) -> float:
    """Measure the median wall time of a call, with the GPU idle before and after it."""
    for _ in range(warmups):
        function()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_bytes(function: Callable[[], Any]) -> int:
    """Measure how much GPU memory a call takes at most beyond what is allocated; 0 on a CPU."""
    if not has_gpu():
        function()
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def used_bytes() -> int:
    """Return the memory of the card that all processes use together; 0 on a CPU."""
    if not has_gpu():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def join_alone() -> None:
    """Make this process the only rank of a training world, at a rendezvous of its own."""
    from mcore_rl.parallel.rendezvous import RendezvousServer

    global _rendezvous
    _rendezvous = RendezvousServer("127.0.0.1")
    os.environ |= _rendezvous.endpoint.to_environment()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


_rendezvous: Any = None


def make_checkpoint(config: Any, folder: Path, seed: int = 0) -> Path:
    """Save a random bfloat16 checkpoint of a transformers config, made on the GPU."""
    import transformers

    torch.manual_seed(seed)
    with torch.device(device()):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    return folder


def qwen3_8b(num_layers: int, dry: bool) -> Any:
    """Return the config of Qwen3-8B with fewer layers; for a dry run a small one."""
    import transformers

    sizes = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    if dry:
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return transformers.Qwen3Config(
        **sizes,
        num_hidden_layers=num_layers,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def qwen3_30b(num_layers: int, dry: bool) -> Any:
    """Return the config of Qwen3-30B-A3B with fewer layers; for a dry run a small one."""
    import transformers

    sizes = {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    sizes |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    if dry:
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return transformers.Qwen3MoeConfig(
        **sizes,
        num_hidden_layers=num_layers,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def report(check: Callable[[argparse.Namespace], Result], *cases: str) -> None:
    """Run a check as a program: `--dry` for small sizes, `--case` for one of its cases.

    The last line of its output is the result as JSON. After 0.8 of its time limit, which
    run_checks.py sets, the stacks of its threads are printed.
    """
    if limit := os.environ.get("CHECK_LIMIT_S"):
        faulthandler.dump_traceback_later(0.8 * float(limit))
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--dry", action="store_true")
    if cases:
        parser.add_argument("--case", choices=cases, required=True)
    result = check(parser.parse_args())
    print(json.dumps(result), flush=True)
