"""Checkpoints are written as planned, whole or not at all, and read by everybody else's readers."""

from __future__ import annotations

import errno
import json
import os
import random
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mcore_rl.checkpoint import hf_writer
from mcore_rl.checkpoint.hf import CheckpointReader, SafetensorsFile
from mcore_rl.checkpoint.hf_writer import (
    TensorPlan,
    copy_companions,
    plan_shards,
    write_checkpoint,
    write_index,
    write_shard,
)
from mcore_rl.config.errors import ConfigError

TENSORS = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5.0)}
MIXED = {
    "odd": torch.arange(7.0).to(torch.float8_e4m3fn),
    "float32": torch.arange(6.0).reshape(2, 3),
    "nothing": torch.empty(0, 2),
    "scalar": torch.tensor(3.0, dtype=torch.bfloat16),
    "bfloat16": torch.arange(5.0).bfloat16(),
    "é 'quoted\" \\": torch.ones(1),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_file(TENSORS, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text('{"t": 1}')
    return path


def plans(tensors: dict[str, torch.Tensor]) -> list[TensorPlan]:
    return [TensorPlan(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]


def one_shard(tensors: dict[str, torch.Tensor]) -> hf_writer.ShardPlan:
    [shard] = plan_shards(plans(tensors), 1 << 30)
    return shard


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), limit=st.integers(1, 100))
def test_shards_are_filled_in_order_and_stay_below_the_limit(sizes, limit):
    tensors = [TensorPlan(f"t{n}", (size,), torch.float32) for n, size in enumerate(sizes)]
    shards = plan_shards(tensors, limit)
    assert [name for shard in shards for name in shard.entries] == [t.name for t in tensors]
    assert sum(shard.nbytes for shard in shards) == 4 * sum(sizes)
    for shard, after in pairwise(shards):
        assert shard.nbytes <= limit or len(shard.entries) == 1
        first = next(iter(after.entries.values()))
        assert shard.nbytes + first.nbytes > limit  # it did not fit
    total = len(shards)
    names = [f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    assert [s.file for s in shards] == (names if total > 1 else ["model.safetensors"])


def test_a_file_is_what_the_library_reads(tmp_path):
    shard = one_shard(MIXED)
    write_shard(tmp_path, shard, MIXED.items())
    assert os.listdir(tmp_path) == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].tolist() == tensor.tolist()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"


def test_tensors_stand_where_the_plan_says_aligned_to_their_elements(tmp_path):
    shard = one_shard(MIXED)
    write_shard(tmp_path, shard, MIXED.items())
    data = (tmp_path / shard.file).read_bytes()
    assert SafetensorsFile(tmp_path / shard.file).entries == shard.entries
    for name, entry in shard.entries.items():
        stored = data[entry.offset : entry.offset + entry.nbytes]
        assert stored == bytes(MIXED[name].reshape(-1).view(torch.uint8).tolist())
        assert entry.offset % entry.dtype.itemsize == 0


def test_the_order_of_the_stream_does_not_change_a_byte(tmp_path):
    shard, contents = one_shard(MIXED), set()
    for seed in range(5):
        items = list(MIXED.items())
        random.Random(seed).shuffle(items)
        write_shard(tmp_path, shard, items)
        contents.add((tmp_path / shard.file).read_bytes())
    assert len(contents) == 1


def test_memory_that_is_no_row_of_bytes_is_written_as_the_tensor(tmp_path):
    wide = torch.arange(12.0).reshape(3, 4)
    tensors = {"turned": wide.T, "cut": wide[:, 1:3], "grown": wide[0].expand(3, 4)}
    tensors["parameter"] = torch.nn.Parameter(wide)
    write_shard(tmp_path, one_shard(tensors), tensors.items())
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


class Stream:
    """Tensors, and how many of them were in memory at once: by their memory, not by their names."""

    def __init__(self, count: int) -> None:
        self.count, self.alive, self.most = count, 0, 0

    def __iter__(self):
        for number in range(self.count):
            memory = np.full(10, number, dtype=np.float32)
            weakref.finalize(memory, self._gone)
            self.alive += 1
            self.most = max(self.most, self.alive)
            tensor = torch.from_numpy(memory)
            del memory
            yield f"t{number}", tensor
            del tensor

    def _gone(self) -> None:
        self.alive -= 1


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    stream = Stream(20)
    write_shard(tmp_path, one_shard({f"t{n}": torch.empty(10) for n in range(20)}), stream)
    assert stream.most <= 2  # the one that is made, and the one that was written last
    assert stream.alive <= 1


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("a", torch.zeros(4, 3))], "b is planned and did not come"),
        ([*TENSORS.items(), ("c", torch.zeros(1))], "c is not planned, or came before"),
        ([*TENSORS.items(), ("a", torch.zeros(4, 3))], "a is not planned, or came before"),
        ([("a", torch.zeros(3, 4))], r"a: torch.float32 \(3, 4\) was planned as torch.float32 \(4"),
        ([("b", torch.zeros(5).half())], r"b: torch.float16 \(5,\) was planned as torch.float32"),
    ],
)
def test_a_stream_that_is_not_the_planned_one_leaves_nothing(tmp_path, stream, message):
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path, one_shard(TENSORS), stream)
    assert not os.listdir(tmp_path)


