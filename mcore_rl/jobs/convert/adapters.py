"""Low-rank adapters of a checkpoint in PEFT's format, next to the weights that they adapt.

PEFT (https://github.com/huggingface/peft, src/peft/utils/save_and_load.py) reads a folder with
adapter_config.json and adapter_model.safetensors, whose tensors are called
`base_model.model.MODULE.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from mcore_rl.checkpoint.hf_writer import TensorPlan, plan_shards, write_shard
from mcore_rl.jobs.convert.megatron_folder import MegatronFolder
from mcore_rl.jobs.convert.sources import MegatronTensors

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_adapters(folder: Path, source: MegatronFolder) -> None:
    """A new folder with all adapters of a checkpoint. Tensors of one parameter share their A."""
    assert source.lora is not None
    folder.mkdir(exist_ok=True)
    plans = [TensorPlan(n, tuple(t.shape), t.dtype) for n, t in _factors(source)]
    [shard] = plan_shards(plans, sum(plan.nbytes for plan in plans))
    write_shard(folder, replace(shard, file=_WEIGHTS), _factors(source))
    modules = [plan.name.removesuffix(".lora_A.weight") for plan in plans]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": source.lora["rank"],
        "lora_alpha": source.lora["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({m.rpartition(".")[2] for m in modules if "lora_B" not in m}),
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _factors(source: MegatronFolder) -> Iterator[tuple[str, torch.Tensor]]:
    reader = MegatronTensors(source.reader, source.parameters)
    for parameter in source.parameters:
        if parameter.adapter is None:
            continue
        a, b = reader.factors(parameter)
        for tensor, factor in b.items():
            module = f"base_model.model.{tensor.removesuffix('.weight')}"
            yield f"{module}.lora_A.weight", a
            yield f"{module}.lora_B.weight", factor
