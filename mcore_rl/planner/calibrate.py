"""Measures the machine at hand: products by dtype, memory, copies from the host, launches, links.

A CPU is measured as one rank has it: one thread, in CPU seconds of that thread, so that what else
the machine runs does not count. A GPU is measured by events on its stream.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.config.checks import check_choice
from mcore_rl.config.errors import ConfigError
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.parallel.store import join_world
from mcore_rl.planner.hardware import DEVICES, Hardware, Link, load_hardware

_cuda: Any = torch.cuda  # its events have no types
_REPEATS = 7
# Of a GPU: kernels are loaded. After 0.3 s of products the power of an H100 limits its clocks: 677
# TFLOP/s in place of 770, which is what hardware files state.
_WARM_UP_CALLS = 3
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FLOAT8_CAPABILITY = (8, 9)  # the first GPUs with float8 products
_LINK_BYTES, _LINK_TIMEOUT_S = 64 << 20, 120.0
_NETWORK = ("network_bandwidth", "network_share", "network_latency_s")
_NVLINK = ("nvlink_bandwidth", "nvlink_share", "nvlink_latency_s")
_NODE = ("nvlink_domain", "devices_per_node")


def calibrate(device: str, base: Hardware | None = None) -> Hardware:
    """Measure a device, and the link between two of them if there are two.

    Links between machines, and the numbers of devices that links connect, are those of `base`.
    Shares are 1: each rate is measured.

    Raises:
        ConfigError: The device is none of cpu and cuda, or this machine has no GPU.
    """
    check_choice("--device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: torch sees no GPU; allowed: cpu")
    base = base or load_hardware("cpu" if device == "cpu" else "h100")
    memory, name = _describe_device(device)
    peaks = {name: measure_matmul(device, dtype) for name, dtype in _TORCH_DTYPES.items()}
    if device == "cuda" and torch.cuda.get_device_capability() >= _FLOAT8_CAPABILITY:
        peaks["float8"] = measure_float8_matmul(device)
    has_link = device == "cpu" or torch.cuda.device_count() > 1
    unmeasured = (*_NETWORK, *_NODE, *(() if has_link else _NVLINK))
    measured = f"measured on {name} with torch {torch.__version__}"
    link = measure_link(device) if has_link else None
    hardware = base if link is None else replace(
        base, nvlink_bandwidth=link.rate, nvlink_share=1.0, nvlink_latency_s=link.latency_s
    )  # fmt: skip
    return replace(
        hardware,
        name=name,
        device=device,
        memory_bytes=memory,
        peak_flops=peaks,
        matmul_share=1.0,
        memory_bandwidth=measure_memory(device),
        memory_share=1.0,
        host_bandwidth=measure_host_copy(device),
        host_share=1.0,
        kernel_latency_s=measure_launch(device),
        sources={
            field: source if field in unmeasured else measured
            for field, source in base.sources.items()
        },
    )


def _describe_device(device: str) -> tuple[int, str]:
    """Return the bytes that a process can allocate, and a name."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return int(properties.total_memory), str(properties.name)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return total // cores, f"a core of {cores} ({platform.machine()})"


def measure_seconds(function: Callable[[], object], device: str, calls: int = 1) -> float:
    """Return the shortest seconds of a call, after some to warm up."""
    if device == "cpu":
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            function()
            return min(_time(function, calls, time.thread_time) for _ in range(_REPEATS))
        finally:
            torch.set_num_threads(num_threads)
    for _ in range(_WARM_UP_CALLS):
        function()
    torch.cuda.synchronize()
    return min(_time_by_events(function, calls) for _ in range(_REPEATS))


def _time(function: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    start_s = clock()
    for _ in range(calls):
        function()
    return (clock() - start_s) / calls


def _time_by_events(function: Callable[[], object], calls: int) -> float:
    """Return the seconds of a call on the current stream of the GPU, which is empty before."""
    start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def _make_factors(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    size = 8192 if device == "cuda" else 768
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    return left, right


def measure_matmul(device: str, dtype: torch.dtype) -> float:
    """Return the flops a second of a square product."""
    left, right = (factor.to(dtype) for factor in _make_factors(device))
    return 2 * left.shape[0] ** 3 / measure_seconds(lambda: left @ right, device, calls=3)


def measure_float8_matmul(device: str) -> float:
    """Return the flops a second of a square product of float8 (e4m3) factors with one scale each.

    Sums as of Transformer Engine's forward products (`use_fast_accum`).
    """
    left, right = _make_factors(device)
    multiply = build_float8_product(left, right)
    return 2 * left.shape[0] ** 3 / measure_seconds(multiply, device, calls=3)


def build_float8_product(left: torch.Tensor, right: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call that multiplies [m, k] by the transpose of [n, k], cuBLAS's one layout."""
    scale = torch.ones((), device=left.device)
    factors = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    return partial(
        torch._scaled_mm, *factors, scale, scale,
        out_dtype=torch.bfloat16, use_fast_accum=left.is_cuda,
    )  # fmt: skip


def measure_memory(device: str) -> float:
    """Return the bytes a second, read and written, of a copy that no cache can have."""
    num_bytes = (1 << 30) if device == "cuda" else (256 << 20)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / measure_seconds(lambda: target.copy_(source), device, calls=3)


def measure_host_copy(device: str) -> float:
    """Return the bytes a second from page-locked host memory to the device."""
    source = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty_like(source, device=device)
    copy = partial(target.copy_, source, non_blocking=True)
    return source.numel() / measure_seconds(copy, device)


def measure_launch(device: str) -> float:
    """Return the seconds of a kernel on one element, in a stream of them."""
    value = torch.zeros(1, device=device)
    return measure_seconds(lambda: value.add_(1), device, calls=1000)


def measure_link(device: str) -> Link:
    """Measure messages between two processes of this machine: by gloo, or NCCL between two GPUs.

    A message takes half of the time that it takes to go to and fro.

    Raises:
        RuntimeError: The processes do not find each other.
    """
    server = RendezvousServer("127.0.0.1")
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(2, mp_context=context) as processes:
            exchange = partial(_exchange_messages, device, server.endpoint)
            (small_s, large_s), _ = processes.map(exchange, range(2))
    finally:
        server.close()
    return Link(_LINK_BYTES / max(large_s - small_s, 1e-9), small_s)


def _exchange_messages(device: str, endpoint: RendezvousEndpoint, rank: int) -> tuple[float, float]:
    """Return the shortest seconds of a message of one byte, and of one of `_LINK_BYTES`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    if device == "cuda":
        torch.cuda.set_device(rank)
    join_world("nccl" if device == "cuda" else "gloo", _LINK_TIMEOUT_S, endpoint)
    seconds = []
    for num_bytes, calls in ((1, 100), (_LINK_BYTES, 1)):
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        send, receive = (partial(call, message, 1 - rank) for call in (dist.send, dist.recv))
        first, second = (send, receive) if rank == 0 else (receive, send)

        def exchange_messages(first: Callable[[], object], second: Callable[[], object]) -> None:
            first()
            second()

        exchange = partial(exchange_messages, first, second)
        exchange()  # connects; NCCL makes its channels
        if device == "cuda":
            times = [_time_by_events(exchange, calls) for _ in range(_REPEATS)]
        else:
            times = [_time(exchange, calls, time.perf_counter) for _ in range(_REPEATS)]
        seconds.append(min(times) / 2)
    dist.destroy_process_group()
    return seconds[0], seconds[1]
