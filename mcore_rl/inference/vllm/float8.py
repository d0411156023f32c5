"""Checkpoints in float8 blocks (checkpoint/fp8.py): vLLM loads them in the server's dtype.

Weights are dequantised as they are read, by the reader that the trainer has, and the model is built
without the quantisation: it takes the same shards as that of a plain checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from mcore_rl.checkpoint import fp8
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.models.base import read_config

LOAD_FORMAT = "mcore_rl"


def float8_arguments(model_path: str, *, ep: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments for a checkpoint in float8 blocks; none for others.

    Other quantisations are left to vLLM.
    """
    quantization = read_config(model_path).get("quantization_config")
    if quantization is None:
        has_files = any(Path(model_path).glob("*.safetensors"))
        if not has_files or not CheckpointReader(model_path).is_quantized:
            return {}
    elif not fp8.is_block_format(quantization):
        return {}
    return {
        "load_format": LOAD_FORMAT,
        "hf_overrides": {"quantization_config": None},
        # Experts of other workers are neither read nor dequantised.
        "enable_ep_weight_filter": ep,
    }


def register_loader() -> None:
    """Register the loader with vLLM, as one of its load formats."""
    register_model_loader(LOAD_FORMAT)(_Float8Loader)


class _Float8Loader(DefaultModelLoader):
    """Load tensors as `CheckpointReader` reads them."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.counter_before_loading_weights = time.perf_counter()
        reader = CheckpointReader(model_config.model)
        for name in reader.get_shapes():
            if not should_skip_weight(name, self.local_expert_ids):
                yield name, reader.read_tensor(name)
