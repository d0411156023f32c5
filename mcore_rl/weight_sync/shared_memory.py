"""Memory that a training rank and a vLLM worker on the same device both map.

On a CPU anonymous files (memfd): nothing is in /dev/shm, and nothing is left when both
processes are gone, however they went. On a GPU torch's own sharing of CUDA memory (IPC).
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, Protocol

import torch

from mcore_rl.config.errors import ConfigError


def check_allocator() -> None:
    """Raises ConfigError for settings of torch with which no process maps another's GPU memory."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            raise ConfigError(
                f"{name}={value!r}: expandable segments cannot be shared with the servers, as "
                "weight_sync.method='colocated' does; allowed: without expandable_segments, or "
                "another weight_sync.method"
            )


class SharedBuckets(Protocol):
    """The trainer's end: it allocates, and says how the other process maps the same."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """For each allocation, in order, what `map_buckets` needs, as JSON."""
        ...

    @property
    def descriptors(self) -> list[int]:
        """Open files that must reach the other process with the description."""
        ...

    def finish_writes(self) -> None:
        """Return when the other process can read all that was written."""

    def close(self) -> None:
        """Let go of what only the trainer's end needs."""


def shared_buckets(device: torch.device) -> SharedBuckets:
    """Nothing allocated yet."""
    return _CudaBuckets(device) if device.type == "cuda" else _FileBuckets()


def map_buckets(
    described: list[dict[str, Any]], descriptors: list[int], device: torch.device
) -> list[torch.Tensor]:
    """The same memory in this process; closes the descriptors."""
    if device.type == "cuda":
        return [_opened(entry, device) for entry in described]
    try:
        pairs = zip(described, descriptors, strict=True)
        return [_mapped(descriptor, entry["num_bytes"]) for entry, descriptor in pairs]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def site_of(device: torch.device) -> str:
    """Equal for processes that can share memory on this device."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Containers of one host that do not share a network cannot find each other's sockets.
    return f"host {boot}, network {os.stat('/proc/self/ns/net').st_ino}"


class _FileBuckets:
    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self._sizes: list[int] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        descriptor = os.memfd_create("weights")
        os.ftruncate(descriptor, num_bytes)
        self.descriptors.append(descriptor)
        self._sizes.append(num_bytes)
        return _mapped(descriptor, num_bytes)

    def describe(self) -> list[dict[str, Any]]:
        return [{"num_bytes": num_bytes} for num_bytes in self._sizes]

    def finish_writes(self) -> None:
        """Nothing is in progress: copies on a CPU are done when they return."""

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


def _mapped(descriptor: int, num_bytes: int) -> torch.Tensor:
    """The mapping lives as long as the tensor."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


class _CudaBuckets:
    """As torch.multiprocessing shares CUDA tensors (reductions.py), without its pickles."""

    def __init__(self, device: torch.device) -> None:
        check_allocator()
        self.descriptors: list[int] = []
        self._device = device
        self._tensors: list[torch.Tensor] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._tensors.append(tensor)
        return tensor

    def describe(self) -> list[dict[str, Any]]:
        return [_handle(tensor) for tensor in self._tensors]

    def finish_writes(self) -> None:
        """Wait for one event after the bucket's writes, not for the device.

        Every write is in the current stream, or that stream waits for it (NCCL). The transfers of
        the next bucket, in other streams, go on meanwhile.
        """
        stream: Any = torch.cuda.current_stream(self._device)
        stream.record_event().synchronize()

    def close(self) -> None:
        self._tensors.clear()


_HANDLE = (
    "device", "handle", "size_bytes", "offset_bytes", "ref_counter_handle", "ref_counter_offset",
    "event_handle", "event_sync_required",
)  # fmt: skip


def _handle(tensor: torch.Tensor) -> dict[str, Any]:
    storage: Any = tensor.untyped_storage()
    fields = dict(zip(_HANDLE, storage._share_cuda_(), strict=True))
    fields["num_bytes"] = tensor.numel()
    return {n: v.hex() if isinstance(v, bytes) else v for n, v in fields.items()}


def _opened(entry: dict[str, Any], device: torch.device) -> torch.Tensor:
    fields = [bytes.fromhex(entry[n]) if "handle" in n else entry[n] for n in _HANDLE]
    storage: Any = torch.UntypedStorage
    # Number of the device in this process: the trainer may see others.
    shared = storage._new_shared_cuda(device.index or 0, *fields[1:])
    tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return tensor.set_(shared)[: entry["num_bytes"]]
