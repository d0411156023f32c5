"""A set of weights passes only if it is exactly the checkpoint's."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.weight_sync.manifest import verified

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
