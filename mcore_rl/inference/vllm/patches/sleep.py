"""Sleep of vLLM's workers, and the storages that it frees. Lines are those of vLLM 0.32."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.platforms import current_platform

from mcore_rl.inference.vllm.drafts import join_models


@functools.cache
def patch_sleep() -> None:
    """Give vLLM's CPU worker a sleep; make the workers of both lanes wake with an empty KV cache.

    vLLM's sleep is a no-op on a CPU (v1/worker/cpu_worker.py:179). Ours frees the storages of
    weights and KV cache and allocates them again, so that tensors that refer to them stay valid.
    Values are discarded, as in vLLM's sleep level 2 on a GPU. Reading a freed storage would end the
    process, so the server runs nothing meanwhile (inference/lifecycle.py).
    """
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        CPUWorker.sleep, CPUWorker.wake_up = _sleep_on_cpu, clear_woken_cache(_wake_on_cpu)
    else:
        from vllm.v1.worker.gpu_worker import Worker

        Worker.wake_up = clear_woken_cache(Worker.wake_up)


def clear_woken_cache(wake_up: Callable[..., None]) -> Callable[..., None]:
    """Extend a worker's `wake_up`: it zeroes the KV cache that it allocates.

    vLLM's (v1/worker/gpu_worker.py:332) leaves old memory contents. Attention multiplies slots that
    were never written by 0, which a NaN in them survives.
    """

    @functools.wraps(wake_up)
    def wake(worker: Any, tags: list[str] | None = None) -> None:
        wake_up(worker, tags)
        if tags is None or "kv_cache" in tags:
            for storage in list_kv_caches(worker.model_runner):
                zero_storage(storage)

    return wake


def zero_storage(storage: torch.UntypedStorage) -> None:
    """Zero a storage. On a CPU its pages take no time or memory until they are written."""
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if storage.device.type == "cpu":
        address, size, page = storage.data_ptr(), storage.nbytes(), mmap.PAGESIZE
        start, stop = -address % page, size - (address + size) % page
        # The kernel drops these private pages; whoever reads one again gets zeros.
        if start < stop and not ctypes.CDLL(None).madvise(
            ctypes.c_void_p(address + start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED
        ):
            content[:start].zero_()
            content[stop:].zero_()
            return
    content.zero_()


def _sleep_on_cpu(worker: Any, level: int = 1) -> None:
    """Free the storages of weights and KV cache; their sizes are in `worker._asleep`.

    Level 1 keeps the weights, where vLLM moves them to host memory.
    """
    if level not in (1, 2):
        raise ValueError(f"sleep of level {level} on a CPU; there are levels 1 and 2")
    model: Any = join_models(worker.model_runner)
    weights = list_weights(model) if level == 2 else []
    worker._asleep = {
        "weights": [(storage, storage.nbytes()) for storage in weights],
        "kv_cache": [
            (storage, storage.nbytes()) for storage in list_kv_caches(worker.model_runner)
        ],
    }
    for storages in worker._asleep.values():
        for storage, _ in storages:
            storage.resize_(0)
    for module in model.modules() if level == 2 else ():
        if hasattr(module, "cpu_linear"):  # it has oneDNN's pack of the weight
            module.cpu_linear = _refuse_to_run


def _wake_on_cpu(worker: Any, tags: list[str] | None = None) -> None:
    """Allocate the storages of these tags ("weights", "kv_cache"; None: all), without values."""
    for tag in tags or list(worker._asleep):
        for storage, num_bytes in worker._asleep.pop(tag):
            storage.resize_(num_bytes)


def _refuse_to_run(*_: Any) -> torch.Tensor:
    raise RuntimeError("this layer has had no weights since it slept")


def sum_mapped_bytes(tag: str) -> int:
    """Return the mapped bytes of a tag on a GPU, where sleep unmaps memory of unchanged tensors."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocations = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in allocations if data.tag == tag and not data.is_asleep)


def list_weights(model: torch.nn.Module) -> list[torch.UntypedStorage]:
    """Return the storages of parameters.

    Among them are W_UV and W_UK_T, which vLLM derives for MLA: it registers them as parameters
    (model_executor/layers/attention/mla_attention.py:1325).
    """
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():  # a mapped file
            parameter.data = parameter.data.clone()
    return _list_storages(model.parameters())


def list_kv_caches(model_runner: Any) -> list[torch.UntypedStorage]:
    """Return the storages of the KV cache of all layers."""
    caches = model_runner.kv_caches
    layers = (cache if isinstance(cache, list) else [cache] for cache in caches)
    return _list_storages(itertools.chain.from_iterable(layers))


def _list_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return each storage once, also if several tensors share it."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return list(storages.values())
