"""Time and memory of a conversion, compared with copying the same files.

    python benchmarks/conversion.py [--gigabytes 2] [--rounds 3]

A synthetic checkpoint in bfloat16 is copied (shutil.copytree), converted to Megatron's format and
back, with one worker and with two. What is read is in the page cache, and the memory for what is
written is equally cold for a copy and for a conversion (`PAUSE_S`). The runs alternate, and medians
are compared. `share_of_copy` is the time of the copy over the time of the conversion, which is what
the command prints: from its first byte to the folder under its name, with every process started.
Starting Python is left out (`start_s`).
`peak_bytes` sums the largest resident memory of every process of the command, whenever it had it.

Exit status 1 when a conversion of a gigabyte or more is slower than half of the copy, or any takes
more memory than it announced.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.checkpoint.hf_writer import TensorPlan, plan_shards, write_index, write_shard
from mcore_rl.models.base import get_family
from mcore_rl.reshard.rules import list_logical_tensors

REQUIRED_SHARE = 0.5
# A virtual machine gives freed memory back to its host after 2 s (page reporting), and touching it
# again is four times slower. A copy right after a deletion, unlike a conversion, pays none of it.
PAUSE_S = 4.0
LAYER_BYTES = 2 * (32 * (3 * 1024 * 384) + 1024 * 4096 + 2 * 1024 * 512 + 4096 * 1024)
COMMAND = Path(sys.executable).with_name("mcore-rl")
SIZES = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def build_config(gigabytes: float) -> dict[str, Any]:
    """Return the config.json of a model of this size.

    It is Qwen3-30B-A3B at half its width, with 32 experts and as many layers as fit.
    """
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "vocab_size": 32000, "hidden_size": 1024, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 3072,
        "moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_hidden_layers": max(1, round((gigabytes * 1e9 - 2 * 2 * 32000 * 1024) / LAYER_BYTES)),
    }  # fmt: skip


def write_model(folder: Path, gigabytes: float) -> int:
    """Write a checkpoint of random weights; return their bytes."""
    folder.mkdir()
    config = build_config(gigabytes)
    (folder / "config.json").write_text(json.dumps(config))
    weights = get_family(config).weights(config, config["vocab_size"])
    plans = [TensorPlan(t.name, t.shape, torch.bfloat16) for t in list_logical_tensors(weights)]
    shards = plan_shards(plans, 1 << 29)
    generator = torch.Generator().manual_seed(0)

    def draw_tensors(names: Iterator[str], shapes: dict[str, tuple[int, ...]]) -> Iterator[Any]:
        for name in names:
            noise = torch.randint(-(2**14), 2**14, shapes[name], generator=generator)
            yield name, (noise * 2.0**-18).bfloat16()

    shapes = {plan.name: plan.shape for plan in plans}
    for shard in shards:
        write_shard(folder, shard, draw_tensors(iter(shard.entries), shapes))
    write_index(folder, shards)
    return sum(plan.nbytes for plan in plans)


class WatchedRun:
    """A run of a command, its seconds and its memory."""

    def __init__(self, *arguments: str | Path) -> None:
        started = time.perf_counter()
        process = subprocess.Popen(
            [COMMAND, "convert", *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )
        peaks: dict[int, int] = {}
        watcher = threading.Thread(target=_watch, args=(process, peaks), daemon=True)
        watcher.start()
        printed, _ = process.communicate()
        watcher.join()
        self.wall_s = time.perf_counter() - started
        if process.returncode:
            raise RuntimeError(f"exit status {process.returncode}: {printed}")
        self.peak_bytes = sum(peaks.values())
        bound = re.search(r"at most ([\d.]+) (\w+) of memory", printed)
        took = re.search(r" in ([\d.]+) s, ", printed)
        assert bound and took, printed
        self.bound_bytes = float(bound[1]) * SIZES[bound[2]]
        self.convert_s = float(took[1])


def _watch(process: subprocess.Popen[str], peaks: dict[int, int]) -> None:
    """Record the largest resident memory of the process and of each that it starts, by its id."""
    while process.poll() is None:
        for pid in _list_family(process.pid):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            if match := re.search(r"VmHWM:\s+(\d+) kB", status):
                peaks[pid] = int(match[1]) * 1024
        time.sleep(0.02)


def _list_family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in _list_family(int(child)))]


def time_copy(source: Path, target: Path) -> float:
    started = time.perf_counter()
    shutil.copytree(source, target)
    return time.perf_counter() - started


def measure(folder: Path, gigabytes: float, rounds: int) -> dict[str, Any]:
    model, checkpoint = folder / "model", folder / "checkpoint"
    num_bytes = write_model(model, gigabytes)
    to_mcore: list[str | Path] = ["hf-to-mcore", "--model", model, "--layout", "tp=2,ep=2"]
    to_hf: list[str | Path] = [
        "mcore-to-hf",
        "--checkpoint",
        checkpoint,
        "--max-shard-size",
        "512MB",
    ]
    WatchedRun(*to_mcore, "--output", checkpoint, "--workers", "1")
    runs: dict[str, list[WatchedRun]] = {}
    copies: list[float] = []
    for _ in range(rounds):
        for workers in ("1", "2"):
            for name, command in (("hf-to-mcore", to_mcore), ("mcore-to-hf", to_hf)):
                copies.append(_run_and_discard(folder, lambda out: time_copy(model, out)))
                convert = partial(WatchedRun, *command, "--workers", workers, "--output")
                run = _run_and_discard(folder, convert)
                runs.setdefault(f"{name}, {workers} workers", []).append(run)
    copy_s = statistics.median(copies)
    return {
        "bytes": num_bytes,
        "copy_s": round(copy_s, 3),
        "copy_s_all": [round(s, 2) for s in copies],
        **{name: _summarize(watched, copy_s) for name, watched in runs.items()},
    }


def _run_and_discard(folder: Path, run: Callable[[Path], Any]) -> Any:
    """Return the result of `run`, whose output folder is removed."""
    os.sync()  # what the run before left to be written does not slow down this one
    time.sleep(PAUSE_S)
    try:
        return run(folder / "out")
    finally:
        shutil.rmtree(folder / "out", ignore_errors=True)


def _summarize(runs: list[WatchedRun], copy_s: float) -> dict[str, Any]:
    convert_s = statistics.median(run.convert_s for run in runs)
    return {
        "convert_s": convert_s,
        "convert_s_all": [run.convert_s for run in runs],
        "start_s": round(statistics.median(run.wall_s - run.convert_s for run in runs), 1),
        "share_of_copy": round(copy_s / convert_s, 2),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "bound_bytes": int(min(run.bound_bytes for run in runs)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.25, 2.0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    failed = False
    for gigabytes in options.gigabytes:
        with tempfile.TemporaryDirectory() as folder:
            report = measure(Path(folder), gigabytes, options.rounds)
        print(json.dumps(report, indent=1), flush=True)
        for run in (value for value in report.values() if isinstance(value, dict)):
            if gigabytes >= 1:  # below, filling the buffers for the first time is most of it
                failed |= run["share_of_copy"] < REQUIRED_SHARE
            failed |= run["peak_bytes"] > run["bound_bytes"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
