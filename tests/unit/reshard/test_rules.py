"""A rule says what every shard holds; together the shards hold each element exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.reshard.rules import (
    Box,
    GateUp,
    InterleavedQKV,
    LogicalTensor,
    Replicated,
    Rule,
    Section,
    Shard,
    Split,
    StackedSections,
    Weight,
    check_cover,
    list_logical_tensors,
)


def full(tensor: LogicalTensor, start: int) -> np.ndarray:
    return np.arange(start, start + int(np.prod(tensor.shape))).reshape(tensor.shape)


def local_tensors(rule: Rule, count: int) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Logical tensors of distinct numbers, and what the rule puts into each shard (-1: padding)."""
    tensors = {t.name: full(t, 10_000 * i) for i, t in enumerate(rule.tensors)}
    shards = []
    for index in range(count):
        shard = Shard(index, count)
        local = np.full(rule.get_local_shape(shard), -1)
        for block in rule.get_blocks(shard):
            assert (local[block.local_slices] == -1).all(), "written twice"
            local[block.local_slices] = tensors[block.tensor.name][block.box.slices]
        shards.append(local)
    return tensors, shards


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 1), st.integers(1, 3))
def test_split_shards_are_the_chunks_of_the_padded_tensor(count, part, dim, other):
    size = count * part
    shape = (size, other) if dim == 0 else (other, size)
    tensors, shards = local_tensors(Split(LogicalTensor("w", shape), dim), count)
    np.testing.assert_array_equal(np.concatenate(shards, axis=dim), tensors["w"])


def test_split_with_padding_leaves_the_tail_of_the_last_shards_empty():
    tensors, shards = local_tensors(Split(LogicalTensor("w", (5, 2)), 0, padded=12), 4)
    joined = np.concatenate(shards)
    np.testing.assert_array_equal(joined[:5], tensors["w"])
    assert (joined[5:] == -1).all()
    assert (shards[3] == -1).all()


def test_interleaved_qkv_is_megatrons_order_of_query_groups():
    q, k, v = (LogicalTensor(n, (rows, 3)) for n, rows in (("q", 8), ("k", 4), ("v", 4)))
    tensors, shards = local_tensors(InterleavedQKV(q, k, v, num_groups=2), 2)
    for group, local in enumerate(shards):
        parts = [
            tensors["q"][4 * group :][:4],
            tensors["k"][2 * group :][:2],
            tensors["v"][2 * group :][:2],
        ]
        np.testing.assert_array_equal(local, np.concatenate(parts))


def test_interleaved_biases_follow_their_weights():
    q, k, v = (LogicalTensor(n, (rows,)) for n, rows in (("q", 8), ("k", 4), ("v", 4)))
    tensors, shards = local_tensors(InterleavedQKV(q, k, v, num_groups=2), 2)
    parts = [tensors["q"][4:], tensors["k"][2:], tensors["v"][2:]]
    np.testing.assert_array_equal(shards[1], np.concatenate(parts))


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_gated_qkv_has_the_gates_of_a_group_after_its_queries(count, part, heads, dim):
    groups = count * part
    q = LogicalTensor("q", (groups * heads * 2 * dim, 3))
    k, v = (LogicalTensor(name, (groups * dim, 3)) for name in "kv")
    tensors, shards = local_tensors(InterleavedQKV(q, k, v, groups, gated=True), count)
    by_head = tensors["q"].reshape(groups, heads, 2, dim, 3)
    parts = [by_head[:, :, 0].reshape(groups, -1, 3), by_head[:, :, 1].reshape(groups, -1, 3)]
    parts += [tensors[name].reshape(groups, dim, 3) for name in "kv"]
    np.testing.assert_array_equal(
        np.concatenate(shards), np.concatenate(parts, axis=1).reshape(-1, 3)
    )


