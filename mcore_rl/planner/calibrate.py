"""Measures the machine at hand: products by dtype, memory, copies from the host, launches.

Links between devices need several of them: they stay as in the file that the measurement starts
from.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.planner.hardware import Hardware, load_hardware

_REPEATS = 7
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def calibrate(device: str, base: Hardware | None = None) -> Hardware:
    """Measure a device; links between devices are those of `base`.

    Shares are 1: each rate is measured.

    Raises:
        ConfigError: The device is none of cpu and cuda, or this machine has no GPU.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device={device!r}; allowed: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: torch sees no GPU; allowed: cpu")
    base = base or load_hardware("cpu" if device == "cpu" else "h100")
    peaks = {name: measure_matmul(device, dtype) for name, dtype in _TORCH_DTYPES.items()}
    memory, name = _describe_device(device)
    measured = f"measured on {name} with torch {torch.__version__}"
    links = (
        "nvlink_bandwidth",
        "nvlink_share",
        "nvlink_latency_s",
        "nvlink_domain",
        "network_bandwidth",
        "network_share",
        "network_latency_s",
        "devices_per_node",
    )
    sources = {field: base.sources[field] if field in links else measured for field in base.sources}
    return replace(
        base,
        name=name,
        memory_bytes=memory,
        peak_flops=peaks,
        matmul_share=1.0,
        memory_bandwidth=measure_memory(device),
        memory_share=1.0,
        host_bandwidth=measure_host_copy(device),
        host_share=1.0,
        kernel_latency_s=measure_launch(device),
        sources=sources,
    )


def _describe_device(device: str) -> tuple[int, str]:
    """Return the bytes that a process can allocate, and a name."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return int(properties.total_memory), str(properties.name)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return total // cores, f"a core of {cores} ({platform.machine()})"


def _measure(function: Callable[[], object], device: str, calls: int = 1) -> float:
    """Return the shortest seconds of a call, after one to warm up."""
    function()
    shortest = float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        _wait(device)
        shortest = min(shortest, (time.perf_counter() - start) / calls)
    return shortest


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_matmul(device: str, dtype: torch.dtype) -> float:
    """Return the flops a second of a square product; on a CPU those of one thread, as of a rank."""
    size = 8192 if device == "cuda" else 768
    threads = torch.get_num_threads()
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    torch.set_num_threads(1 if device == "cpu" else threads)
    try:
        return 2 * size**3 / _measure(lambda: left @ right, device, calls=3)
    finally:
        torch.set_num_threads(threads)


def measure_memory(device: str) -> float:
    """Return the bytes a second, read and written, of a copy that no cache can have."""
    source = torch.zeros((1 << 30) if device == "cuda" else (256 << 20), dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _measure(lambda: target.copy_(source), device)


def measure_host_copy(device: str) -> float:
    """Return the bytes a second from page-locked host memory to the device."""
    source = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty_like(source, device=device)
    return source.numel() / _measure(lambda: target.copy_(source, non_blocking=True), device)


def measure_launch(device: str) -> float:
    """Return the seconds of a kernel on one element, in a stream of them."""
    value = torch.zeros(1, device=device)
    return _measure(lambda: value.add_(1), device, calls=1000)
