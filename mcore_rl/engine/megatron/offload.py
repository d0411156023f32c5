"""Memory of a Megatron engine: its size, and moving it between the device and the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mcore_rl.engine.base import Place
from mcore_rl.engine.megatron.device import get_device_type
from mcore_rl.engine.offload import HostMirror, get_storage_id, move_storages

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    from mcore_rl.engine.megatron.model import PolicyModel

    type ModelChunk = PolicyModel | DistributedDataParallel


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of a rank's model and optimizer between two calls; no activations."""

    parameters_bytes: int  # weights and buffers of the model, on the device or on the host
    gradients_bytes: int  # 0 after engine.to("host", grad=True)
    optimizer_state_bytes: int  # Adam's moments, and the float32 weights of a bfloat16 model
    on_device_bytes: int  # what of these three is on the engine's device, and not offloaded


def move_parts(
    chunks: Sequence[ModelChunk],
    optimizer: ChainedOptimizer | None,
    place: Place,
    parts: Collection[str],
    mirrors: Mapping[str, HostMirror],
) -> None:
    """Move "parameters", "optimizer state" and "gradients"; leave what is already there.

    Gradients are dropped, not moved: they are zero after they return. Megatron's offload_to_cpu of
    optimizers is not used: it also moves the float32 weights of the model, and with a distributed
    optimizer detaches them from the buffer that they are views of (optimizer/optimizer.py:555).

    Args:
        mirrors: Copies of parameters and optimizer state; the same objects in every call.
    """
    is_offload, has_gradients = place == "host", "gradients" in parts
    if has_gradients and is_offload and optimizer is not None:
        optimizer.zero_grad()  # gradients outside of the buffers
    for buffer in _list_ddp_buffers(chunks):
        shift = buffer.offload_to_cpu if is_offload else buffer.reload_from_cpu
        shift(move_params=False, move_grads=has_gradients)
    list_tensors = {
        "parameters": lambda: _list_model_tensors(chunks),
        "optimizer state": lambda: _list_optimizer_tensors(chunks, optimizer),
    }
    has_device = get_device_type() != "cpu"
    device = torch.device(torch.cuda.current_device() if has_device else "cpu")
    move_storages(list_tensors, place, parts, mirrors, device)


def build_memory_report(
    chunks: Sequence[ModelChunk],
    optimizer: ChainedOptimizer | None,
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


def _is_ddp(chunk: ModelChunk) -> bool:
    from megatron.core.distributed import DistributedDataParallel  # after device.install

    return isinstance(chunk, DistributedDataParallel)


def _list_ddp_buffers(chunks: Sequence[ModelChunk]) -> list[_ParamAndGradBuffer]:
    wrapped = (chunk for chunk in chunks if _is_ddp(chunk))
    return [b for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _list_model_tensors(chunks: Sequence[ModelChunk]) -> list[torch.Tensor]:
    # DDP's `buffers` are those of gradients, so take the module inside.
    modules = [chunk.module if _is_ddp(chunk) else chunk for chunk in chunks]
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]


def _list_optimizer_tensors(
    chunks: Sequence[ModelChunk], optimizer: ChainedOptimizer | None
) -> list[torch.Tensor]:
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
