"""Move tensors of an engine between its device and the host."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from mcore_rl.engine.base import MALLOC_VARIABLES, Place
from mcore_rl.parallel.host_limits import compute_memory_use

_ALIGNMENT = 256  # bytes, of storages in the block of a mirror
_MAX_CACHING_USE = 0.5  # share of the memory in use, up to which a process keeps what it frees


class HostMirror:
    """A copy on the host of storages that were freed on the device.

    The copy is one page-locked block, which is kept for the next offload: locking its pages takes
    longer than copying through them. Only the storage behind a tensor is freed, so tensors keep
    their identity, and views of a buffer (Megatron's parameter buffers, float32 shards of a
    distributed optimizer) stay views. Tensors that are already on the host stay there.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._freed: list[tuple[torch.UntypedStorage, int, int]] = []  # storage, start, size

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the host instead of the device."""
        return sum(size for _, _, size in self._freed)

    def offload(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Copy the storages that `tensors` have on `device`, each once, and free them there."""
        if self._freed:
            raise RuntimeError("the mirror still has what was offloaded before: reload it first")
        storages = {get_storage_id(t): t.untyped_storage() for t in tensors if t.device == device}
        end = 0
        copied = []
        for storage in storages.values():
            if size := storage.nbytes():
                copied.append((storage, end, size))
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self._block.numel():
            allocate = _allocate_page_locked if device.type == "cuda" else _allocate
            self._block = allocate(end)
        _synchronize(device)  # other streams may still write to them
        for storage, start, size in copied:
            self._block[start : start + size].copy_(_view_bytes(storage), non_blocking=True)
        _synchronize(device)
        for storage, _, _ in copied:
            storage.resize_(0)
        self._freed = copied

    def reload(self) -> None:
        """Allocate the storages on their device again and copy their bytes back."""
        for storage, start, size in self._freed:
            storage.resize_(size)
            _view_bytes(storage).copy_(self._block[start : start + size], non_blocking=True)
        if self._freed:
            _synchronize(self._freed[0][0].device)
        self._freed = []


def get_storage_id(tensor: torch.Tensor) -> int:
    """Identify the memory behind a tensor; views share it, also while it is freed."""
    return int(tensor.untyped_storage()._cdata)


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
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
        MemoryError: The pages cannot be locked.
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


def move_storages(
    list_tensors: Mapping[str, Callable[[], Iterable[torch.Tensor]]],
    place: Place,
    parts: Collection[str],
    mirrors: Mapping[str, HostMirror],
    device: torch.device,
) -> None:
    """Move parts of an engine; leave what is already there.

    On CPUs the device is the host: nothing moves.

    Args:
        list_tensors: The tensors of each part; those that are not on `device` stay.
        mirrors: Copies of each part; the same objects in every call.
    """
    if device.type == "cpu":
        if place == "host":
            _return_freed_memory()
        return
    for part in list_tensors.keys() & set(parts):
        if place == "device":
            mirrors[part].reload()
        elif not mirrors[part].num_bytes:
            mirrors[part].offload(list_tensors[part](), device)
    if place == "host":  # return the memory that torch caches to other processes
        torch.get_device_module(device.type).empty_cache()


def _return_freed_memory() -> None:
    """Return the memory that glibc caches to other processes, unless half of the memory is free.

    The next pass has to touch returned pages anew, which takes up to a third of an update on a
    virtual machine (docs/quickstart.md). A process with other variables of malloc returns it.
    """
    is_caching = MALLOC_VARIABLES.items() <= os.environ.items()
    if is_caching and compute_memory_use() <= _MAX_CACHING_USE:
        return
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
