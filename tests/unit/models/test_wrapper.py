"""Wrappers: a language model inside a model with a frozen tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.hf_writer import write_checkpoint
from mcore_rl.cli.convert import main as convert
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DataConfig, EngineConfig, RLConfig
from mcore_rl.data.images import load_row_images
from mcore_rl.engine.base import load_backend
from mcore_rl.jobs import preflight
from mcore_rl.jobs.convert.verify import compare_folders
from mcore_rl.models.base import get_family, get_vllm_weights, read_config, use_family
from mcore_rl.models.heads import build_value_config
from mcore_rl.reshard.rules import check_cover, list_logical_tensors
from mcore_rl.testing import check_family

FILE = """
from mcore_rl.models.qwen3 import FAMILY
from mcore_rl.models.wrapper import wrap_family

WRAPPER = wrap_family(
    FAMILY, "seeing", "SeeingForConditionalGeneration",
    prefixes={"": "language_model."}, frozen_prefixes=("vision_tower.", "mm_projector."),
)
NESTED = wrap_family(
    FAMILY, "seeing", "SeeingForConditionalGeneration",
    prefixes={"model.": "model.language_model."}, frozen_prefixes=("vision_tower.",),
)
"""
TEXT = {
    "vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "hidden_act": "silu", "max_position_embeddings": 64, "dtype": "float32",
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["SeeingForConditionalGeneration"], "model_type": "seeing",
    "dtype": "float32", "text_config": TEXT, "vision_config": {"depth": 1, "dtype": "bfloat16"},
}  # fmt: skip
TOWER = {
    "vision_tower.patch.weight": torch.randn(3, 5, dtype=torch.bfloat16),
    "mm_projector.bias": torch.randn(7).half(),
}


@pytest.fixture
def families(tmp_path):
    (tmp_path / "families.py").write_text(FILE)
    use_family(f"{tmp_path / 'families.py'}:WRAPPER")
    yield tmp_path / "families.py"
    use_family("")


@pytest.fixture
def model(families, tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = read_config(folder)
    tensors = {
        t.name: torch.randn(t.shape)
        for t in list_logical_tensors(get_family(config).weights(config, 11))
    }
    save_file(tensors | TOWER, folder / "model.safetensors")
    return folder


def test_tensors_of_the_language_model_have_the_names_of_the_wrapper(model, families):
    config = read_config(model)
    weights = get_family(config).weights(config, 12)
    check_cover(weights, 2)
    names = {tensor.name for tensor in list_logical_tensors(weights)}
    assert {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"} < names
    assert all(name.startswith("language_model.") for name in names)
    served = get_vllm_weights(config)
    assert {tensor.name for tensor in list_logical_tensors(served)} == names
    assert all(weight.name.startswith("language_model.") for weight in served)
    use_family(f"{families}:NESTED")
    names = {tensor.name for tensor in list_logical_tensors(get_vllm_weights(config))}
    assert {"model.language_model.embed_tokens.weight", "lm_head.weight"} < names


def test_a_tower_is_not_expected_and_any_other_tensor_is(model):
    reader, config = CheckpointReader(model), read_config(model)
    weights = get_family(config).weights(config, 11)
    reader.check(list_logical_tensors(weights))
    assert set(reader.frozen) == TOWER.keys()
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"other_tower.bias": torch.zeros(3)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has unexpected tensor other_tower\.bias"):
        CheckpointReader(model).check(list_logical_tensors(weights))


def assert_same_tower(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    for name, tensor in TOWER.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name].view(torch.uint8), tensor.view(torch.uint8))


def test_an_export_has_the_tower_of_the_first_checkpoint(model, tmp_path):
    reader = CheckpointReader(model)
    trained = [name for name in reader.get_shapes() if name not in reader.frozen]
    weights = ((name, reader.read_tensor(name).bfloat16()) for name in trained)
    write_checkpoint(tmp_path / "export", weights, reference=model)
    assert_same_tower(tmp_path / "export")
    config = read_config(tmp_path / "export")
    assert (config["dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    assert config["vision_config"] == CONFIG["vision_config"]
    write_checkpoint(  # of what is exported, in float32 again
        tmp_path / "second",
        ((name, reader.read_tensor(name)) for name in trained),
        reference=tmp_path / "export",
    )
    assert_same_tower(tmp_path / "second")


def test_an_export_of_a_quantised_checkpoint_does_not_say_that_it_is(model, tmp_path):
    text = {**TEXT, "quantization_config": {"quant_method": "mxfp4"}}
    (model / "config.json").write_text(json.dumps({**CONFIG, "text_config": text}))
    write_checkpoint(tmp_path / "export", iter([("a", torch.ones(2))]), reference=model)
    exported = json.loads((tmp_path / "export/config.json").read_text())
    assert "quantization_config" not in {**exported, **exported["text_config"]}


def test_a_conversion_to_float8_is_refused(model, families, tmp_path):
    family = ["--family", f"{families}:WRAPPER"]
    paths = ["--model", str(model), "--output", str(tmp_path / "megatron")]
    convert(["hf-to-mcore", *paths, *family])
    paths = ["--checkpoint", str(tmp_path / "megatron"), "--output", str(tmp_path / "back")]
    with pytest.raises(ConfigError, match=r"--dtype=fp8: .* is a wrapper.* allowed: bfloat16"):
        convert(["mcore-to-hf", *paths, "--dtype", "fp8", *family])


def test_a_conversion_takes_the_tower_there_and_back(model, families, tmp_path):
    family = ["--family", f"{families}:WRAPPER"]
    paths = ["--model", str(model), "--output", str(tmp_path / "megatron")]
    convert(["hf-to-mcore", *paths, *family])
    paths = ["--checkpoint", str(tmp_path / "megatron"), "--output", str(tmp_path / "back")]
    convert(["mcore-to-hf", *paths, *family])
    first, second = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_same_tower(tmp_path / "back")
    comparison = compare_folders(tmp_path / "megatron", model, Console(quiet=True))
    assert comparison.equal and comparison.num_tensors == len(first)


def test_a_reference_without_the_tower_is_refused(model, families, tmp_path):
    family = ["--family", f"{families}:WRAPPER"]
    paths = ["--model", str(model), "--output", str(tmp_path / "megatron")]
    convert(["hf-to-mcore", *paths, *family])
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference/config.json").write_text(json.dumps(CONFIG))
    paths = ["--checkpoint", str(tmp_path / "megatron"), "--output", str(tmp_path / "back")]
    with pytest.raises(ConfigError, match=r"reference'?: there is no \*.safetensors file in it"):
        convert(["mcore-to-hf", *paths, "--reference", str(tmp_path / "reference"), *family])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, r"has no text_config; allowed: the fields of the language model"),
        (
            {"tie_word_embeddings": True, "text_config": TEXT | {"tie_word_embeddings": False}},
            r"tie_word_embeddings=True differs from text_config.tie_word_embeddings=False; allowed",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(model, change, message):
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    config = read_config(model)
    with pytest.raises(ConfigError, match=message):
        get_family(config).config_map(config)


def test_images_in_data_are_refused_with_the_models_that_take_them(model, tmp_path):
    settings = DataConfig(images_column="images")
    with pytest.raises(ConfigError, match=r"='images': .*'seeing' takes no images; allowed: qwen"):
        load_row_images(settings, str(model), str(tmp_path))


def test_values_and_engines_that_would_train_a_tower_are_refused(model):
    config = read_config(model)
    with pytest.raises(ConfigError, match=r"'seeing' takes images.*allowed: a model of text as"):
        build_value_config(config)
    with pytest.raises(ConfigError, match=r"Qwen3_5MoeConfig has a vision_config.*allowed: a conf"):
        check_family("", transformers.Qwen3_5MoeConfig())
    with pytest.raises(ConfigError, match=r"rollout.lora='adapter': .* frozen tower.*'merged'"):
        preflight._check_adapters(RLConfig(), config)
    settings = EngineConfig(backend="fsdp")
    with pytest.raises(ConfigError, match=r"backend='fsdp': .* frozen tower .*allowed: 'megatron'"):
        load_backend(settings, "actor").check_model("actor", settings, config)
