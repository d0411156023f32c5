"""Adapters as runs write them, loaded by PEFT into transformers' models of every family."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint.peft import Factors, check_adapter, get_adapted_linear, write_adapters
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.engine.fsdp import lora
from mcore_rl.models.base import HFConfig, get_family, read_config
from mcore_rl.models.transformers_model import build_empty_model, map_sharded_weights
from tests import tiny_vision
from tests.nightly import all_but

RANK, ALPHA = 3, 7.5
FAMILIES = (*tiny_families.cases(), "kimi_k25", "qwen3_moe_mixed")
# Models of transformers alone, with dense layers and shared experts beside experts of each kind.
_SHAPE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARDED: dict[str, dict[str, Any]] = {
    "phi3": {},
    "gemma2": {},
    "cohere2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    },
    "deepseek_v2": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8,
    },
}  # fmt: skip


def build_model(name: str, folder: Path) -> tuple[Any, Path]:
    """Return a tiny model of a family of this package, and its folder."""
    if name == "kimi_k25":
        path = tiny_families.save_published_kimi(folder)[1]
        return transformers.AutoModelForImageTextToText.from_pretrained(path), path
    cases = tiny_families.cases()
    config = cases[name].config if name in cases else tiny_models.configs()[name]
    model = tiny_models.build_from(config)
    model.save_pretrained(folder / "base")
    return model, folder / "base"


def draw_factors(hf_config: HFConfig) -> Iterator[Factors]:
    """Yield factors of all layers that can have them; tensors of a fused layer share their A."""
    generator = torch.Generator().manual_seed(0)
    for weight in get_family(hf_config).weights(hf_config, hf_config["vocab_size"]):
        if get_adapted_linear(weight):
            tensors = weight.rule.tensors
            a = torch.randn(RANK, tensors[0].shape[1], generator=generator) / 10
            for tensor in tensors:
                b = torch.randn(tensor.shape[0], RANK, generator=generator) / 10
                yield Factors(tensor.name, a, b)


def check_in_peft(model: Any, path: Path, factors: list[Factors], hf_config: HFConfig) -> None:
    """Compare the base model with adapters, loaded by PEFT, and a model with merged weights."""
    import peft

    folder, merged = path.parent / "adapter", path.parent / "merged"
    write_adapters(folder, lambda: iter(factors), RANK, ALPHA, hf_config)
    tensors = load_file(path / "model.safetensors")
    for tensor, a, b in factors:
        tensors[tensor] = tensors[tensor] + ALPHA / RANK * b @ a
    merged.mkdir()
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    (merged / "config.json").write_text((path / "config.json").read_text())
    base, expected = (type(model).from_pretrained(p).eval() for p in (path, merged))
    ids = torch.arange(3, 24)[None]
    with torch.no_grad():
        plain, scores = base(ids).logits, expected(ids).logits
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapted = peft.PeftModel.from_pretrained(base, folder)
            result = adapted.load_adapter(folder, "again")
        assert not result.missing_keys and not result.unexpected_keys
        messages = [str(item.message) for item in caught]
        assert not [m for m in messages if "missing" in m or "unexpected" in m]
        torch.testing.assert_close(adapted(ids).logits, scores, rtol=0, atol=2e-5)
    assert (scores - plain).abs().max() > 0.1


@pytest.mark.parametrize(
    "name",
    all_but(
        ("qwen2", "qwen3_moe_mixed", "qwen3_next", "qwen3_5_moe", "mixtral", "deepseek_v3",
         "glm4_moe", "minimax_m2", "kimi_k25"),
        FAMILIES,
    ),
)  # fmt: skip
def test_peft_computes_with_a_family_s_adapters_what_merged_weights_give(name, tmp_path):
    model, path = build_model(name, tmp_path)
    hf_config = read_config(path)
    check_in_peft(model, path, list(draw_factors(hf_config)), hf_config)


@pytest.mark.parametrize(
    "name",
    all_but(
        ("qwen2_moe", "dots1", "mixtral", "qwen2_5_vl", "qwen3_vl_moe"),
        (*SHARDED, *tiny_vision.KINDS),
    ),
)
def test_peft_computes_with_adapters_of_fsdp_what_merged_weights_give(name, tmp_path):
    """A vision tower has layers of the names of the language model's, and no adapters."""
    path = tmp_path / "base"
    if name in SHARDED:
        config = transformers.AutoConfig.for_model(name, **(_SHAPE | SHARDED[name]))
        model = tiny_models.build_from(config)
        model.save_pretrained(path)
    else:
        model = tiny_vision.build(name)
        model.save_pretrained(path)
    hf_config = read_config(path)
    empty = build_empty_model(hf_config)
    lora.attach_adapters(empty, LoRAConfig(rank=RANK, alpha=ALPHA))
    generator = torch.Generator().manual_seed(0)
    for module in empty.modules():
        if isinstance(module, lora.LoRALinear):
            for factor in lora.FACTORS:
                shape = getattr(module, factor).shape
                values = torch.randn(shape, generator=generator) / 10
                setattr(module, factor, torch.nn.Parameter(values))
    rules = {weight.name: weight for weight in map_sharded_weights(hf_config)}
    factors = lora.list_factors(empty, rules)
    check_in_peft(model, path, factors, hf_config)
    # The same folder is a frozen model's on servers.
    assert check_adapter("models.user.adapter", str(tmp_path / "adapter"), hf_config) == RANK


def test_adapters_of_some_layers_leave_those_of_the_same_name_alone(tmp_path):
    """target_modules names whole modules where others end in the same part."""
    model, path = build_model("qwen2", tmp_path)
    hf_config = read_config(path)
    factors = [f for f in draw_factors(hf_config) if ".1." in f.tensor]
    check_in_peft(model, path, factors, hf_config)
