"""Weight exchanges against what else there is, on ranks of this machine over gloo.

Two comparisons, of a model with random weights: into vLLM's layout, against gathering every tensor
whole on every rank and slicing it; and between two layouts of Megatron, against Megatron's own
resharding. Candidates take turns, so that whatever else the machine does falls on all. Every rank
checks that all of them leave the same bits.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_engine import resolve_layout, resolve_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.ranks import ProcessFailed, run_on_ranks
from mcore_rl.models.base import model_sizes
from mcore_rl.reshard.layout import GenerationLayout

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    train: Layout
    generate: GenerationLayout
    target: Layout  # of Megatron, for the comparison with its own resharding
    num_layers: int = 6
    bucket_bytes: int = 8 * _MIB
    repetitions: int = 7

    def config(self) -> dict[str, Any]:
        """A mixture of experts of 57 MB a layer and 67 MB outside of them, in bfloat16."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 16384, "hidden_size": 1024,
            "num_hidden_layers": self.num_layers, "num_attention_heads": 16, "head_dim": 64,
            "num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 2,
            "moe_intermediate_size": 512, "intermediate_size": 2048, "rms_norm_eps": 1e-6,
            "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip

    def check(self) -> None:
        """Raises ConfigError for layouts that do not fit the model or each other."""
        sizes = model_sizes(self.config())
        for name, layout in (("--train", self.train), ("--target", self.target)):
            resolve_layout(name, layout)
            resolve_model_layout(name, layout, sizes)
            if layout.vpp > 1:
                raise ConfigError(f"{name}: vpp={layout.vpp}; allowed: 1, as Megatron's has it")
        worlds = {
            "--train": self.train.world_size,
            "--generate": self.generate.world_size,
            "--target": self.target.world_size,
        }
        if len(set(worlds.values())) > 1:
            found = ", ".join(f"{name} has {size}" for name, size in worlds.items())
            raise ConfigError(f"{found} ranks; allowed: as many in all three")


@dataclass(frozen=True, slots=True)
class Timing:
    """One candidate: seconds until the last rank was done, and the fullest rank's extra memory."""

    median_s: float
    fastest_s: float
    peak_extra_bytes: int  # resident memory beyond that before the exchange
    network_bytes: int  # received in all, by the layouts


@dataclass(frozen=True, slots=True)
class Report:
    settings: Settings
    model_bytes: int
    schedule_s: float  # plan and schedule of one rank, made once
    into_vllm: dict[str, Timing]
    times_faster_than_gather: float  # ratio of the medians
    into_megatron: dict[str, Timing]
    times_faster_than_megatron: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def bench_reshard(settings: Settings) -> Report:
    """
    Raises:
        ConfigError: the layouts do not fit.
        RunFailed: a rank ended early, or candidates left different bits.
    """
    settings.check()
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = run_on_ranks(
                partial(_measure, settings), settings.train.world_size, Path(folder)
            )
        except ProcessFailed as error:
            raise RunFailed(str(error)) from error
    first = results[0]
    into_vllm, into_megatron = (
        {name: _timing([r[case][name] for r in results]) for name in first[case]}
        for case in ("into_vllm", "into_megatron")
    )
    return Report(
        settings,
        model_bytes=first["model_bytes"],
        schedule_s=max(result["schedule_s"] for result in results),
        into_vllm=into_vllm,
        times_faster_than_gather=into_vllm["gather"].median_s / into_vllm["exchange"].median_s,
        into_megatron=into_megatron,
        times_faster_than_megatron=(
            into_megatron["megatron"].median_s / into_megatron["exchange"].median_s
        ),
    )


def _timing(by_rank: list[dict[str, Any]]) -> Timing:
    seconds = [max(times) for times in zip(*(one["seconds"] for one in by_rank), strict=True)]
    return Timing(
        median_s=statistics.median(seconds),
        fastest_s=min(seconds),
        peak_extra_bytes=max(one["peak_extra_bytes"] for one in by_rank),
        network_bytes=sum(one["network_bytes"] for one in by_rank),
    )


def _measure(settings: Settings) -> dict[str, Any]:
    """What one rank measures."""
    import torch

    from mcore_rl.parallel.store import join_world
    from mcore_rl.tools import reshard_candidates

    torch.set_num_threads(1)
    join_world("gloo", timeout_s=1800.0)
    case = reshard_candidates.IntoVLLM(settings)
    found = {
        "model_bytes": case.model_bytes,
        "schedule_s": case.exchange.schedule_s,
        "into_vllm": _alternate(case.candidates(), settings.repetitions, case.check),
    }
    del case
    refit = reshard_candidates.IntoMegatron(settings)
    found["into_megatron"] = _alternate(refit.candidates(), settings.repetitions, refit.check)
    return found


Candidate = tuple[Callable[[], None], int]  # what to run, and the bytes that this rank receives


def _alternate(
    candidates: dict[str, Candidate], repetitions: int, check: Callable[[str], None]
) -> dict[str, Any]:
    """The first round warms up, and is the one that is checked."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    peaks = dict.fromkeys(candidates, 0)
    for repetition in range(repetitions + 1):
        for name, (run, _) in candidates.items():
            dist.barrier()
            before = _reset_peak()
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if repetition == 0:
                check(name)
                continue
            seconds[name].append(elapsed)
            peaks[name] = max(peaks[name], _peak() - before)
    return {
        name: {
            "seconds": seconds[name],
            "peak_extra_bytes": peaks[name],
            "network_bytes": candidates[name][1],
        }
        for name in candidates
    }


def _reset_peak() -> int:
    """Bytes that are resident now; the peak begins here (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def show(report: Report) -> None:
    console = Console()
    console.print(
        f"{report.model_bytes / 1e6:.0f} MB on {report.settings.train.world_size} ranks; "
        f"plan and schedule of a rank, once: {report.schedule_s:.2f} s"
    )
    for title, timings, ratio in (
        ("Into vLLM's layout", report.into_vllm, report.times_faster_than_gather),
        ("Into another of Megatron", report.into_megatron, report.times_faster_than_megatron),
    ):
        table = Table(title=f"{title}: {ratio:.1f} times faster")
        for column in ("", "median", "fastest", "network", "extra memory, fullest rank"):
            table.add_column(column, justify="right" if column else "left")
        for name, timing in timings.items():
            table.add_row(
                name,
                f"{timing.median_s * 1e3:.0f} ms",
                f"{timing.fastest_s * 1e3:.0f} ms",
                f"{timing.network_bytes / 1e6:.0f} MB",
                f"{timing.peak_extra_bytes / 1e6:.0f} MB",
            )
        console.print(table)
