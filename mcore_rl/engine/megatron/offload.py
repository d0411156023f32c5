"""Memory of a training engine: its size, and moving it between the device and the host."""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.engine.base import Place
from mcore_rl.engine.megatron.device import get_device_type

_ALIGNMENT = 256  # bytes, of storages in the block of a mirror


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of a rank's model and optimizer between two calls; no activations."""

    parameters_bytes: int  # weights and buffers of the model, on the device or on the host
    gradients_bytes: int  # 0 after engine.to("host", grad=True)
    optimizer_state_bytes: int  # Adam's moments, and the float32 weights of a bfloat16 model
    on_device_bytes: int  # what of these three is on the engine's device, and not offloaded


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


def move_parts(
    chunks: Sequence[Any],
    optimizer: Any,
    place: Place,
    parts: Collection[str],
    mirrors: Mapping[str, HostMirror],
) -> None:
    """Move "parameters", "optimizer state" and "gradients"; leave what is already there.

    Gradients are dropped, not moved: they are zero after they return. Megatron's offload_to_cpu of
    optimizers is not used: it also moves the float32 weights of the model, and with a distributed
    optimizer detaches them from the buffer that they are views of (optimizer/optimizer.py:344).

    Args:
        mirrors: Of parameters and optimizer state; the same objects in every call.
    """
    is_offload, has_gradients = place == "host", "gradients" in parts
    # On the CPU lane the device is the host: memory is freed, and nothing needs to move.
    has_device = get_device_type() != "cpu"
    if has_gradients and is_offload and optimizer is not None:
        optimizer.zero_grad()  # gradients outside of the buffers
    if has_device:
        device = torch.device(torch.cuda.current_device())
        list_tensors = {
            "parameters": lambda: _list_model_tensors(chunks),
            "optimizer state": lambda: _list_optimizer_tensors(chunks, optimizer),
        }
        for part in list_tensors.keys() & set(parts):
            if not is_offload:
                mirrors[part].reload()
            elif not mirrors[part].num_bytes:
                mirrors[part].offload(list_tensors[part](), device)
    for buffer in _list_ddp_buffers(chunks):
        shift = buffer.offload_to_cpu if is_offload else buffer.reload_from_cpu
        shift(move_params=False, move_grads=has_gradients)
    if is_offload:  # return the memory that allocators cache to other processes
        if has_device:
            torch.cuda.empty_cache()
        elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
            trim(0)


def build_memory_report(
    chunks: Sequence[Any],
    optimizer: Any,
    offloaded: Collection[str],
    mirrors: Mapping[str, HostMirror],
) -> MemoryReport:
    """Return the sizes of this rank's storages, each counted once, on the device or the host."""
    parameters = _list_model_tensors(chunks)
    states = _list_optimizer_tensors(chunks, optimizer)
    gradients = [buffer.grad_data for buffer in _list_ddp_buffers(chunks)]
    gradients += [t.grad for t in (*parameters, *states) if t.grad is not None]
    seen: set[int] = set()
    parts = ("parameters", "gradients", "optimizer state")
    sizes = [_sum_storage_bytes(tensors, seen) for tensors in (parameters, gradients, states)]
    mirrored = {part: mirror.num_bytes for part, mirror in mirrors.items()}
    totals = {p: sum(s.values()) + mirrored.get(p, 0) for p, s in zip(parts, sizes, strict=True)}
    return MemoryReport(
        parameters_bytes=totals["parameters"],
        gradients_bytes=totals["gradients"],
        optimizer_state_bytes=totals["optimizer state"],
        on_device_bytes=sum(
            size.get(get_device_type(), 0)
            for part, size in zip(parts, sizes, strict=True)
            if part not in offloaded
        ),
    )


def _is_ddp(chunk: Any) -> bool:
    from megatron.core.distributed import DistributedDataParallel  # after device.install

    return isinstance(chunk, DistributedDataParallel)


def _list_ddp_buffers(chunks: Sequence[Any]) -> list[Any]:
    wrapped = (chunk for chunk in chunks if _is_ddp(chunk))
    return [b for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _list_model_tensors(chunks: Sequence[Any]) -> list[torch.Tensor]:
    # DDP's `buffers` are those of gradients, so take the module inside.
    modules = [chunk.module if _is_ddp(chunk) else chunk for chunk in chunks]
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]


def _list_optimizer_tensors(chunks: Sequence[Any], optimizer: Any) -> list[torch.Tensor]:
    """Return Adam's moments and steps, and float32 weights that are no view of the model's."""
    if optimizer is None:
        return []
    model_ids = {get_storage_id(tensor) for tensor in _list_model_tensors(chunks)}
    tensors: list[torch.Tensor] = []
    for part in optimizer.chained_optimizers:
        weights = (weight for group in part.param_groups for weight in group["params"])
        tensors += [weight for weight in weights if get_storage_id(weight) not in model_ids]
        values = (value for state in part.state.values() for value in state.values())
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return tensors


def _sum_storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> Counter[str]:
    """Return bytes by device type, of storages that are not in `seen`; add them to it."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if get_storage_id(tensor) not in seen:
            seen.add(get_storage_id(tensor))
            sizes[tensor.device.type] += tensor.untyped_storage().nbytes()
    return sizes
