"""LoRA adapters in PEFT's format.

PEFT (https://github.com/huggingface/peft, src/peft/utils/save_and_load.py) reads a folder with
adapter_config.json and adapter_model.safetensors, whose tensors are called
`base_model.model.MODULE.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from mcore_rl.checkpoint.hf_writer import TensorPlan, plan_shards, write_shard

FOLDER = "adapter"  # inside a Hugging Face checkpoint
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Factors(NamedTuple):
    """LoRA factors of a Hugging Face tensor [out, in], which changes by alpha / rank * B @ A."""

    tensor: str
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]


def write_adapters(
    folder: Path, factors: Callable[[], Iterator[Factors]], rank: int, alpha: float
) -> None:
    """Write a folder with all adapters.

    Args:
        factors: Called twice, for shapes and for tensors.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(exist_ok=True)
    plans = [TensorPlan(n, tuple(t.shape), t.dtype) for n, t in _name_tensors(factors())]
    [shard] = plan_shards(plans, sum(plan.nbytes for plan in plans))
    write_shard(folder, replace(shard, file=_WEIGHTS), _name_tensors(factors()))
    modules = [plan.name.removesuffix(".lora_A.weight") for plan in plans]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({m.rpartition(".")[2] for m in modules if "lora_B" not in m}),
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _name_tensors(factors: Iterator[Factors]) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor, a, b in factors:
        module = f"base_model.model.{tensor.removesuffix('.weight')}"
        yield f"{module}.lora_A.weight", a
        yield f"{module}.lora_B.weight", b
