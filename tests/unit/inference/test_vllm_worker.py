"""Engine arguments of a server, and methods of its workers, against vLLM itself."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mcore_rl.config.schema import RolloutConfig

if TYPE_CHECKING:  # importing vLLM takes seconds, and every worker of a test run collects this
    from vllm.config import VllmConfig

    from mcore_rl.inference.vllm.worker import ServerName


def make_config(name: ServerName) -> VllmConfig:
    from vllm.config import VllmConfig

    from mcore_rl.inference.vllm.worker import build_lane_arguments

    arguments = build_lane_arguments(RolloutConfig(), name, max_model_tokens=64, eager=False)
    return VllmConfig(additional_config=arguments["additional_config"])


def test_servers_of_different_names_share_compiled_graphs(monkeypatch):
    from vllm.config import VllmConfig

    from mcore_rl.inference.vllm.worker import ServerName

    monkeypatch.setattr("os.environ", {})  # build_lane_arguments sets those of a process of its own
    first, second = ServerName.new(), ServerName.new()
    assert first != second
    assert make_config(first).compute_hash() == make_config(second).compute_hash()
    assert make_config(first).compute_hash() != VllmConfig().compute_hash()


def test_the_name_is_unpickled_with_the_config(monkeypatch):
    from mcore_rl.inference.vllm.worker import ServerName

    monkeypatch.setattr("os.environ", {})
    name = ServerName.new()
    copy = pickle.loads(pickle.dumps(make_config(name))).additional_config
    assert isinstance(copy, ServerName) and copy == name and copy.pid == name.pid


@pytest.mark.parametrize("is_cpu", [True, False])
def test_arguments_of_a_lane_are_engine_arguments_of_vllm(monkeypatch, is_cpu):
    from vllm.engine.arg_utils import AsyncEngineArgs

    from mcore_rl.inference.vllm import worker as vllm_worker

    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr(type(vllm_worker.current_platform), "is_cpu", lambda _: is_cpu)
    given = vllm_worker.build_lane_arguments(
        RolloutConfig(), vllm_worker.ServerName.new(), max_model_tokens=64, eager=False
    )
    assert given.keys() <= {field.name for field in fields(AsyncEngineArgs)}
    assert given["enforce_eager"] is is_cpu


@pytest.mark.parametrize(("interface", "expected"), [("", "=lo"), ("ib0", "ib0")])
def test_nccl_of_a_server_uses_the_interface_of_its_rank(monkeypatch, interface, expected):
    from mcore_rl.inference.vllm.worker import ServerName

    environment = {"RENDEZVOUS_HOST": "127.0.0.1", "RENDEZVOUS_PORT": "9"}
    environment |= {"NCCL_SOCKET_IFNAME": interface} if interface else {}
    monkeypatch.setattr("os.environ", environment)
    make_config(ServerName.new())
    assert environment["NCCL_SOCKET_IFNAME"] == expected
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_experts_on_a_gpu_use_a_kernel_without_routing(monkeypatch):
    # Traces hook the router, which a monolithic kernel never calls (moe_runner.py:620).
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    from mcore_rl.inference.vllm import worker as vllm_worker

    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr(type(vllm_worker.current_platform), "is_cpu", lambda _: False)
    name = vllm_worker.ServerName.new()
    given = vllm_worker.build_lane_arguments(
        RolloutConfig(), name, max_model_tokens=64, eager=False
    )
    backend = unquantized.map_unquantized_backend(given["moe_backend"])
    assert backend is unquantized.UnquantizedMoeBackend.TRITON
    monolithic = {
        backend: [kernel.is_monolithic() for kernel in unquantized.backend_to_kernel_cls(backend)]
        for backend in (backend, unquantized.UnquantizedMoeBackend.FLASHINFER_TRTLLM)
    }
    assert list(monolithic.values()) == [[False], [True, False]]  # the first of the other is taken


def test_a_single_worker_has_a_thread_on_each_of_its_cores(monkeypatch):
    from mcore_rl.inference.vllm import worker as vllm_worker

    monkeypatch.setattr("os.environ", dict(os.environ))
    cores = sorted(os.sched_getaffinity(0))[:2]
    config = RolloutConfig(cores=",".join(map(str, cores)))
    name = vllm_worker.ServerName.new()
    vllm_worker.build_lane_arguments(config, name, max_model_tokens=64, eager=False)
    receiver, sender = multiprocessing.Pipe()
    with vllm_worker.prepare_forks(name):
        process = multiprocessing.get_context("fork").Process(target=_send_cores, args=(sender,))
        process.start()
    assert receiver.poll(60) and receiver.recv() == (cores, len(cores))
    process.join(60)
    assert process.exitcode == 0


def _send_cores(pipe: Any) -> None:
    import torch

    pipe.send((sorted(os.sched_getaffinity(0)), torch.get_num_threads()))


class _TransferEngine:
    """A weight transfer engine whose first update fails, if it `fails`."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def start_weight_update(self) -> None: ...

    def reset_weight_update_target(self) -> None: ...

    def update_weights(self, update: object) -> None:
        fails, self._fails = self._fails, False
        if fails:
            raise OSError("the trainer is gone")

    def finish_weight_update(self) -> None: ...


def _make_worker(engine: _TransferEngine) -> Any:
    """Make vLLM's own worker, which keeps track of updates, with our extension."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_worker import Worker

    from mcore_rl.inference.vllm.worker import WorkerExtension

    class Extended(Worker, WorkerExtension):
        def __init__(self) -> None:
            self.weight_transfer_engine, self.vllm_config = engine, VllmConfig()
            self.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
            self._weight_update_active = self._weight_update_is_draft = False

    return Extended()


def test_workers_are_updated_again_after_an_update_that_failed_on_one():
    from mcore_rl.inference.vllm.server import update_workers

    workers = [_make_worker(_TransferEngine(fails)) for fails in (True, False)]

    class Engine:
        async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
            return [getattr(worker, method)(*args) for worker in workers]

    with pytest.raises(RuntimeError, match=r"version 1 failed: worker 0: OSError: the trainer is"):
        asyncio.run(update_workers(Engine(), 1))
    asyncio.run(update_workers(Engine(), 2))
