"""Models with images: sizes, tensors of their files in rules and exports, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.hf_writer import write_checkpoint
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import EngineConfig, Layout
from mcore_rl.engine.base import load_backend
from mcore_rl.models.base import (
    get_family,
    get_field,
    get_model_sizes,
    pad_vocab_size,
    read_config,
    use_family,
)
from mcore_rl.models.heads import build_value_config
from mcore_rl.models.transformers_model import map_sharded_weights
from mcore_rl.reshard.rules import Shard, check_cover, list_logical_tensors
from tests import tiny_vision

MOE = "qwen3_vl_moe"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for kind in tiny_vision.KINDS:
        tiny_vision.save(folder / kind, kind)
    return {kind: folder / kind for kind in tiny_vision.KINDS}


@pytest.fixture(autouse=True)
def _families() -> Iterator[None]:
    use_family("transformers")
    yield
    use_family("")


def write_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_rules_have_the_tensors_of_the_files_and_ranks_cover_them(paths, kind):
    reader = CheckpointReader(paths[kind])
    config = reader.read_config()
    weights = map_sharded_weights(config)
    check_cover(weights, 3)
    reader.check(list_logical_tensors(weights))
    reader.check(
        list_logical_tensors(get_family(config).weights(config, pad_vocab_size(config, 1)))
    )
    sizes = get_model_sizes(config)
    assert (sizes.num_attention_heads, sizes.num_query_groups, sizes.num_layers) == (2, 1, 2)
    assert sizes.num_experts == (4 if kind == MOE else 0)
    assert get_field(config, "vocab_size") == tiny_vision.VOCAB
    assert config["max_position_embeddings"] == 1024
    assert config["architectures"] == read_config(paths[kind])["architectures"]


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_shards_that_are_read_and_exported_are_the_checkpoint(paths, kind, tmp_path):
    reader, stored = CheckpointReader(paths[kind]), load_file(paths[kind] / "model.safetensors")
    model = transformers.AutoModelForImageTextToText.from_pretrained(paths[kind])
    exported = {}
    for weight in map_sharded_weights(reader.read_config()):
        parts = []
        for index in range(3 if weight.axis else 1):
            shard = Shard(index, 3 if weight.axis else 1)
            parts.append(torch.empty(weight.rule.get_local_shape(shard)))
            for block in weight.rule.get_blocks(shard):
                reader.read_into(block, parts[-1][block.local_slices])
        [tensor] = weight.rule.tensors
        exported[tensor.name] = torch.cat(parts)
        assert torch.equal(exported[tensor.name], model.get_parameter(weight.name))
    write_checkpoint(tmp_path / "export", exported.items(), paths[kind])
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in written.items())


def test_an_export_has_its_dtype_in_the_config_of_the_language_model(paths, tmp_path):
    config = json.loads((paths[MOE] / "config.json").read_text())
    config["text_config"]["dtype"] = "float32"
    write_config(tmp_path / "base", config)
    tensors = [("lm_head.weight", torch.zeros(2, 2).bfloat16())]
    write_checkpoint(tmp_path / "export", tensors, tmp_path / "base")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    assert "vocab_size" not in config


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tied_head_is_left_out_even_if_files_have_it(kind, tmp_path):
    config = tiny_vision.build_config(kind)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    names = {tensor.name for tensor in _list_tensors(CheckpointReader(tmp_path))}
    assert "lm_head.weight" not in names and len(names) > 40
    file = tmp_path / "model.safetensors"
    embedding = "model.embed_tokens.weight" if kind == "qwen2_5_vl" else ""
    tensors = load_file(file)
    [name] = [n for n in tensors if n.endswith("embed_tokens.weight")]
    assert name == (embedding or "model.language_model.embed_tokens.weight")
    write_checkpoint(
        tmp_path / "with head", [*tensors.items(), ("lm_head.weight", tensors[name])], tmp_path
    )
    reader = CheckpointReader(tmp_path / "with head")
    reader.check(_list_tensors(reader))
    other = tensors[name] + 1
    write_checkpoint(
        tmp_path / "other head", [*tensors.items(), ("lm_head.weight", other)], tmp_path
    )
    reader = CheckpointReader(tmp_path / "other head")
    with pytest.raises(ConfigError, match=f"which is not {name}, and config.json has tie_word"):
        reader.check(_list_tensors(reader))


def _list_tensors(reader: CheckpointReader) -> list[Any]:
    return list(list_logical_tensors(map_sharded_weights(reader.read_config())))


def test_a_config_with_all_fields_at_its_top_is_the_same_model(paths, tmp_path):
    config = json.loads((paths["qwen2_5_vl"] / "config.json").read_text())
    nested = read_config(paths["qwen2_5_vl"])
    text = config.pop("text_config")  # as in published checkpoints of Qwen2.5-VL
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [6, 5, 5]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    flat = write_config(tmp_path, text | config)
    assert get_model_sizes(flat) == get_model_sizes(nested)
    assert map_sharded_weights(flat) == map_sharded_weights(nested)


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_megatron_is_refused_by_name(paths, kind):
    config = read_config(paths[kind])
    with pytest.raises(ConfigError, match=r"actor.backend='megatron': .* allowed: actor.backend="):
        load_backend(EngineConfig()).check_model("actor", EngineConfig(), config)
    use_family("")
    with pytest.raises(ConfigError, match=f"model_type='{kind}' takes images.*allowed: backend="):
        get_model_sizes(config)


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(dp=2, ep=2)], ids=["cp2", "ep2"])
def test_tokens_and_experts_are_not_divided_over_ranks(paths, layout):
    engine, name = EngineConfig(backend="fsdp", layout=layout), "cp" if layout.cp > 1 else "ep"
    config = read_config(paths[MOE])
    with pytest.raises(ConfigError, match=f"actor.layout.{name}=2: model_type='{MOE}'.*allowed: 1"):
        load_backend(engine).check_model("actor", engine, config)


def test_a_value_model_is_refused_by_name(paths):
    with pytest.raises(ConfigError, match="no value or reward model of it; allowed: a model of"):
        build_value_config(read_config(paths["qwen3_vl"]))


@pytest.mark.parametrize("kind", ["gemma3", "llava", "qwen2_vl"])
def test_other_models_with_images_are_refused_by_name(kind, tmp_path):
    config = transformers.AutoConfig.for_model(kind, vision_config={}, architectures=["X"])
    fields = write_config(tmp_path, config.to_dict())
    with pytest.raises(ConfigError, match=f"'{kind}' has a vision_config.*allowed: qwen2_5_vl, q"):
        get_family(fields)


def test_square_experts_are_refused_which_transformers_and_vllm_read_differently():
    config = tiny_vision.build_config(MOE)
    config.text_config.moe_intermediate_size = 32
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    with pytest.raises(ConfigError, match=r"experts.gate_up_proj has the shape \(4, 64, 64\)"):
        map_sharded_weights(config.to_dict())


def test_experts_in_the_order_of_transformers_are_refused_by_their_shape(tmp_path):
    tiny_vision.build(MOE).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"down_proj has shape \(4, 64, 48\).*allowed: \[experts"):
        CheckpointReader(tmp_path)
