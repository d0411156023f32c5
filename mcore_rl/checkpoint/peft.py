"""LoRA adapters: the weights that can have one, and adapters in PEFT's format.

PEFT (https://github.com/huggingface/peft, src/peft/utils/save_and_load.py) reads a folder with
adapter_config.json and adapter_model.safetensors, whose tensors are called
`base_model.model.MODULE.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from mcore_rl.checkpoint.hf_writer import TensorPlan, plan_shards, write_shard
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.reshard.rules import Weight

FOLDER = "adapter"  # inside a Hugging Face checkpoint
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Factors(NamedTuple):
    """LoRA factors of a Hugging Face tensor [out, in], which changes by alpha / rank * B @ A."""

    tensor: str
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]


def get_adapted_linear(weight: Weight) -> str | None:
    """Return the linear layer of a weight that can have an adapter, else None.

    Prediction layers (MTP), embeddings and heads have none.

    >>> get_adapted_linear(Weight("decoder.layers.{layer}.mlp.linear_fc1.weight", None, layer=0))
    'linear_fc1'
    """
    path, _, parameter = weight.name.rpartition(".")
    linear = path.rpartition(".")[2]
    if weight.layer is None or not linear.startswith("linear_"):
        return None
    return linear if parameter in ("weight", "weight{expert}") else None


def check_targets(key: str, weights: Sequence[Weight], config: LoRAConfig) -> None:
    """Raise ConfigError if a target is no linear layer of the model; `key` names the setting."""
    allowed = {name for weight in weights if (name := get_adapted_linear(weight))}
    if unknown := sorted(set(config.targets) - allowed):
        raise ConfigError(
            f"{key}.targets names {', '.join(unknown)}, which this model does not have; allowed: "
            f"{', '.join(sorted(allowed))}"
        )


def initialize_factor(name: str, seed: int, rank: int, num_inputs: int) -> torch.Tensor:
    """Return the full initial A of a weight [rank, num_inputs], float32, the same on all ranks."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    bound = num_inputs**-0.5
    return torch.empty(rank, num_inputs).uniform_(-bound, bound, generator=generator)


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
    config = build_adapter_config([plan.name for plan in plans], rank, alpha)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def pack_adapters(factors: Iterable[Factors]) -> bytes:
    """Return all adapters as the bytes of a safetensors file with PEFT's names."""
    # Tensors of a fused layer share their A, which a file has for each.
    tensors = {name: value.clone() for name, value in _name_tensors(iter(factors))}
    content: bytes = safetensors.torch.save(tensors)
    return content


def build_adapter_config(names: Iterable[str], rank: int, alpha: float) -> dict[str, Any]:
    """Return adapter_config.json of adapters; `names` are those of their tensors."""
    suffix = ".lora_A.weight"
    modules = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }


def _name_tensors(factors: Iterator[Factors]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the factors as tensors, by their names in PEFT's file."""
    for tensor, a, b in factors:
        module = f"base_model.model.{tensor.removesuffix('.weight')}"
        yield f"{module}.lora_A.weight", a
        yield f"{module}.lora_B.weight", b
