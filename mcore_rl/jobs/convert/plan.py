"""Plans of conversions: options, parameters, files, and limits on memory and threads."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_rl.checkpoint.hf_writer import group_by_size
from mcore_rl.checkpoint.storage_location import StorageLocation
from mcore_rl.config.checks import check_at_least, check_choice
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.rules import Box, Shard, Weight, parse_slice

BRIDGES = ("megatron-bridge",)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}

# Measured: pages of torch's libraries that are first read when this process ends.
_EXIT_BYTES = (128 if torch.version.cuda else 32) << 20
_SLACK_BYTES = 32 << 20
# Measured with 60,000 of each: an entry (tensor or chunk) of an index that is read, and a chunk of
# a checkpoint while its index is written.
READ_ENTRY_BYTES, WRITTEN_ENTRY_BYTES = 2048, 4096
_MOST_WORKERS = 4  # default of --workers: more seldom helps with one disk
UNSHARDED = Shard(0, 1)
_SMALLEST_FILE, _LARGEST_FILE = 32 << 20, 1 << 30  # bytes
_NUM_FILES = 8  # so that several threads share the work of a small model, too


@dataclass(frozen=True, slots=True)
class PlannedAdapter:
    """The low-rank adapter of a parameter, which ranks computed with in `num_shards` shards."""

    scale: float
    num_shards: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A Megatron parameter: its rule, its location in the checkpoint, and its dtype there."""

    weight: Weight
    location: StorageLocation
    dtype: torch.dtype
    adapter: PlannedAdapter | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Full shape, with padding of the vocabulary."""
        return self.weight.rule.get_local_shape(UNSHARDED)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def box(self) -> Box:
        """All of the parameter."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors of a checkpoint that it has, or has slices of; with aliases."""
        names = [name for t in self.weight.rule.tensors for name in (t.name, *t.aliases)]
        return tuple(part.stack if (part := parse_slice(name)) else name for name in names)


class Buffer:
    """Memory that is reused for one tensor after another.

    To fill new memory would take as long as a copy.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """Return a tensor whose storage is the bytes from `start` on.

        If the buffer has to grow for it, its contents are lost.
        """
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(self._memory):
            self._memory = np.empty(0, np.uint8)  # freed before the larger one is allocated
            self._memory = np.empty(end, np.uint8)
        return torch.from_numpy(self._memory[start:end]).view(dtype).view(shape)


def count_shards(weight: Weight, layout: Layout) -> int:
    """Return over how many ranks of a layout a weight is split."""
    return 1 if weight.axis is None else int(getattr(layout, weight.axis))


def split_into_files(parameters: Sequence[Parameter]) -> Iterator[tuple[Parameter, ...]]:
    """Yield the parameters of each file, of about equal size; depends on the model alone."""
    total = sum(parameter.nbytes for parameter in parameters)
    limit = min(max(total // _NUM_FILES, _SMALLEST_FILE), _LARGEST_FILE)
    return map(tuple, group_by_size(parameters, limit))


def parse_dtype(name: str, allowed: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the dtype of --dtype; raise ConfigError for a name that is not allowed."""
    if name not in allowed:
        raise ConfigError(f"--dtype={name}; allowed: {', '.join(allowed)}")
    return allowed[name]


def find_main_dtype(sizes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the dtype of most elements, from (dtype, elements) of each tensor."""
    totals: Counter[torch.dtype] = Counter()
    for dtype, size in sizes:
        totals[dtype] += size
    return totals.most_common(1)[0][0]


def compute_fingerprint(
    command: str, folders: Mapping[str, Path | None], **options: object
) -> dict[str, object]:
    """Return all that decides the output of a conversion, with size and time of input files.

    Hidden folders are left out: the output may be written to one.
    """
    facts: dict[str, object] = {"command": command, **options}
    facts |= {name: metadata.version(name) for name in ("mcore-rl", "megatron-core", "torch")}
    for role, folder in folders.items():
        if folder is not None:
            for file in filter(Path.is_file, sorted((*folder.glob("*"), *folder.glob("[!.]*/*")))):
                stat = file.stat()
                facts[f"{role}/{file.relative_to(folder)}"] = [stat.st_size, stat.st_mtime_ns]
    return facts


# Memory and threads


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits of a conversion; None leaves the choice to it."""

    workers: int | None = None  # threads that convert
    max_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_at_least("--workers", self.workers, 1)


def parse_bytes(option: str, text: str) -> int:
    """Parse a size such as "5GB" or "512MiB", the value of an option.

    >>> parse_bytes("--max-memory", "1.5GB")
    1500000000

    Raises:
        ConfigError: It is no size, or not above 0.
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{option}={text!r}; allowed: a size such as 500MB, 5GB or 8GiB")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    check_at_least(option, size, 1)
    return size


def format_bytes(size: float) -> str:
    """
    >>> format_bytes(1536 << 20)
    '1.61 GB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1000
    return f"{size:.3g} TB"


def choose_workers(
    memory_bytes: Sequence[int], resources: Resources, finish_bytes: int = 0
) -> tuple[int, str]:
    """Return the number of threads, and a line on the memory that they take.

    Args:
        memory_bytes: Memory of each unit of work.
        finish_bytes: Memory that is taken when all units are written.

    Raises:
        ConfigError: Less memory is allowed than the conversion takes.
    """
    largest = max(memory_bytes, default=0)
    most = resources.workers or min(os.cpu_count() or 1, _MOST_WORKERS)
    workers = max(1, min(most, len(memory_bytes)))
    allowed = resources.max_memory_bytes
    if resources.workers is None and allowed is not None:
        while workers > 1 and compute_memory_bound(workers, largest, finish_bytes) > allowed:
            workers -= 1
    bound = compute_memory_bound(workers, largest, finish_bytes)
    if allowed is not None and bound > allowed:
        raise ConfigError(
            f"--max-memory={format_bytes(allowed)} is too small for {_format_threads(workers)}; "
            f"allowed: at least {-(-bound // 10**6)}MB"
        )
    buffers = f"buffers of {format_bytes(largest)}"
    return (
        workers,
        f"at most {format_bytes(bound)} of memory: {_format_threads(workers)}, {buffers} each",
    )


def compute_memory_bound(workers: int, largest: int, finish_bytes: int = 0) -> int:
    """Return a bound on the memory of this process: its peak so far, and what follows."""
    return get_peak_memory() + _SLACK_BYTES + _EXIT_BYTES + finish_bytes + workers * largest


def get_peak_memory() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def _format_threads(workers: int) -> str:
    return "1 thread" if workers == 1 else f"{workers} threads"


def parse_resources(*, workers: int | None, max_memory: str | None, **_: Any) -> Resources:
    """Parse the options --workers and --max-memory."""
    memory = None if max_memory is None else parse_bytes("--max-memory", max_memory)
    return Resources(workers, memory)


def uses_bridge(options: Mapping[str, Any]) -> bool:
    """Return whether --bridge is given; refuse options that it does not use."""
    if options["bridge"] is None:
        return False
    check_choice("--bridge", options["bridge"], BRIDGES)
    for name, value in options.items():
        if value and name != "bridge":
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} with --bridge={options['bridge']}, which does not use it")
    return True
