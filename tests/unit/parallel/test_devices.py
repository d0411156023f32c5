"""Kinds of devices: their names are those of Ray and torch, and a process finds its own."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from ray._private.accelerators import (
    AMDGPUAcceleratorManager,
    NPUAcceleratorManager,
    NvidiaGPUAcceleratorManager,
)
from torch.distributed import distributed_c10d

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import DTYPE_OF_DEVICE
from mcore_rl.jobs.placement import detect_device_type, get_device_resource
from mcore_rl.parallel.devices import DEVICES, detect_device, get_gpu
from tests.fakes import FakeGpu, replace_torch_cuda


@pytest.fixture
def selected(monkeypatch) -> list[torch.device]:
    """The devices that are made current, on a machine with a GPU."""
    selected: list[torch.device] = []
    replace_torch_cuda(monkeypatch, [FakeGpu(0)])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    return selected


@pytest.mark.parametrize(
    ("name", "manager"),
    [
        ("cuda", NvidiaGPUAcceleratorManager),
        ("rocm", AMDGPUAcceleratorManager),
        ("ascend", NPUAcceleratorManager),
    ],
)
def test_names_are_those_of_ray(name, manager, monkeypatch):
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    device = DEVICES[name]
    assert device.ray_resource == manager.get_resource_name()
    assert device.visible_variable == manager.get_visible_accelerator_ids_env_var()


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_backend_is_the_one_that_torch_has_for_the_type(name):
    device = DEVICES[name]
    backends = distributed_c10d.Backend.default_device_backend_map
    assert backends[device.type] == device.backend


def test_device_types_with_a_dtype_have_run():
    assert {device.name for device in DEVICES.values() if device.has_run} == set(DTYPE_OF_DEVICE)
    assert all(DEVICES[name].type == name for name in DTYPE_OF_DEVICE)


def test_cpu_has_no_number_and_no_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    device = detect_device()
    assert device is DEVICES["cpu"] and device.select_local() == torch.device("cpu")
    device.empty_cache()
    device.synchronize()
    assert device.get_memory_stats() == {}
    assert (detect_device_type(), get_device_resource()) == ("cpu", "rank")


def test_gpu_of_a_rank_is_that_of_its_number_on_the_node(selected, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    device = detect_device()
    assert device is DEVICES["cuda"]
    assert device.select_local() == torch.device("cuda", 3) and selected == [
        torch.device("cuda", 3)
    ]
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": 0})
    device.empty_cache()
    device.synchronize()
    assert emptied and device.get_memory_stats() == {"num_ooms": 0}
    assert (detect_device_type(), get_device_resource()) == ("cuda", "GPU")


def test_gpu_of_torch_for_rocm_has_other_visible_devices_and_the_same_type(selected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert detect_device() is DEVICES["rocm"] is get_gpu()
    assert (detect_device_type(), get_device_resource()) == ("cuda", "GPU")


def test_npu_is_refused_and_not_taken_for_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    with pytest.raises(ConfigError, match=r"'npu' \(ascend\), on which nothing has run; allowed"):
        detect_device()


def test_kind_of_gpu_is_known_without_asking_for_gpus_and_the_table_without_torch(monkeypatch):
    def fail() -> bool:
        raise AssertionError("asked for GPUs")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert get_gpu() is DEVICES["cuda"]
    source = "import sys, mcore_rl.parallel.devices; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True)
