"""Checkpoint folders are read by slices, checked before use and never left half-written."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint.hf import CheckpointReader, write_checkpoint
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.boxes import Block, Box, LogicalTensor

TENSORS = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5.0)}
EXPECTED = [LogicalTensor("a", (4, 3)), LogicalTensor("b", (5,))]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    save_file(TENSORS, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text('{"t": 1}')
    return path


def test_a_block_is_read_as_the_slice_of_its_tensor(folder):
    with CheckpointReader(folder) as reader:
        reader.check(EXPECTED)
        block = Block(EXPECTED[0], Box((1, 1), (2, 2)), (0, 0))
        assert torch.equal(reader.read(block), TENSORS["a"][1:3, 1:3])


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ([*EXPECTED, LogicalTensor("c", (1,))], "lacks tensor c"),
        (EXPECTED[:1], "holds unexpected tensor b"),
        (
            [EXPECTED[0], LogicalTensor("b", (6,))],
            r"tensor b has shape \(5,\), but config.json asks",
        ),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(folder, expected, message):
    with CheckpointReader(folder) as reader, pytest.raises(ConfigError, match=message):
        reader.check(expected)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no .*safetensors file in it"):
        CheckpointReader(tmp_path)


def test_a_damaged_file_is_named(folder):
    (folder / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read as safetensors"):
        CheckpointReader(folder)


def test_an_index_that_names_a_missing_file_is_named(folder):
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names model-00002-of-00002\.safetensors, which is not"):
        CheckpointReader(folder)


def test_shapes_of_a_checkpoint_in_parts_come_from_its_index(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with CheckpointReader(tmp_path) as reader:
        assert reader.shapes() == {"a": (2, 3), "b": (4,)}


def test_an_index_that_names_a_tensor_its_file_lacks_is_named(folder):
    index = {"weight_map": {"z": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with (
        CheckpointReader(folder) as reader,
        pytest.raises(ConfigError, match=r"model\.safetensors has no tensor z"),
    ):
        reader.shapes()


def test_a_written_checkpoint_reads_back_bit_for_bit_in_bounded_shards(folder, tmp_path):
    path = tmp_path / "out"
    write_checkpoint(path, TENSORS.items(), reference=folder, max_shard_bytes=50)
    with CheckpointReader(path) as reader:
        reader.check(EXPECTED)
    files = sorted(path.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert (path / "tokenizer.json").read_text() == '{"t": 1}'
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 68


def test_the_config_of_an_export_names_the_dtype_of_its_tensors(folder, tmp_path):
    (folder / "config.json").write_text('{"dtype": "float32", "vocab_size": 7}')
    write_checkpoint(tmp_path / "out", [("a", torch.zeros(2, dtype=torch.bfloat16))], folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"dtype": "bfloat16", "vocab_size": 7}


def test_a_stream_that_breaks_leaves_nothing(folder, tmp_path):
    def breaking():
        yield "a", TENSORS["a"]
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        write_checkpoint(tmp_path / "out", breaking(), reference=folder)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_existing_folder_is_not_overwritten(folder, tmp_path):
    with pytest.raises(ConfigError, match="already exists"):
        write_checkpoint(folder, TENSORS.items(), reference=folder)
    assert torch.equal(load_file(folder / "model.safetensors")["a"], TENSORS["a"])
