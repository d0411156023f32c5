"""A training engine's memory: its size, and moving it to the host and back."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from mcore_rl.engine.base import Place
from mcore_rl.engine.megatron.device import device_name
from mcore_rl.engine.megatron.host_mirror import HostMirror, storage_id


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of a rank's model and optimizer between two calls; no activations."""

    parameters_bytes: int  # weights and buffers of the model, on the device or on the host
    gradients_bytes: int  # 0 after engine.to("host", grad=True)
    optimizer_state_bytes: int  # Adam's moments, and the float32 weights of a bfloat16 model
    on_device_bytes: int  # what of these three is on the engine's device, and not away


def move(
    chunks: Sequence[Any],
    optimizer: Any,
    place: Place,
    parts: Collection[str],
    mirrors: Mapping[str, HostMirror],
) -> None:
    """Move "parameters", "optimizer state" and "gradients". What is there already stays.

    Gradients are dropped, not moved: they are zero when they are back. `mirrors` are those of the
    other two, the same in every call. Megatron's offload_to_cpu of optimizers is not used: it also
    moves the float32 weights of a model without asking, and with a distributed optimizer cuts them
    off from the buffer that they are a part of (optimizer/optimizer.py:344).
    """
    to_host, grad = place == "host", "gradients" in parts
    # On the CPU lane the device is the host: memory is freed, and nothing needs to move.
    has_device = device_name() != "cpu"
    if grad and to_host and optimizer is not None:
        optimizer.zero_grad()  # gradients outside of the buffers
    if has_device:
        device = torch.device(torch.cuda.current_device())
        tensors = {
            "parameters": lambda: _model_tensors(chunks),
            "optimizer state": lambda: _optimizer_tensors(chunks, optimizer),
        }
        for part in tensors.keys() & set(parts):
            if not to_host:
                mirrors[part].reload()
            elif not mirrors[part].num_bytes:
                mirrors[part].offload(tensors[part](), device)
    for buffer in _buffers(chunks):
        shift = buffer.offload_to_cpu if to_host else buffer.reload_from_cpu
        shift(move_params=False, move_grads=grad)
    if to_host:
        _give_back(has_device)


def memory_report(
    chunks: Sequence[Any],
    optimizer: Any,
    away: Collection[str],
    mirrors: Mapping[str, HostMirror],
) -> MemoryReport:
    """Sizes of the storages of this rank, each counted once, wherever they are now."""
    parameters = _model_tensors(chunks)
    owned = _optimizer_tensors(chunks, optimizer)
    gradients = [buffer.grad_data for buffer in _buffers(chunks)]
    gradients += [t.grad for t in (*parameters, *owned) if t.grad is not None]
    seen: set[int] = set()
    parts = ("parameters", "gradients", "optimizer state")
    sizes = [_sizes(tensors, seen) for tensors in (parameters, gradients, owned)]
    in_mirrors = {part: mirror.num_bytes for part, mirror in mirrors.items()}
    total = {p: sum(s.values()) + in_mirrors.get(p, 0) for p, s in zip(parts, sizes, strict=True)}
    return MemoryReport(
        parameters_bytes=total["parameters"],
        gradients_bytes=total["gradients"],
        optimizer_state_bytes=total["optimizer state"],
        on_device_bytes=sum(
            size.get(device_name(), 0)
            for part, size in zip(parts, sizes, strict=True)
            if part not in away
        ),
    )


def _give_back(has_device: bool) -> None:
    """To others on the device: what has been freed here and is kept for the next allocation."""
    if has_device:
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc has it
        trim(0)


def _buffers(chunks: Sequence[Any]) -> list[Any]:
    wrapped = (chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel))
    return [b for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _model_tensors(chunks: Sequence[Any]) -> list[torch.Tensor]:
    # `buffers` of Megatron's DDP are those of gradients, so the module is asked.
    modules = [c.module if isinstance(c, DistributedDataParallel) else c for c in chunks]
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]


def _optimizer_tensors(chunks: Sequence[Any], optimizer: Any) -> list[torch.Tensor]:
    """Adam's moments and counts, and float32 weights that are no view of the model's."""
    if optimizer is None:
        return []
    models = {storage_id(tensor) for tensor in _model_tensors(chunks)}
    found: list[torch.Tensor] = []
    for part in optimizer.chained_optimizers:
        weights = (weight for group in part.param_groups for weight in group["params"])
        found += [weight for weight in weights if storage_id(weight) not in models]
        values = (value for state in part.state.values() for value in state.values())
        found += [value for value in values if isinstance(value, torch.Tensor)]
    return found


def _sizes(tensors: Iterable[torch.Tensor], seen: set[int]) -> Counter[str]:
    """Bytes by type of device, of storages that are not in `seen` yet."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if storage_id(tensor) not in seen:
            seen.add(storage_id(tensor))
            sizes[tensor.device.type] += tensor.untyped_storage().nbytes()
    return sizes
