"""Profiles of a rank during a step: a trace of torch.profiler, a snapshot of the GPU's memory."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from mcore_rl.config.atomic_file import write_atomically
from mcore_rl.observability.timeline import TRACE_SUFFIX

# Allocations and frees in a snapshot, the newest; each has its stack of Python functions.
_MAX_MEMORY_EVENTS = 100_000
_SNAPSHOT_SUFFIX = ".memory.pickle"
_CHUNK_BYTES = 1 << 16  # of a trace, compressed at once


class StepProfiler:
    """A profile of this process from `start` to `stop`."""

    def __init__(self, path: Path, step: int, max_trace_bytes: int, *, memory: bool) -> None:
        """Prepare the profile.

        Args:
            path: Path of the files, without a suffix; its folder is made.
            step: Step of the trainer, a field of the trace.
            max_trace_bytes: Largest trace, before compression.
            memory: Whether to record a snapshot of CUDA's allocator, too.
        """
        self._path, self._max_trace_bytes, self._has_memory = path, max_trace_bytes, memory
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile: Any = profile(activities=activities, record_shapes=True)
        self._step = step

    @staticmethod
    def is_running() -> bool:
        """Return whether this process is being profiled; torch has one profiler per process."""
        return bool(torch._C._autograd._profiler_enabled())

    def start(self) -> Self:
        """Start to record."""
        if self._has_memory:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
        self._profile.start()
        self._profile.add_metadata_json("step", str(self._step))
        return self

    def stop(self) -> str:
        """Stop, and write the files; return which cannot be written and why, "" if all are there.

        A trace is compressed while torch exports it, up to the limit: a larger one takes neither
        more time nor more of the disk.
        """
        problems = []
        try:
            try:
                self._profile.stop()
                problems.append(self._write(TRACE_SUFFIX, self._export_trace))
            except RuntimeError as error:  # of Kineto
                problems.append(f"{self._path.name}{TRACE_SUFFIX} cannot be recorded: {error}")
            if self._has_memory:
                # https://pytorch.org/memory_viz shows it
                dump: Callable[[str], None] = torch.cuda.memory._dump_snapshot
                problems.append(self._write(_SNAPSHOT_SUFFIX, lambda path: dump(str(path))))
        finally:
            if self._has_memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        return "; ".join(filter(None, problems))

    def _write(self, suffix: str, write: Callable[[Path], None]) -> str:
        """Write a file; return why it cannot be written, "" if it is there."""
        name = f"{self._path.name}{suffix}"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(self._path.with_name(name)) as partial_path:
                write(partial_path)
        except (OSError, RuntimeError) as error:  # RuntimeErrors are torch's
            return f"{name} cannot be written: {error}"
        return ""

    def _export_trace(self, path: Path) -> None:
        """Export the trace in Chrome's format through a pipe.

        Raises:
            OSError: The disk does not take it, or it is too large.
            RuntimeError: torch cannot export it.
        """
        source, target = os.pipe()
        with ThreadPoolExecutor(1) as pool:
            compressed = pool.submit(self._compress, source, path)
            try:
                # The export in C++ holds the interpreter to its end, and needs a file of its own.
                self._profile.export_chrome_trace(f"/dev/fd/{target}", use_python_export=True)
            except BrokenPipeError:
                pass  # `_compress` has failed, and raises below
            finally:
                os.close(target)
        compressed.result()

    def _compress(self, source: int, path: Path) -> None:
        """Compress what a pipe brings; close it at its end, at the largest size, or on an error."""
        size = 0
        with open(source, "rb") as trace, gzip.open(path, "wb", compresslevel=6) as target:
            while chunk := trace.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > self._max_trace_bytes:
                    raise OSError(
                        f"it is larger before compression than profile.max_trace_bytes="
                        f"{self._max_trace_bytes}"
                    )
                target.write(chunk)
