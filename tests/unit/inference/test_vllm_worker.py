"""Engine arguments of a server, and methods of its workers, against vLLM itself."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mcore_rl.config.schema import RolloutConfig, SpeculativeConfig

if TYPE_CHECKING:  # importing vLLM takes seconds, and every worker of a test run collects this
    from vllm.config import VllmConfig

    from mcore_rl.inference.vllm.worker import ServerName


def make_config(name: ServerName) -> VllmConfig:
    from vllm.config import VllmConfig

    from mcore_rl.inference.vllm.worker import build_device_arguments

    arguments = build_device_arguments(RolloutConfig(), name, max_model_tokens=64, eager=False)
    return VllmConfig(additional_config=arguments["additional_config"])


def test_servers_of_different_names_share_compiled_graphs(monkeypatch):
    from vllm.config import VllmConfig

    from mcore_rl.inference.vllm.worker import ServerName

    monkeypatch.setattr(
        "os.environ", {}
    )  # build_device_arguments sets those of a process of its own
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
    given = vllm_worker.build_device_arguments(
        RolloutConfig(), vllm_worker.ServerName.new(), max_model_tokens=64, eager=False
    )
    assert given.keys() <= {field.name for field in fields(AsyncEngineArgs)}
    assert given["enforce_eager"] is is_cpu


GPU_GIB = {  # memory by name
    "NVIDIA H100 80GB HBM3": 79,
    "NVIDIA H200": 139,
    "NVIDIA A100-SXM4-80GB": 79,
    "NVIDIA B200": 178,
    "NVIDIA L4": 22,
}


QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
DEEPSEEK_WITH_PREDICTION_LAYER = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 1,
}  # fmt: skip


def build_config(
    folder: Path, rollout: RolloutConfig, max_tokens: int = 4096, model: dict[str, Any] = QWEN3
) -> VllmConfig:
    """Return vLLM's config of a server of a small model."""
    from mcore_rl.inference.vllm.server import VLLMServer

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128}
    length = {"max_position_embeddings": max_tokens}
    (folder / "config.json").write_text(json.dumps(model | shape | heads | length))
    server = VLLMServer(str(folder), "float32", max_tokens, rollout, seed=0)
    return server.build_engine_config()[0]


def read_batch_limits(
    folder: Path, rollout: RolloutConfig, max_tokens: int = 4096
) -> tuple[int, int]:
    """Return the limits of a server's batches in vLLM's config: sequences and tokens."""
    scheduler = build_config(folder, rollout, max_tokens).scheduler_config
    return scheduler.max_num_seqs, scheduler.max_num_batched_tokens


@pytest.mark.parametrize("name", GPU_GIB)
def test_batch_limits_on_a_gpu_are_those_of_vllm_serve_unless_set(monkeypatch, tmp_path, name):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    monkeypatch.setattr("os.environ", dict(os.environ))
    for method, value in {
        "is_cpu": False,
        "get_device_total_memory": GPU_GIB[name] << 30,
        "get_device_name": name,
    }.items():
        monkeypatch.setattr(type(current_platform), method, lambda *_, value=value: value)
    tokens, sequences = EngineArgs.get_batch_defaults(1)
    expected = tuple(limits[UsageContext.OPENAI_API_SERVER] for limits in (sequences, tokens))
    if "H100" in name:
        assert expected == (1024, 8192)
    assert read_batch_limits(tmp_path, RolloutConfig()) == expected
    settings = RolloutConfig(max_num_seqs=8, max_num_batched_tokens=512)
    assert read_batch_limits(tmp_path, settings) == (8, 512)
    assert read_batch_limits(tmp_path, RolloutConfig(max_num_seqs=300)) == (300, expected[1])


def test_latent_attention_has_the_same_kernels_on_a_cpu_with_amx(monkeypatch, tmp_path):
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    rollout = RolloutConfig(speculative=SpeculativeConfig(num_tokens=2))
    config = build_config(tmp_path, rollout, model=DEEPSEEK_WITH_PREDICTION_LAYER)
    selector = SimpleNamespace(use_mla=True, use_sparse=False)
    served, draft = config.attention_config.backend, config.speculative_config.attention_backend
    for backend in (served, draft):
        assert CpuPlatform.get_attn_backend_cls(backend, selector).endswith(".CPUMLABackend")


@pytest.mark.parametrize(
    ("settings", "max_tokens", "expected"),
    [
        ({}, 4096, (256, 8192)),
        ({}, 10_000, (256, 10_000)),
        ({"max_num_seqs": 8}, 4096, (8, 8192)),
        ({"max_num_batched_tokens": 5000}, 4096, (256, 5000)),
    ],
)
def test_batch_limits_of_the_cpu_lane_allow_a_whole_prompt(
    monkeypatch, tmp_path, settings, max_tokens, expected
):
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert read_batch_limits(tmp_path, RolloutConfig(**settings), max_tokens) == expected


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
    given = vllm_worker.build_device_arguments(
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
    vllm_worker.build_device_arguments(config, name, max_model_tokens=64, eager=False)
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
            self.model_runner = SimpleNamespace(
                reset_lora_state=lambda: None, get_model=lambda: None, get_draft_model=lambda: None
            )
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
