"""Adapters of a vLLM server, from memory: the base model stays, a version is an adapter.

A trainer's adapters arrive as the bytes of a safetensors file with PEFT's names. vLLM's manager of
a worker takes them in place of a folder: requests name the adapter of the version that they are to
be answered with (lora/worker_manager.py of vLLM 0.32). Frozen adapters are folders, which vLLM
reads itself, when the server starts. A prefix in the cache belongs to an adapter by its name
(v1/core/kv_cache_utils.py:578).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import safetensors.torch
import torch
from vllm.config.lora import MaxLoRARanks
from vllm.lora import worker_manager
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.worker import lora_model_runner_mixin

from mcore_rl.checkpoint.peft import build_adapter_config, list_targets, read_adapter_ranks
from mcore_rl.models.base import read_config
from mcore_rl.models.transformers_model import build_empty_model

_MEMORY = "memory:"  # prefix of the path of an adapter that is not a folder
_FIRST_FROZEN = 1 << 30  # vLLM's id of the first frozen adapter; lower ones are versions


def build_adapter_arguments(
    model_path: str, rank: int, adapters: Mapping[str, str]
) -> dict[str, Any]:
    """Return vLLM's engine arguments for a policy's adapters of a rank, and for frozen ones.

    Args:
        rank: 0: the server takes none of a policy.
        adapters: Folders of the frozen ones.
    """
    if not rank and not adapters:
        return {}
    rank = max([rank, *(max(read_adapter_ranks(folder)) for folder in adapters.values())])
    if current_platform.is_cpu():
        _use_plain_experts()
    return {
        "enable_lora": True,
        "max_lora_rank": min(size for size in get_args(MaxLoRARanks) if size >= rank),
        # Filled from the first on. On a CPU, tokens without an adapter that run beside others get
        # the values of the last (lora/ops/torch_ops/lora_ops.py:32): it is empty as long as there
        # are such tokens, until the policy has its first adapter.
        "max_loras": 1 + len(adapters),
        "lora_target_modules": _list_linears(model_path),
    }


def _list_linears(model_path: str) -> list[str]:
    """Return the names of linear layers, by transformers and as vLLM joins them.

    Experts are left out: with them vLLM runs all experts on kernels of Triton, which a CPU has not
    (fused_moe/oracle/unquantized.py:234).
    """
    model = build_empty_model(read_config(model_path))
    linears = {
        name.rpartition(".")[2]
        for name, module in model.base_model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    return sorted(linears | {"qkv_proj", "gate_up_proj"})


def register_manager() -> None:
    """Make vLLM's workers take adapters from memory, too."""
    lora_model_runner_mixin.LRUCacheWorkerLoRAManager = MemoryLoRAManager


def _use_plain_experts() -> None:
    """Let experts beside adapters run on the kernels that they have without."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    select = method.select_unquantized_moe_backend

    def select_without_adapters(moe_config: Any, *args: Any, **kwargs: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config, *args, **kwargs)

    method.select_unquantized_moe_backend = select_without_adapters


def build_request(version: int) -> LoRARequest:
    """Return vLLM's name of the adapter of a version from 1 on."""
    return LoRARequest(f"version-{version}", version, f"{_MEMORY}{version}")


def build_frozen_requests(adapters: Mapping[str, str]) -> dict[str, LoRARequest]:
    """Return vLLM's names of frozen adapters, from their folders."""
    return {
        name: LoRARequest(f"models.{name}", _FIRST_FROZEN + index, folder)
        for index, (name, folder) in enumerate(adapters.items())
    }


class MemoryLoRAManager(worker_manager.LRUCacheWorkerLoRAManager):
    """A worker's adapters. `store` brings a version before the requests that name it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stored: dict[int, tuple[dict[str, torch.Tensor], float]] = {}  # by version

    def store(self, version: int, content: bytes, alpha: float) -> None:
        """Take the adapters of a version. The last one is dropped: no request runs with it.

        Raises:
            ValueError: A tensor is of no layer with an adapter.
        """
        for last in self._stored:
            self.remove_adapter(last)
        self._stored = {version: (safetensors.torch.load(content), alpha)}
        self.add_adapter(build_request(version))

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        is_stored = lora_request.lora_path.startswith(_MEMORY)
        adapter = (self._read_stored if is_stored else super()._load_adapter)(lora_request)
        self._check_layers(adapter)
        return adapter

    def _read_stored(self, lora_request: LoRARequest) -> LoRAModel:
        tensors, alpha = self._stored[lora_request.lora_int_id]
        rank = next(t.shape[0] for name, t in tensors.items() if name.endswith("lora_A.weight"))
        mapper = getattr(self._adapter_manager.model, "hf_to_vllm_mapper", None)
        return LoRAModel.from_lora_tensors(
            lora_model_id=lora_request.lora_int_id,
            tensors=dict(tensors),
            peft_helper=PEFTHelper.from_dict(
                build_adapter_config(list_targets(tensors), rank, alpha)
            ),
            device="cpu",
            dtype=self.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )

    def _check_layers(self, adapter: LoRAModel) -> None:
        """Raise ValueError for a layer that vLLM would leave as it is."""
        known = self._adapter_manager.modules
        packed = {
            f"{name.rpartition('.')[0]}.{part}"
            for name in known
            for part in self._adapter_manager.packed_modules_mapping.get(
                name.rpartition(".")[2], ()
            )
        }
        if lost := sorted(set(adapter.loras) - set(known) - packed):
            raise ValueError(f"vLLM has no layer with adapters for {lost[0]}")
