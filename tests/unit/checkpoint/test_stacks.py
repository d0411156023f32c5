"""Experts of Qwen3.5, stacked in the files or apart: the same tensors, exported as they came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.hf_writer import write_checkpoint
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import LogicalTensor, slice_rows

EXPERTS = "model.layers.0.mlp.experts"
NUM_EXPERTS, FFN, HIDDEN = 3, 5, 4
GATE_UP, DOWN = torch.randn(NUM_EXPERTS, 2 * FFN, HIDDEN), torch.randn(NUM_EXPERTS, HIDDEN, FFN)
APART = {
    f"{EXPERTS}.{expert}.{name}_proj.weight": tensor.contiguous()
    for expert in range(NUM_EXPERTS)
    for name, tensor in (
        ("gate", GATE_UP[expert, :FFN]),
        ("up", GATE_UP[expert, FFN:]),
        ("down", DOWN[expert]),
    )
}
STACKED = {f"{EXPERTS}.gate_up_proj": GATE_UP, f"{EXPERTS}.down_proj": DOWN}
OTHER = {"model.norm.weight": torch.randn(HIDDEN)}


def save(folder: Path, experts: dict[str, torch.Tensor], kind: str = "qwen3_5_moe_text") -> Path:
    folder.mkdir()
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": kind, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(experts | OTHER, folder / "model.safetensors")
    return folder


@pytest.fixture(params=["stacked", "apart"])
def experts(request):
    return {"stacked": STACKED, "apart": APART}[request.param]


def test_experts_are_read_one_by_one(tmp_path, experts):
    reader = CheckpointReader(save(tmp_path / "model", experts))
    assert reader.get_shapes() == {name: tuple(t.shape) for name, t in (APART | OTHER).items()}
    reader.check([LogicalTensor(name, tuple(t.shape)) for name, t in (APART | OTHER).items()])
    for name, tensor in APART.items():
        assert torch.equal(reader.read_tensor(name), tensor), name
        rows = slice_rows(LogicalTensor(name, tuple(tensor.shape)), 1, 2, 0)
        assert torch.equal(reader.read(rows), tensor[1:3]), name
        assert torch.equal(reader.read(rows, torch.bfloat16), tensor[1:3].bfloat16()), name


def test_an_export_stacks_the_experts_that_the_first_checkpoint_stacks(tmp_path, experts):
    reference = save(tmp_path / "model", experts)
    tensors = sorted((APART | OTHER).items(), reverse=True)
    write_checkpoint(tmp_path / "export", tensors, reference)
    exported, expected = load_file(tmp_path / "export/model.safetensors"), experts | OTHER
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


def test_a_missing_slice_and_a_stack_of_another_model_are_refused(tmp_path):
    expected = [LogicalTensor(name, tuple(t.shape)) for name, t in (APART | OTHER).items()]
    fewer = {name: tensor[:2] for name, tensor in STACKED.items()}
    with pytest.raises(ConfigError, match=r"lacks tensor .*experts\.2\.down_proj\.weight"):
        CheckpointReader(save(tmp_path / "fewer", fewer)).check(expected)
    with pytest.raises(ConfigError, match=r"has shape \(12, 5\); allowed: \[experts, 2 \* "):
        CheckpointReader(save(tmp_path / "flat", {f"{EXPERTS}.down_proj": DOWN.view(12, 5)}))
    other = CheckpointReader(save(tmp_path / "other", STACKED, "qwen3_next"))
    assert other.get_shapes().keys() == (STACKED | OTHER).keys()
