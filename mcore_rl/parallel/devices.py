"""Kinds of devices: their names in torch, torch.distributed, Ray and the environment.

The runs of this project use "cuda" and "cpu". Another kind takes an entry here, and then a check of
what is written for CUDA: Megatron's device (engine/megatron/device.py), csrc and vLLM's workers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.config.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device. It imports torch when something is done with one."""

    name: str
    type: str  # of torch.device
    backend: str  # of torch.distributed
    ray_resource: str
    visible_variable: str = ""  # environment variable with the ids that a process may see
    has_run: bool = True  # False: written from documentation

    @property
    def module(self) -> Any:
        """torch.cuda, torch.npu or torch.cpu."""
        import torch

        return torch.get_device_module(self.type)

    def select_local(self) -> torch.device:
        """Make the device of LOCAL_RANK the current one and return it; the CPU has no number."""
        import torch

        if self.type == "cpu":
            return torch.device("cpu")
        device = torch.device(self.type, int(os.environ.get("LOCAL_RANK", "0")))
        self.module.set_device(device)
        return device

    def synchronize(self) -> None:
        """Wait for the kernels of the current device."""
        self.module.synchronize()

    def empty_cache(self) -> None:
        """Give memory that torch holds and does not use back to the device."""
        if self.type != "cpu":
            self.module.empty_cache()

    def get_memory_stats(self) -> dict[str, int]:
        """Return the statistics of torch's allocator on the current device; {} on the CPU."""
        return {} if self.type == "cpu" else dict(self.module.memory_stats())

    def reset_peak_memory(self) -> None:
        """Begin the peaks of get_memory_stats anew; nothing on the CPU."""
        if self.type != "cpu":
            self.module.reset_peak_memory_stats()


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("cpu", "cpu", "gloo", ray_resource="rank"),  # a resource that the jobs define
        Device("cuda", "cuda", "nccl", "GPU", "CUDA_VISIBLE_DEVICES"),
        # torch for ROCm keeps the names cuda and nccl, which is RCCL there
        # (https://docs.pytorch.org/docs/stable/notes/hip.html). Ray refuses ROCR_VISIBLE_DEVICES
        # without HIP_VISIBLE_DEVICES (ray/_private/accelerators/amd_gpu.py).
        Device("rocm", "cuda", "nccl", "GPU", "HIP_VISIBLE_DEVICES", has_run=False),
        # torch_npu registers the device npu and the backend hccl
        # (https://gitcode.com/Ascend/pytorch). Ray: ray/_private/accelerators/npu.py.
        Device("ascend", "npu", "hccl", "NPU", "ASCEND_RT_VISIBLE_DEVICES", has_run=False),
    )
}


def get_gpu() -> Device:
    """Return the kind of GPU that torch is built for.

    It does not ask for GPUs: after that, CUDA no longer reads which are visible.
    """
    import torch

    return DEVICES["rocm" if torch.version.hip else "cuda"]


def detect_device() -> Device:
    """Return the kind of device that this process computes on.

    Raises:
        ConfigError: It is a kind that runs do not know.
    """
    import torch

    if torch.cuda.is_available():
        return get_gpu()
    npu = getattr(torch, "npu", None)  # torch_npu is loaded with torch where it is installed
    if npu is not None and npu.is_available():
        ascend = DEVICES["ascend"]
        raise ConfigError(
            f"this machine has devices of torch's type {ascend.type!r} ({ascend.name}), on which "
            f"nothing has run; allowed: a GPU, or {ascend.visible_variable}='' for the CPU"
        )
    return DEVICES["cpu"]
