"""Profiles of a rank during a step: a trace of torch.profiler, a snapshot of the GPU's memory."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from mcore_rl.observability.timeline import TRACE_SUFFIX

# Allocations and frees in a snapshot, the newest; each has its stack of Python functions.
_MAX_MEMORY_EVENTS = 100_000
_SNAPSHOT_SUFFIX = ".memory.pickle"


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
        """Stop, and write the files; return why one was not written, "" if all were."""
        try:
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._has_memory:
                self._write_snapshot()
            return self._write_trace()
        except OSError as error:
            return f"{self._path.name}{TRACE_SUFFIX} cannot be written: {error}"
        finally:
            if self._has_memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write_trace(self) -> str:
        """Write the trace in Chrome's format, compressed, unless it is too large."""
        name = f"{self._path.name}{TRACE_SUFFIX}"
        plain = self._path.with_name(f".{name}.plain.partial")
        partial = self._path.with_name(f".{name}.partial")
        try:
            self._profile.export_chrome_trace(str(plain))
            size = plain.stat().st_size
            if size > self._max_trace_bytes:
                return (
                    f"{name} is dropped: {size} bytes before compression; allowed: up to "
                    f"profile.max_trace_bytes={self._max_trace_bytes}"
                )
            with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)
            partial.replace(self._path.with_name(name))
            return ""
        finally:
            plain.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)

    def _write_snapshot(self) -> None:
        """Write the allocator's history, which https://pytorch.org/memory_viz shows."""
        name = f"{self._path.name}{_SNAPSHOT_SUFFIX}"
        partial = self._path.with_name(f".{name}.partial")
        try:
            torch.cuda.memory._dump_snapshot(str(partial))
            partial.replace(self._path.with_name(name))
        finally:
            partial.unlink(missing_ok=True)
