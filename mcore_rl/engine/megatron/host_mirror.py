"""Memory of the device that is freed for a while, with a copy of it on the host."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

_ALIGNMENT = 256  # bytes, of storages in the block of a mirror


class HostMirror:
    """A copy on the host of storages that were freed on the device.

    The copy is one page-locked block, which is kept for the next time: locking its pages takes
    longer than a copy through them. Tensors keep their identity, since it is the memory behind them
    that is freed, so that views of it (Megatron's parameter buffers, float32 shards of a
    distributed optimizer) stay views. What is on the host already stays there.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._freed: list[tuple[torch.UntypedStorage, int, int]] = []  # with start and size

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the host instead of the device."""
        return sum(size for _, _, size in self._freed)

    def offload(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Copy the storages that `tensors` have on `device`, each once, and free them there."""
        if self._freed:
            raise RuntimeError("the mirror still has what was offloaded before: reload it first")
        storages = {storage_id(t): t.untyped_storage() for t in tensors if t.device == device}
        end = 0
        added = []
        for storage in storages.values():
            if size := storage.nbytes():
                added.append((storage, end, size))
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self._block.numel():
            allocate = _allocate_page_locked if device.type == "cuda" else _allocate
            self._block = allocate(end)
        _synchronize(device)  # other streams may still write to them
        for storage, start, size in added:
            self._block[start : start + size].copy_(_bytes_of(storage), non_blocking=True)
        _synchronize(device)
        for storage, _, _ in added:
            storage.resize_(0)
        self._freed = added

    def reload(self) -> None:
        """Allocate the storages on their device again, with the bytes that they had."""
        for storage, start, size in self._freed:
            storage.resize_(size)
            _bytes_of(storage).copy_(self._block[start : start + size], non_blocking=True)
        if self._freed:
            _synchronize(self._freed[0][0].device)
        self._freed = []


def storage_id(tensor: torch.Tensor) -> int:
    """Identify the memory behind a tensor; views share it, also while it is freed."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocate(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _allocate_page_locked(num_bytes: int) -> torch.Tensor:
    """Allocate host memory that the GPU reads and writes by itself.

    torch's own allocator of such memory takes the next power of two (CachingHostAllocator), which
    would be up to twice the size of an engine.

    Raises:
        MemoryError: the pages cannot be locked.
    """
    block = _allocate(num_bytes)
    runtime, address = torch.cuda.cudart(), block.data_ptr()
    error = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(error):
        raise MemoryError(
            f"{num_bytes / 1e9:.1f} GB of host memory cannot be page-locked for what the engine "
            f"has on its GPU: {error}; allowed: as much as the limits of the machine (ulimit -l)"
        )
    weakref.finalize(block, runtime.cudaHostUnregister, address)
    return block
