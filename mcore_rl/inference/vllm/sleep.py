"""Sleep on the CPU lane: vLLM's own is a no-op there (v1/worker/cpu_worker.py:179 of vLLM 0.32).

The storage of weights and KV cache is freed and allocated again, so that every tensor that refers
to it stays what it is. The values are discarded, as in vLLM's sleep level 2 on a GPU. Reading it
while it is freed would end the process: the server then runs nothing (inference/vllm/lifecycle.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.platforms import current_platform


def install() -> None:
    """Give vLLM's CPU worker the methods of its GPU worker; both wake with an empty KV cache."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        CPUWorker.sleep, CPUWorker.wake_up = _sleep, clear_woken_cache(_wake_up)
    else:
        from vllm.v1.worker.gpu_worker import Worker

        Worker.wake_up = clear_woken_cache(Worker.wake_up)


def clear_woken_cache(wake_up: Callable[..., None]) -> Callable[..., None]:
    """Extend a worker's `wake_up`: pages of the KV cache that it allocates are zero.

    vLLM's (v1/worker/gpu_worker.py:332) leaves what was in that memory before. Attention multiplies
    slots that were never written by 0, which a NaN in them survives.
    """

    @functools.wraps(wake_up)
    def wake(worker: Any, tags: list[str] | None = None) -> None:
        wake_up(worker, tags)
        if tags is None or "kv_cache" in tags:
            for storage in _kv_caches(worker.model_runner):
                zeros = torch.empty(0, dtype=torch.uint8, device=storage.device)
                zeros.set_(storage).zero_()

    return wake


def kept_bytes(model_runner: Any) -> tuple[int, int]:
    """Of the weights, and of the KV cache; 0 when asleep."""
    if not current_platform.is_cpu():
        return _mapped_bytes("weights"), _mapped_bytes("kv_cache")
    weights = sum(storage.nbytes() for storage in _weights(model_runner.get_model()))
    return weights, sum(storage.nbytes() for storage in _kv_caches(model_runner))


def _mapped_bytes(tag: str) -> int:
    """On a GPU what sleeps is unmapped, while its tensors keep their sizes."""
    from vllm.device_allocator.cumem import CuMemAllocator

    found = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in found if data.tag == tag and not data.is_asleep)


def _sleep(worker: Any, level: int = 1) -> None:
    if level != 2:
        raise ValueError(f"sleep of level {level} on a CPU; there is level 2")
    model = worker.model_runner.get_model()
    worker._asleep = {
        "weights": [(one, one.nbytes()) for one in _weights(model)],
        "kv_cache": [(one, one.nbytes()) for one in _kv_caches(worker.model_runner)],
    }
    for storages in worker._asleep.values():
        for storage, _ in storages:
            storage.resize_(0)
    for module in model.modules():
        if hasattr(module, "cpu_linear"):  # with it goes oneDNN's pack of the weight
            module.cpu_linear = _refuse


def _wake_up(worker: Any, tags: list[str] | None = None) -> None:
    for tag in tags or list(worker._asleep):
        for storage, num_bytes in worker._asleep.pop(tag):
            storage.resize_(num_bytes)


def _refuse(*_: Any) -> torch.Tensor:
    raise RuntimeError("this layer has had no weights since it slept")


def _weights(model: torch.nn.Module) -> list[torch.UntypedStorage]:
    """Of parameters, and of what vLLM derives from them and keeps as plain attributes (MLA)."""

    def tensors() -> Iterator[torch.Tensor]:
        yield from model.parameters()
        for module in model.modules():
            for name in ("W_UV", "W_UK_T"):
                if isinstance(tensor := vars(module).get(name), torch.Tensor):
                    yield tensor

    for tensor in tensors():
        if not tensor.untyped_storage().resizable():  # it is a file's, mapped
            tensor.data = tensor.data.clone()
    return _storages(tensors())


def _kv_caches(model_runner: Any) -> list[torch.UntypedStorage]:
    def tensors() -> Iterator[torch.Tensor]:
        for cache in model_runner.kv_caches:
            yield from cache if isinstance(cache, list) else [cache]

    return _storages(tensors())


def _storages(tensors: Iterator[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once, though several tensors may share it."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
    return list(found.values())
