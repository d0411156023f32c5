"""Limits on memory and processes of a conversion, and its needs, reported before it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.config.checks import at_least
from mcore_rl.config.errors import ConfigError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}

# Measured: a process that has imported torch and our readers, and what an allocator keeps.
_WORKER_BYTES = 288 << 20
_TRACKER_BYTES = 16 << 20  # the extra process that multiprocessing keeps for its workers
_SLACK_BYTES = 32 << 20
# Measured, with 60,000 of each: a tensor or chunk that the index of a folder names, to a reader of
# it, and one chunk of a checkpoint while its index is written.
READ_ENTRY_BYTES, WRITTEN_ENTRY_BYTES = 2048, 4096
_MOST_WORKERS = 4  # when the user does not say: more seldom helps one disk


@dataclass(frozen=True, slots=True)
class Resources:
    """What a command may use. None leaves the choice to it."""

    workers: int | None = None  # processes that convert
    max_memory_bytes: int | None = None  # of all processes together

    def __post_init__(self) -> None:
        if self.workers is not None:
            at_least("--workers", self.workers, 1)


def parse_bytes(option: str, text: str) -> int:
    """A size such as "5GB" or "512MiB" in bytes; `option` names it in messages.

    >>> parse_bytes("--max-memory", "1.5GB")
    1500000000

    Raises:
        ConfigError: it is no size, or not above 0.
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{option}={text!r}; allowed: a size such as 500MB, 5GB or 8GiB")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    at_least(option, size, 1)
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
    memory_bytes: Sequence[int], resources: Resources, at_the_end_bytes: int = 0
) -> tuple[int, str]:
    """The number of processes for units that take `memory_bytes` each, and a line on memory.

    `at_the_end_bytes` is what this process takes when all units are written.

    Raises:
        ConfigError: less memory is allowed than it takes.
    """
    largest = max(memory_bytes, default=0)
    most = resources.workers or min(os.cpu_count() or 1, _MOST_WORKERS)
    workers = max(1, min(most, len(memory_bytes)))
    allowed = resources.max_memory_bytes
    if resources.workers is None and allowed is not None:
        while workers > 1 and bound_bytes(workers, largest, at_the_end_bytes) > allowed:
            workers -= 1
    bound = bound_bytes(workers, largest, at_the_end_bytes)
    if allowed is not None and bound > allowed:
        raise ConfigError(
            f"--max-memory={format_bytes(allowed)} is too small for {_processes(workers)}; "
            f"allowed: at least {-(-bound // 10**6)}MB"
        )
    buffers = f"buffers of {format_bytes(largest)}"
    return (
        workers,
        f"at most {format_bytes(bound)} of memory: {_processes(workers)}, {buffers} each",
    )


def bound_bytes(workers: int, largest: int, at_the_end: int = 0) -> int:
    """Of all processes together: what this one has taken so far, and what is to come."""
    so_far = peak_bytes() + _SLACK_BYTES + at_the_end
    if workers == 1:
        return so_far + largest
    # One more has imported the same, and workers are forked from it.
    return so_far + _TRACKER_BYTES + (workers + 1) * _WORKER_BYTES + workers * largest


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def _processes(workers: int) -> str:
    return "1 process" if workers == 1 else f"{workers} worker processes"
