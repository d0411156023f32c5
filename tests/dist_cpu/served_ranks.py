"""vLLM workers without an engine, several models after another in the same processes.

Starting an engine for each of the models and layouts of a test would take many minutes. Here is
what an engine's worker is for weights, with `WorkerExtension` mixed in as an engine does it.
"""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from live_bytes import LiveBytes

from mcore_rl.weight_sync.announced import Announced

WAIT_S = 120.0


@dataclass(frozen=True)
class Order:
    """Load `path`, take two versions of each sync, and compare with what `exported` loads as."""

    path: Path
    exported: Path
    syncs: tuple[str, ...]
    servers: dict[str, bool]  # by name, whether ranks share experts; each takes part in every sync
    is_measured: bool = False  # then lines of _measured are among the complaints, and no comparison


def serve(
    rank: int, world: int, port: int, folder: Path, orders: Sequence[Order], pipe: Connection
) -> None:
    """The body of a process: sends a list of complaints, which should be empty."""
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)  # sockets that outlive a killed process
    try:
        _inspect_models_here()
        pipe.send([line for order in orders for line in _run(order, rank, world, port, folder)])
    except BaseException:  # noqa: BLE001 (told to the test)
        pipe.send([f"vLLM rank {rank} of {world}: {traceback.format_exc()}"])


def _inspect_models_here() -> None:
    """vLLM starts a process for each kind of model that it has not met on this machine yet.

    In this one it takes no time, and what is found stands in vLLM's cache for the servers of other
    tests.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def _run(order: Order, rank: int, world: int, port: int, folder: Path) -> list[str]:
    at = (rank, world, port)
    most_begun = _watch_modules()
    workers = {name: _worker(order.path, ep, *at) for name, ep in order.servers.items()}
    complaints, states = [], {}
    for sync in order.syncs:
        for version in (1, 2):
            for name, worker in workers.items():
                files = [folder / f"{sync}-{name}-{n}.json" for n in range(world)]
                endpoints = [_endpoint(file) for file in files]
                if order.is_measured:
                    complaints.append(_measured(order, worker, endpoints, version))
                else:
                    worker.receive_shards(endpoints, version)
                if error := worker.weight_error():
                    complaints.append(f"{sync}-{name}, version {version}, rank {rank}: {error}")
        for name, worker in workers.items():
            states[sync, name] = {n: tensor.clone() for n, tensor in _tensors(worker).items()}
    complaints += [f"modules: {order.path.name}, {n} at a time" for n in most_begun if n != 1]
    complaints += [] if most_begun else [f"modules: {order.path.name}, none was watched"]
    for name, ep in () if order.is_measured else order.servers.items():
        wanted = _tensors(_worker(order.exported, ep, *at))
        for sync in order.syncs:
            about = f"{sync}-{name}, rank {rank}"
            complaints += [f"{about}: {line}" for line in _differences(states[sync, name], wanted)]
    return complaints


def _measured(order: Order, worker: Any, endpoints: list[tuple[Any, ...]], version: int) -> str:
    """An update, and a line of JSON: bytes at its peak, and of its largest module's parameters."""
    sizes: dict[str, int] = {}
    for name, (shape, dtype) in Announced.from_json(worker.weight_layout()).parameters.items():
        module = name.rpartition(".")[0]
        itemsize = getattr(torch, dtype).itemsize
        sizes[module] = sizes.get(module, 0) + math.prod(shape) * itemsize
    with LiveBytes() as memory:
        worker.receive_shards(endpoints, version)
    assert not worker.weight_error(), worker.weight_error()
    found = {"model": order.path.name, "peak": memory.peak, "module": max(sizes.values())}
    return "memory:" + json.dumps(found)


def _watch_modules() -> list[int]:
    """Filled with how many modules have begun and are not complete, each time that one begins."""
    from mcore_rl.rollout import vllm_weights

    begun: set[Any] = set()
    found: list[int] = []
    materialize, process = vllm_weights.materialize_layer, vllm_weights._layerwise_process

    def begin(layer: Any, info: Any) -> None:
        begun.add(layer)
        found.append(len(begun))
        materialize(layer, info)

    def finish(layer: Any, info: Any) -> None:
        process(layer, info)
        begun.discard(layer)

    vllm_weights.materialize_layer, vllm_weights._layerwise_process = begin, finish
    return found


def _differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    if found.keys() != wanted.keys():
        return [f"{sorted(found.keys() ^ wanted.keys())} only on one side"]
    return [name for name, tensor in wanted.items() if not _same_bits(found[name], tensor)]


def _tensors(worker: Any) -> dict[str, torch.Tensor]:
    """All that the model computes with, as vLLM keeps it."""
    model = worker.model_runner.get_model()
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, layer in model.named_modules():
        for name in ("W_UV", "W_UK_T"):  # what MLA absorbs, plain attributes
            if isinstance(tensor := getattr(layer, name, None), torch.Tensor):
                found[f"{prefix}.{name}"] = tensor
    return {name: tensor.detach() for name, tensor in found.items()}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


def _endpoint(file: Path) -> tuple[Any, ...]:
    deadline = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} did not come")
        time.sleep(0.01)
    return tuple(json.loads(file.read_text()))


def _worker(path: Path, ep: bool, rank: int, world: int, port: int) -> Any:
    from mcore_rl.config.schema import RolloutConfig
    from mcore_rl.rollout import vllm_server

    os.environ |= vllm_server._QUIET
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from mcore_rl.rollout import vllm_worker

    cores = "|".join("nobind" for _ in range(world))
    rollout = RolloutConfig(tp=world, ep=ep, cores=cores)
    name = vllm_worker.ServerName.new()
    arguments = vllm_worker.lane_arguments(rollout, name, 64, eager=True)
    config = EngineArgs(
        model=str(path),
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=1 << 20,
        tensor_parallel_size=world,
        enable_expert_parallel=ep,
        distributed_executor_backend="mp" if world > 1 else "uni",
        skip_tokenizer_init=True,
        **arguments,
    ).create_engine_config()
    destroy_model_parallel()
    wrapper = WorkerWrapperBase(rpc_rank=rank)
    fields = {
        "vllm_config": config,
        "local_rank": rank,
        "rank": rank,
        "distributed_init_method": f"tcp://127.0.0.1:{port}",
        "is_driver_worker": rank == 0,
    }
    with set_current_vllm_config(config):
        wrapper.init_worker([fields] * world)
        wrapper.worker.init_device()
        wrapper.worker.load_model()
    return wrapper.worker