@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_interleaved_sections_are_stacked_and_each_split_by_its_heads(count, part, sizes):
    heads, stride = count * part, sum(sizes)
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    sections = tuple(Section(0, a, n, stride) for a, n in zip(starts, sizes, strict=True))
    tensor = LogicalTensor("w", (heads * stride, 2))
    rule = StackedSections((tensor,), sections, heads)
    tensors, shards = local_tensors(rule, count)
    by_head = tensors["w"].reshape(count, part, stride, 2)
    for index, local in enumerate(shards):
        parts = np.split(by_head[index], starts[1:], axis=1)
        np.testing.assert_array_equal(local, np.concatenate([p.reshape(-1, 2) for p in parts]))
    check_cover([Weight("a", rule, axis="tp")], count)


@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_dense_sections_are_one_block_a_shard_each(count, part, sizes):
    heads = count * part
    starts = np.cumsum([0, *(heads * size for size in sizes[:-1])]).tolist()
    sections = tuple(Section(0, a, n, n) for a, n in zip(starts, sizes, strict=True))
    rule = StackedSections((LogicalTensor("w", (heads * sum(sizes), 1, 4)),), sections, heads)
    tensors, shards = local_tensors(rule, count)
    parts = np.split(tensors["w"], starts[1:])
    for index, local in enumerate(shards):
        expected = [np.split(section, count)[index] for section in parts]
        np.testing.assert_array_equal(local, np.concatenate(expected))
        assert len(rule.get_blocks(Shard(index, count))) == len(sizes)


def test_sections_that_do_not_divide_are_refused_by_name():
    rule = StackedSections((LogicalTensor("w", (6, 2)),), (Section(0, 0, 2, 2),), 3)
    with pytest.raises(ValueError, match="heads of w of size 3 does not divide into 2 shards"):
        rule.get_blocks(Shard(0, 2))


def test_gate_up_keeps_the_gate_before_the_up_projection_in_each_shard():
    gate, up = LogicalTensor("g", (4, 2)), LogicalTensor("u", (4, 2))
    tensors, shards = local_tensors(GateUp(gate, up), 2)
    np.testing.assert_array_equal(shards[1], np.concatenate([tensors["g"][2:], tensors["u"][2:]]))


def test_whole_is_the_same_on_every_shard():
    tensors, shards = local_tensors(Replicated(LogicalTensor("n", (7,))), 3)
    for local in shards:
        np.testing.assert_array_equal(local, tensors["n"])


def test_a_size_that_does_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match=r"w of size 6 does not divide into 4 shards"):
        Split(LogicalTensor("w", (6,)), 0).get_local_shape(Shard(0, 4))


def test_cover_check_names_a_tensor_that_two_parameters_claim():
    tensor = LogicalTensor("w", (4,))
    weights = [
        Weight("a", Replicated(tensor), stage="first"),
        Weight("b", Replicated(tensor), stage="last"),
    ]
    with pytest.raises(ValueError, match="w is named by two parameters, b the second"):
        check_cover(weights, 1)


def test_a_copy_is_a_tensor_of_the_checkpoint_that_no_rule_may_name_again():
    tensor = LogicalTensor("w", (4, 2), aliases=("again", "and again"))
    weights = [Weight("a", Replicated(tensor), stage="embedding")]
    names = [t.name for t in list_logical_tensors(weights)]
    assert names == ["w", "again", "and again"]
    assert {t.shape for t in list_logical_tensors(weights)} == {(4, 2)}
    check_cover(weights, 1)
    second = Weight("b", Replicated(LogicalTensor("again", (4, 2))), stage="head")
    with pytest.raises(ValueError, match="again is named by two parameters, b the second"):
        check_cover([*weights, second], 1)


def test_cover_check_counts_elements():
    class Half(Split):
        def get_blocks(self, shard):
            return super().get_blocks(shard)[: 1 - shard.index]

    rule = Half(LogicalTensor("w", (4,)), 0)
    with pytest.raises(ValueError, match="2 of 4 elements of w"):
        check_cover([Weight("a", rule, axis="tp", stage="first")], 2)


def test_an_empty_box_is_refused():
    with pytest.raises(ValueError, match="empty"):
        Box((0,), (0,))
