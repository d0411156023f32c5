"""Adapters of whole families of transformers: which of them would not train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))

import transformers_families

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.engine.fsdp import lora


def build_family(kind: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers_families.build_config(kind), attn_implementation="eager"
    ).eval()


def compute_loss(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 35)[None]
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def test_adapters_of_indexers_are_refused_since_a_choice_of_tokens_has_no_gradient():
    model = build_family("deepseek_v32")
    message = (
        r"actor\.lora\.targets has weights_proj, wk, wq_b, but an adapter of model\.layers\.0\."
        r"self_attn\.indexer\.\w+ would not train: .* of down_proj, .*, q_a_proj, .*up_proj$"
    )
    with pytest.raises(ConfigError, match=message):
        lora.check_adapters(model, LoRAConfig(rank=3), lambda: compute_loss(model), "actor.lora")


def test_layer_that_is_in_no_product_does_not_refuse_the_rest_of_its_target():
    model = build_family("zamba2")  # the shared block has adapters for layers that it is not in
    settings = LoRAConfig(rank=3)
    lora.check_adapters(model, settings, lambda: compute_loss(model))
    gradients = {
        name.rpartition(".lora_B")[0]: value.grad is not None
        for name, value in model.named_parameters()
        if name.endswith("lora_B")
    }
    unused = [name for name, has_gradient in gradients.items() if not has_gradient]
    assert unused and len(unused) < len(gradients)
