"""Locations of a model's parameters in a distributed checkpoint. Plain data: no torch.

A checkpoint stores every parameter as that of a single rank, cut into chunks, for any layout of the
ranks that wrote it. Layers and experts may be stacked into one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from mcore_rl.reshard.rules import (
    Box,
    GateUp,
    InterleavedGateUp,
    Shard,
    Split,
    StackedSections,
    Weight,
)

# Naming of tensors in the checkpoints. Megatron's loaders pass it to the model's sharded_state_dict
# (`content_metadata`, dist_checkpointing/serialization.py).
CONTENT_METADATA: dict[str, bool | str] = {
    # Layers have separate tensors, also if they are homogeneous.
    "non_homogeneous_layers": True,
    # The experts of a layer are one tensor.
    "singleton_local_shards": False,
    # Optimizer state has the same name in each of the chained optimizers.
    "chained_optim_avoid_prefix": True,
    # The sharded optimizer writes unsharded tensors, which any layout can read.
    "distrib_optim_sharding_type": "fully_reshardable",
}


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Location of a parameter: in the tensor `key`, at `index` of its leading dims.

    With `sections` (name, rows) its rows are in a tensor for each of them, `key.name`, one after
    the other: the projection of a gated delta net (ssm/utils.py, _split_tensor_factory).
    """

    key: str
    shape: tuple[int, ...]  # of the tensor, or of all sections together
    index: tuple[int, ...]  # along the leading dims, which stack layers or experts
    sections: tuple[tuple[str, int], ...] = ()

    def list_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors by key."""
        if not self.sections:
            return {self.key: self.shape}
        stacked = len(self.index)
        before, rest = self.shape[:stacked], self.shape[stacked + 1 :]
        return {f"{self.key}.{name}": (*before, rows, *rest) for name, rows in self.sections}

    def locate(self, part: Box) -> Iterator[StoredBox]:
        """Yield the pieces of a box of the parameter, in their order in it."""
        first, end = 0, part.offsets[0] + part.sizes[0]
        for key, shape in self.list_tensors().items():
            rows = shape[len(self.index)]
            start, stop = max(part.offsets[0], first), min(end, first + rows)
            if start < stop:
                offsets = (*self.index, start - first, *part.offsets[1:])
                sizes = (*(1,) * len(self.index), stop - start, *part.sizes[1:])
                yield StoredBox(key, shape, Box(offsets, sizes), start - part.offsets[0])
            first += rows


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor of a checkpoint, and its first row in the box of the parameter."""

    key: str
    shape: tuple[int, ...]  # of the tensor
    box: Box
    row: int


def compute_chunks(weight: Weight, count: int) -> tuple[Box, ...]:
    """Return the boxes of a parameter that ranks with `count` shards save, in the order of shards.

    Gate and up are separate chunks, as Megatron saves them (transformer/mlp.py,
    apply_swiglu_sharded_factory), which cuts them in halves where their rows are in turns, too; so
    are the sections of a gated delta net.

    >>> from mcore_rl.reshard.rules import LogicalTensor
    >>> rule = GateUp(LogicalTensor("g", (4, 3)), LogicalTensor("u", (4, 3)))
    >>> [box.offsets[0] for box in compute_chunks(Weight("w", rule, axis="tp"), 2)]
    [0, 4, 2, 6]
    """
    rule = weight.rule
    shards = range(count) if weight.axis else range(1)
    local = rule.get_local_shape(Shard(0, len(shards)))
    rest = (0,) * (len(local) - 1)
    if isinstance(rule, GateUp | InterleavedGateUp | StackedSections):
        sections = (
            rule.get_section_rows(Shard(0, len(shards)))
            if isinstance(rule, StackedSections)
            else (local[0] // 2,) * 2
        )
        starts = [start * len(shards) for start in accumulate(sections, initial=0)]
        return tuple(
            Box((start + index * rows, *rest), (rows, *local[1:]))
            for index in shards
            for start, rows in zip(starts, sections, strict=False)
        )
    dim = rule.dim if isinstance(rule, Split) else 0
    return tuple(
        Box(tuple(index * size if d == dim else 0 for d, size in enumerate(local)), local)
        for index in shards
    )
