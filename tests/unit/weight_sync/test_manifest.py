"""A set of weights passes only if it is exactly the checkpoint's."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.config.errors import ConfigError
from mcore_rl.weight_sync.manifest import checkpoint_shapes, verified

_EXPECTED = {"a": (2, 3), "b": (4,)}
_A, _B = ("a", torch.zeros(2, 3)), ("b", torch.zeros(4))


def test_a_complete_set_passes_unchanged_in_any_order():
    assert [name for name, _ in verified([_B, _A], _EXPECTED)] == ["b", "a"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([_A], "1 tensors did not come: b"),
        ([_A, _B, ("c", torch.zeros(1))], "c: the checkpoint has no such tensor"),
        ([_A, _A, _B], "a: came twice"),
        ([_A, ("b", torch.zeros(5))], r"b: shape \[5\], the checkpoint has \[4\]"),
    ],
    ids=["missing", "extra", "twice", "shape"],
)
def test_anything_else_is_refused_by_name(tensors, message):
    with pytest.raises(ValueError, match=message):
        list(verified(tensors, _EXPECTED))


def test_shapes_come_from_one_file_or_from_an_index(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    assert checkpoint_shapes(str(tmp_path)) == {"a": (2, 3)}
    save_file({"b": torch.zeros(4)}, tmp_path / "part2.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "part2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_shapes(str(tmp_path)) == _EXPECTED


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        checkpoint_shapes(str(tmp_path))
