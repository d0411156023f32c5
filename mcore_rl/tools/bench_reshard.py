"""Weight exchange compared with alternatives, on ranks of this machine over gloo.

Two comparisons, of a model with random weights: into vLLM's layout, against gathering every tensor
whole on every rank and slicing it, one tensor at a time and in buckets; and between two layouts of
Megatron, against Megatron's own resharding. Candidates alternate, so that other load of the machine
affects all. Every rank checks that all of them give the same bits, and counts the bytes that arrive
at its sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_engine import resolve_layout, resolve_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.ranks import ProcessFailed, run_on_ranks
from mcore_rl.models.base import get_model_sizes
from mcore_rl.observability.console import get_stdout_console
from mcore_rl.reshard.layout import GenerationLayout

_MIB = 1 << 20
_RECEIVED_AT, _TCP_INFO_BYTES = 128, 136  # tcpi_bytes_received in struct tcp_info, <linux/tcp.h>


@dataclass(frozen=True, slots=True)
class Settings:
    train: Layout
    generate: GenerationLayout
    target: Layout  # of Megatron, for the comparison with its own resharding
    num_layers: int = 6
    bucket_bytes: int = 8 * _MIB
    repetitions: int = 7
    timeout_s: float = 3600.0

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
        sizes = get_model_sizes(self.config())
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
    network_bytes: int  # received in all in one run, counted at the sockets of every rank


@dataclass(frozen=True, slots=True)
class BenchReport:
    settings: Settings
    model_bytes: int
    schedule_s: float  # plan and schedule of one rank, made once
    into_vllm: dict[str, Timing]
    planned_bytes: dict[str, int]  # what the exchange has to receive in all, by comparison
    times_faster_than_gather: float  # ratio of the medians, one tensor at a time
    times_faster_than_bucketed_gather: float
    into_megatron: dict[str, Timing]
    times_faster_than_megatron: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def bench_reshard(settings: Settings) -> BenchReport:
    """
    Raises:
        ConfigError: the layouts do not fit.
        RunFailed: a rank ended early, or candidates left different bits.
    """
    settings.check()
    with tempfile.TemporaryDirectory() as folder:
        try:
            job, world_size = partial(_measure, settings), settings.train.world_size
            results = run_on_ranks(job, world_size, Path(folder), settings.timeout_s)
        except ProcessFailed as error:
            raise RunFailed(str(error)) from error
    first = results[0]
    cases = ("into_vllm", "into_megatron")
    into_vllm, into_megatron = (
        {name: _timing([r[case][name] for r in results]) for name in first[case]} for case in cases
    )
    exchange_s = into_vllm["exchange"].median_s
    return BenchReport(
        settings,
        model_bytes=first["model_bytes"],
        schedule_s=max(result["schedule_s"] for result in results),
        into_vllm=into_vllm,
        planned_bytes={case: sum(r["planned_bytes"][case] for r in results) for case in cases},
        times_faster_than_gather=into_vllm["gather"].median_s / exchange_s,
        times_faster_than_bucketed_gather=into_vllm["gather_bucketed"].median_s / exchange_s,
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
    planned = {"into_vllm": case.exchange.received_bytes}
    found = {
        "model_bytes": case.model_bytes,
        "schedule_s": case.exchange.schedule_s,
        "planned_bytes": planned,
        "into_vllm": _alternate(case.candidates(), settings.repetitions, case.check),
    }
    del case
    refit = reshard_candidates.IntoMegatron(settings)
    planned["into_megatron"] = refit.exchange.received_bytes
    found["into_megatron"] = _alternate(refit.candidates(), settings.repetitions, refit.check)
    return found


Candidate = Callable[[], None]


def _alternate(
    candidates: dict[str, Candidate], repetitions: int, check: Callable[[str], None]
) -> dict[str, Any]:
    """The first round warms up, and is the one that is checked."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    peaks, received = dict.fromkeys(candidates, 0), dict.fromkeys(candidates, 0)
    for repetition in range(repetitions + 1):
        for name, run in candidates.items():
            dist.barrier()
            before, arrived = _reset_peak(), received_bytes()
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            dist.barrier()  # what others still send belongs to this run
            received[name] = received_bytes() - arrived
            if repetition == 0:
                check(name)
                continue
            seconds[name].append(elapsed)
            peaks[name] = max(peaks[name], _peak() - before)
    return {
        name: {
            "seconds": seconds[name],
            "peak_extra_bytes": peaks[name],
            "network_bytes": received[name],
        }
        for name in candidates
    }


def received_bytes() -> int:
    """What has arrived at the open TCP sockets of this process so far (tcpi_bytes_received)."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no TCP socket
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    total += struct.unpack_from("Q", info, _RECEIVED_AT)[0]
    return total


def _reset_peak() -> int:
    """Bytes that are resident now; the peak begins here (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def show(report: BenchReport) -> None:
    console = get_stdout_console()
    console.print(
        f"{report.model_bytes / 1e6:.0f} MB on {report.settings.train.world_size} ranks; "
        f"plan and schedule of a rank, once: {report.schedule_s:.2f} s"
    )
    one_by_one, bucketed = report.times_faster_than_gather, report.times_faster_than_bucketed_gather
    for title, timings in (
        (
            f"Into vLLM's layout: {one_by_one:.1f} times faster, {bucketed:.1f} than in buckets",
            report.into_vllm,
        ),
        (
            f"Into another of Megatron: {report.times_faster_than_megatron:.1f} times faster",
            report.into_megatron,
        ),
    ):
        table = Table(title=title)
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
