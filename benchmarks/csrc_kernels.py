"""Speed of the kernels of csrc, compared with a GPU or torch in the same run.

    python benchmarks/csrc_kernels.py [--device cpu|cuda] [--megabytes N]

(As kernels.py it would hide the package of that name, which transformers imports where it finds it,
from all scripts of this folder.)

Prints JSON, and each case on standard error as soon as it is measured. Every case has the seconds
of both sides (the quickest of runs that take turns), and:

- copy: boxes of one size, or of all sizes mixed, from one buffer into another, in one launch. On a
  GPU `ratio` is the share of the best device-to-device copy of as many bytes; on the CPU it is the
  time of torch's own copies of the same boxes, one call each and in one call (`_foreach_copy_`,
  the better of the two), divided by ours. Rows of `copy 64 KiB at byte 7` begin 7 bytes behind a
  multiple of 16, and have an odd length.
- cudaMemcpyBatchAsync: on a GPU, the rows of such boxes in one call of CUDA's runtime; `ratio` is
  that of copies. Where it cannot be called, `not_available` says why.
- quantize: bfloat16 columns of a larger matrix to float8 in one pass, against a packed copy and a
  quantisation of that.
- checksum: boxes of one dtype, sums only. On a GPU `ratio` is the rate of reading, divided by the
  rate at which the best device-to-device copy reads (it writes as much again); on the CPU it is the
  time of a CRC-32 of as many bytes, divided by ours, each on one thread.

On a GPU the exit status is 1 where a case misses what is required of it (`required`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from isal import isal_zlib

from mcore_rl.reshard.ops import BoxChecksum, BoxCopy, BoxQuantize, Pair, allocate_quantized

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]  # bytes of a box
REQUIRED_COPY = (0.8, 0.9)  # with boxes below 64 KiB, and without
REQUIRED_QUANTIZE = 1.8
REQUIRED_CHECKSUM = 1.0
MIXED = [4 << 10, 2 << 20, 16 << 10, 256 << 10]
BATCH_SINCE = 12_080  # cudaMemcpyBatchAsync, as CUDA counts its versions
STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
Case = dict[str, Any]


def measure_seconds(*sides: Callable[[], Any], device: str, rounds: int) -> list[float]:
    """Run all sides in turns; return the seconds of the quickest run of each."""
    best = [float("inf")] * len(sides)
    for _ in range(rounds + 1):  # the first is to warm up
        for number, side in enumerate(sides):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            side()
            if device == "cuda":
                torch.cuda.synchronize()
            best[number] = min(best[number], time.perf_counter() - start)
    return best


def measure_gpu_seconds(side: Callable[[], Any], repeats: int = 20) -> float:
    """Return the GPU seconds of one run among many in a row: the quickest of five rows.

    What takes longer than 50 ms is run once a row, in two rows.
    """
    best = float("inf")
    side()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    side()
    torch.cuda.synchronize()
    is_slow = time.perf_counter() - begin > 0.05
    repeats, rows = (1, 2) if is_slow else (repeats, 5)
    for _ in range(rows):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not is_slow:
            side()
        start.record()
        for _ in range(repeats):
            side()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1000 / repeats)
    return best


def split_range(sizes: list[int], device: str, num_bytes: int, past: int = 0) -> list[Pair]:
    """Return boxes of these sizes in turn, in another order in the target; two rows with a gap.

    With `past`, rows begin so many bytes later and are one byte shorter.
    """
    generator = torch.Generator().manual_seed(0)
    taken, total = list[int](), 0
    while total < num_bytes:
        taken.append(sizes[len(taken) % len(sizes)])
        total += taken[-1]
    source = torch.empty(2 * total, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    starts = torch.tensor([0, *taken]).cumsum(0).tolist()
    places = [0] * len(taken)
    start = 0
    for box in torch.randperm(len(taken), generator=generator).tolist():
        places[box] = start
        start += taken[box]

    def view_rows(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
        end = past + size // 2 - (past > 0)
        return tensor[2 * start : 2 * (start + size)].view(2, size)[:, past:end]

    return [
        (view_rows(source, starts[n], size), view_rows(target, places[n], size))
        for n, size in enumerate(taken)
    ]


def measure_copy(name: str, sizes: list[int], device: str, num_bytes: int, past: int = 0) -> Case:
    pairs = split_range(sizes, device, num_bytes, past)
    copied = sum(source.numel() for source, _ in pairs)
    copy = BoxCopy(pairs)
    copy.run()
    assert all(torch.equal(source, target) for source, target in pairs[:: len(pairs) // 50 + 1])
    case = {"case": f"copy {name}", "boxes": len(pairs), "bytes": copied}
    if device == "cuda":
        values = torch.empty(copied, dtype=torch.uint8, device=device)
        other = torch.empty_like(values)
        our_s = measure_gpu_seconds(copy.run)
        best = measure_gpu_seconds(lambda: other.copy_(values))
        case |= {"s": our_s, "device_copy_s": best, "ratio": best / our_s}
        required = {} if past else {"required": REQUIRED_COPY[min(sizes) >= 64 << 10]}
        return case | required | {"gb_per_s": 2 * copied / our_s / 1e9}
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]

    def copy_each() -> None:
        for source, target in pairs:
            target.copy_(source)

    our_s, each, foreach = measure_seconds(
        copy.run,
        copy_each,
        lambda: torch._foreach_copy_(targets, sources),
        device=device,
        rounds=20,
    )
    return {**case, "s": our_s, "torch_s": min(each, foreach), "ratio": min(each, foreach) / our_s}


def load_runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded; None without one."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


def read_runtime_versions(runtime: ctypes.CDLL) -> list[int]:
    """Return the versions of runtime and driver as CUDA counts them: 12080 is 12.8."""
    version, versions = ctypes.c_int(), []
    for name in ("cudaRuntimeGetVersion", "cudaDriverGetVersion"):
        if error := getattr(runtime, name)(ctypes.byref(version)):
            raise RuntimeError(f"{name}: error {error} of CUDA")
        versions.append(version.value)
    return versions


def missing_batch_copy(device: str, runtime: ctypes.CDLL | None) -> str:
    """Say why cudaMemcpyBatchAsync cannot be called; empty if it can."""
    if device == "cpu" or runtime is None:
        cuda = torch.version.cuda or "none"
        return (
            f"not available on {device}: no CUDA runtime (torch {torch.__version__}, CUDA {cuda})"
        )
    versions = read_runtime_versions(runtime)
    if min(versions) >= BATCH_SINCE:
        return ""
    version, driver = (f"{n // 1000}.{n % 1000 // 10}" for n in versions)
    return f"not available in CUDA {version} (its driver: {driver}); needed: 12.8"


class BatchCopy:
    """Copies of the rows of boxes in one call of cudaMemcpyBatchAsync (CUDA 12.8)."""

    def __init__(self, pairs: list[Pair], runtime: ctypes.CDLL) -> None:
        self._call = runtime.cudaMemcpyBatchAsync
        rows = [
            [tensor.data_ptr() + row * tensor.stride(0) for row in range(len(tensor))]
            for pair in pairs
            for tensor in pair
        ]
        self._sources = np.array([a for n in rows[::2] for a in n], np.uintp)
        self._targets = np.array([a for n in rows[1::2] for a in n], np.uintp)
        sizes = [source.shape[1] for source, _ in pairs for _ in range(len(source))]
        self._sizes = np.array(sizes, np.uintp)
        # cudaMemcpyAttributes of all: the order, two hints of two numbers each, flags.
        self._attributes = struct.pack("6i", STREAM_ORDER, 0, 0, 0, 0, 0)
        self._begins = np.zeros(1, np.uintp)  # the copy from which on they hold
        # Until CUDA 13 there is a place for the number of the copy that failed.
        self._failed = np.zeros(1, np.uintp)
        self._has_failed = read_runtime_versions(runtime)[0] < 13_000

    def run(self, stream: int) -> None:
        """Enqueue the copies; the stream must not be the default one."""
        arrays = [self._targets, self._sources, self._sizes]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        failed = [ctypes.c_void_p(self._failed.ctypes.data)] if self._has_failed else []
        error = self._call(
            *pointers,
            ctypes.c_size_t(len(self._sizes)),
            ctypes.c_char_p(self._attributes),
            ctypes.c_void_p(self._begins.ctypes.data),
            ctypes.c_size_t(1),
            *failed,
            ctypes.c_void_p(stream),
        )
        if error:
            raise RuntimeError(f"cudaMemcpyBatchAsync: error {error} of CUDA")


def measure_batch_copy(name: str, sizes: list[int], device: str, num_bytes: int) -> Case:
    runtime = load_runtime() if device == "cuda" else None
    case: Case = {"case": f"cudaMemcpyBatchAsync {name}"}
    if reason := missing_batch_copy(device, runtime):
        return case | {"not_available": reason}
    assert runtime is not None
    pairs = split_range(sizes, device, num_bytes)
    copied = sum(source.numel() for source, _ in pairs)
    copy = BatchCopy(pairs, runtime)
    values = torch.empty(copied, dtype=torch.uint8, device=device)
    other = torch.empty_like(values)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        batch = measure_gpu_seconds(lambda: copy.run(stream.cuda_stream))
        best = measure_gpu_seconds(lambda: other.copy_(values))
    stream.synchronize()
    assert all(torch.equal(source, target) for source, target in pairs[:: len(pairs) // 50 + 1])
    case |= {"boxes": len(pairs), "bytes": copied, "s": batch, "device_copy_s": best}
    return case | {"ratio": best / batch, "gb_per_s": 2 * copied / batch / 1e9}


def measure_quantize(device: str, num_bytes: int) -> Case:
    columns = 2048
    num_rows = max(128, num_bytes // 2 // columns // 128 * 128)
    values = torch.randn(num_rows, 2 * columns, device=device).bfloat16()
    source = values[:, :columns]
    packed = torch.empty(source.shape, dtype=source.dtype, device=device)
    into = allocate_quantized(source)
    fused = BoxQuantize([(source, into)])
    pack, quantize = BoxCopy([(source, packed)]), BoxQuantize([(packed, into)])

    def pack_and_quantize() -> None:
        pack.run()
        quantize.run()

    if device == "cuda":
        our_s, torch_s = measure_gpu_seconds(fused.run), measure_gpu_seconds(pack_and_quantize)
    else:
        our_s, torch_s = measure_seconds(fused.run, pack_and_quantize, device=device, rounds=20)
    case = {
        "case": "quantize",
        "s": our_s,
        "pack_then_quantize_s": torch_s,
        "ratio": torch_s / our_s,
    }
    required: Case = {"required": REQUIRED_QUANTIZE} if device == "cuda" else {}
    return case | {"bytes": 2 * source.numel()} | required


def measure_checksum(name: str, dtype: torch.dtype, device: str, num_bytes: int) -> Case:
    columns = 2048
    rows = max(1, num_bytes // columns // dtype.itemsize)
    source = torch.randn(rows, columns, device=device).to(dtype)
    checksum = BoxChecksum((box, dtype) for box in source.split(512))  # 2 or 4 MiB each
    octets = source.view(-1).view(torch.uint8)
    case = {"case": f"checksum {name}", "bytes": len(octets)}
    if device == "cuda":
        target = torch.empty_like(octets)
        our_s = measure_gpu_seconds(checksum.run)
        copy = measure_gpu_seconds(lambda: target.copy_(octets))
        case |= {"device_copy_s": copy, "gb_per_s": len(octets) / our_s / 1e9}
        return {**case, "s": our_s, "ratio": copy / our_s, "required": REQUIRED_CHECKSUM}
    memory = octets.numpy()
    our_s, crc32 = measure_seconds(
        lambda: checksum.run(1), lambda: isal_zlib.crc32(memory), device=device, rounds=20
    )
    return {**case, "s": our_s, "crc32_s": crc32, "ratio": crc32 / our_s}


def make_cases(device: str, num_bytes: int) -> Iterator[Case]:
    for size in SIZES:
        yield measure_copy(f"{size >> 10} KiB", [size], device, num_bytes)
    yield measure_copy("mixed", MIXED, device, num_bytes)
    yield measure_copy("64 KiB at byte 7", [64 << 10], device, num_bytes, past=7)
    yield measure_quantize(device, num_bytes)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        yield measure_checksum(name, dtype, device, num_bytes)
    for name, sizes in (("mixed", MIXED), ("64 KiB", [64 << 10]), ("4 KiB", [4 << 10])):
        yield measure_batch_copy(name, sizes, device, num_bytes)


def main() -> int:
    parser = argparse.ArgumentParser()
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu else "cpu")
    parser.add_argument("--megabytes", type=int, default=1024 if has_gpu else 128)
    arguments = parser.parse_args()
    device, num_bytes = arguments.device, arguments.megabytes << 20
    cases = []
    for case in make_cases(device, num_bytes):
        print(json.dumps(case), file=sys.stderr, flush=True)
        cases.append(case)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    machine = {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(machine | {"cases": cases}, indent=1))
    return int(any(case["ratio"] < case["required"] for case in cases if "required" in case))


if __name__ == "__main__":
    sys.exit(main())