def test_a_tensor_is_planned_once():
    with pytest.raises(ValueError, match="a tensor is planned twice"):
        plan_shards(plans(TENSORS) + plans(TENSORS), 1 << 30)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device: .*model\.safetensors"):
        write_shard(tmp_path, one_shard(TENSORS), TENSORS.items())
    assert not os.listdir(tmp_path)


def test_a_write_that_the_kernel_cuts_short_goes_on(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:5], offset))
    write_shard(tmp_path, one_shard(TENSORS), TENSORS.items())
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    CheckpointReader(tmp_path)  # and its checksums are those of the whole


def test_an_index_names_the_file_of_each_tensor(tmp_path):
    shards = plan_shards(plans(TENSORS), 50)
    write_index(tmp_path, shards)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 68},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        },
    }


def test_one_file_has_no_index(tmp_path):
    write_index(tmp_path, plan_shards(plans(TENSORS), 1 << 30))
    assert not os.listdir(tmp_path)


PUBLISHED = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "tokenizer.model", "qwen.tiktoken", "modeling_deepseek.py",
    "configuration_deepseek.py", "additional_chat_templates/tool_use.jinja",
]  # fmt: skip
LEFT = [
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "model.safetensors.index.fp32.json", "consolidated.00.pth",
    "README.md", ".gitattributes", "original/params.json",
]  # fmt: skip


def test_what_stands_beside_the_weights_is_copied_and_weights_are_not(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    for name in [*PUBLISHED, *LEFT]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text('{"x": 1}')
    copy_companions(source, target, torch.bfloat16)
    loaded = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert loaded == set(PUBLISHED)
    assert json.loads((target / "tokenizer.json").read_text()) == {"x": 1}


def test_files_that_are_links_are_copied_as_files(tmp_path):
    """Copy from a folder like the hub's cache, which has links into its blobs."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (tmp_path / "blob").write_text("{}")
    (source / "tokenizer.json").symlink_to("../blob")
    copy_companions(source, target, torch.bfloat16)
    assert not (target / "tokenizer.json").is_symlink()
    (tmp_path / "blob").unlink()
    with pytest.raises(OSError, match=r"No such file .*tokenizer\.json"):
        copy_companions(source, target, torch.bfloat16)


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ({"dtype": "float32", "x": 7}, {}, {"dtype": "bfloat16", "x": 7}),
        ({"torch_dtype": "float32"}, {"x": 1}, {"torch_dtype": "bfloat16", "x": 1}),
        ({"x": 1}, {"x": 2}, {"x": 2}),
        ({"quantization_config": {"a": 1}}, {}, {}),
        ({"quantization_config": 1}, {"quantization_config": 2}, {"quantization_config": 2}),
    ],
)
def test_the_config_is_that_of_the_tensors_beside_it(tmp_path, before, changes, after):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "config.json").write_text(json.dumps(before))
    copy_companions(source, target, torch.bfloat16, changes)
    assert json.loads((target / "config.json").read_text()) == after


def test_a_written_checkpoint_reads_back_bit_for_bit_in_bounded_shards(folder, tmp_path):
    path = tmp_path / "out"
    write_checkpoint(path, TENSORS.items(), reference=folder, max_shard_bytes=50)
    assert CheckpointReader(path).get_shapes() == {"a": (4, 3), "b": (5,)}
    files = sorted(path.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert (path / "tokenizer.json").read_text() == '{"t": 1}'
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 68


def test_the_config_of_an_export_names_the_dtype_of_its_largest_tensor(folder, tmp_path):
    (folder / "config.json").write_text('{"dtype": "float32", "vocab_size": 7}')
    tensors = [("a", torch.zeros(2, dtype=torch.bfloat16)), ("b", torch.zeros(1))]
    write_checkpoint(tmp_path / "out", tensors, folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"dtype": "bfloat16", "vocab_size": 7}


@pytest.mark.parametrize("max_shard_bytes", [1, 1 << 20])
def test_transformers_loads_a_written_checkpoint(tmp_path, max_shard_bytes):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    write_checkpoint(
        tmp_path / "ours", model.state_dict().items(), tmp_path / "theirs", max_shard_bytes
    )
    read = LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(read.state_dict()[k], v) for k, v in model.state_dict().items())


def test_one_shard_is_in_memory_at_a_time(folder, tmp_path):
    stream = Stream(12)
    write_checkpoint(tmp_path / "out", stream, folder, max_shard_bytes=3 * 40)
    assert stream.most <= 4  # a shard of three, and the one that begins the next


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
