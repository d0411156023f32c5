"""Adapters in PEFT's format, as a setting names their folder: what is refused, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint.peft import Factors, check_adapter, write_adapters
from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import HFConfig

KEY = "models.user.adapter"
MODULE = "model.layers.1.self_attn.q_proj"
A, B = (f"base_model.model.{MODULE}.lora_{factor}.weight" for factor in "AB")
MODEL: HFConfig = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 31,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip
QWEN = {**MODEL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def make_adapter(folder: Path, rank: int = 3) -> Path:
    """Write an adapter of a layer's queries, as a run exports it."""
    factors = Factors(f"{MODULE}.weight", torch.ones(rank, 16), torch.ones(16, rank))
    write_adapters(folder, lambda: iter([factors]), rank, 6.0, QWEN)
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def rename_module(folder: Path, module: str, earlier: str = MODULE) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(earlier, module)] = tensors.pop(name)

    change_tensors(folder, rename)


def test_an_adapter_of_any_rank_of_its_model_passes(tmp_path):
    assert check_adapter(KEY, str(make_adapter(tmp_path / "a", 3)), QWEN) == 3
    folder = make_adapter(tmp_path / "b", 8)
    # A rank by layer, as PEFT writes it; the base model's name is not compared.
    change_config(folder, r=4, rank_pattern={"q_proj": 8}, base_model_name_or_path="elsewhere")
    assert check_adapter(KEY, str(folder), QWEN) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: change_config(f, r=2), "{'A': (2, 16), 'B': (16, 2)}, as in the base model"),
        (lambda f: change_config(f, r="3"), "r='3', rank_pattern={}; allowed: numbers"),
        (lambda f: change_config(f, r=0), "r=[0]; allowed: whole numbers above 0"),
        (lambda f: change_config(f, lora_alpha=None), "lora_alpha=None, alpha_pattern={};"),
        (lambda f: change_config(f, rank_pattern=[1]), "r=3, rank_pattern=[1]; allowed: numbers"),
        (lambda f: change_config(f, peft_type="IA3"), "peft_type='IA3'; allowed: 'LORA'"),
        (lambda f: change_config(f, use_dora=True), "use_dora=True; allowed: False"),
        (lambda f: change_config(f, init_lora_weights="pissa"), "init_lora_weights='pissa';"),
        (lambda f: change_config(f, modules_to_save=["score"]), "modules_to_save=['score'];"),
        (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "is a JSON list, not an object"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "cannot be read as safetensors"),
        (lambda f: (f / "adapter_model.safetensors").write_text("x"), "cannot be read as safe"),
        (lambda f: change_tensors(f, dict.clear), "has no tensor; allowed: at least one layer's"),
        (
            lambda f: change_tensors(f, lambda t: t.pop(B)),
            f"{MODULE} has the factors {{'A': (",
        ),
        (
            lambda f: change_tensors(f, lambda t: t.update({B: torch.ones(32, 3)})),
            "'B': (32, 3)}; allowed: {'A': (3, 16), 'B': (16, 3)}",
        ),
        (
            lambda f: rename_module(f, "model.layers.2.self_attn.q_proj"),
            "has an adapter of model.layers.2.self_attn.q_proj, which is no linear layer",
        ),
        (lambda f: rename_module(f, "lm_head"), "has an adapter of lm_head, which is no linear"),
        (
            lambda f: change_tensors(f, lambda t: t.update(scale=torch.ones(1))),
            "has tensor scale; allowed: base_model.model.MODULE.lora_A.weight",
        ),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused_with_its_setting(tmp_path, change, message):
    folder = make_adapter(tmp_path / "adapter")
    change(folder)
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        check_adapter(KEY, str(folder), QWEN)
    assert str(refused.value).startswith(f"{KEY}={str(folder)!r}")


def test_an_adapter_of_another_model_or_a_missing_folder_is_refused(tmp_path):
    folder = make_adapter(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"allowed: model.layers.N.self_attn.o_proj,.* up to 1$"):
        check_adapter(KEY, str(folder), MODEL)
    wider = {**QWEN, "hidden_size": 32}
    with pytest.raises(ConfigError, match=r"'A': \(3, 32\), 'B': \(32, 3\)"):
        check_adapter(KEY, str(folder), wider)
    with pytest.raises(ConfigError, match=r"^models.user.adapter='nowhere' does not exist"):
        check_adapter(KEY, "nowhere", QWEN)


@pytest.mark.parametrize("prefix", ["model.language_model", "model"])
def test_an_adapter_of_a_model_with_images_is_of_its_language_model(tmp_path, prefix):
    # PEFT writes the names of modules, a run those of the checkpoint's tensors.
    text = {key: value for key, value in QWEN.items() if key not in ("model_type", "architectures")}
    vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2}
    model = {
        "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": text, "vision_config": vision,
    }  # fmt: skip
    folder = make_adapter(tmp_path / "adapter")
    rename_module(folder, MODULE.replace("model", prefix, 1))
    check_adapter(KEY, str(folder), model)
    rename_module(folder, "model.visual.blocks.0.attn.proj", MODULE.replace("model", prefix, 1))
    with pytest.raises(ConfigError, match=r"model.visual.blocks.0.attn.proj, which is no"):
        check_adapter(KEY, str(folder), model)
