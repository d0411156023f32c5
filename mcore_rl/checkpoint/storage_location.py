"""Locations of a model's parameters in a distributed checkpoint. Plain data: no torch.

A checkpoint stores every parameter as that of a single rank, cut into chunks, for any layout of the
ranks that wrote it. Layers and experts may be stacked into one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.reshard.rules import Box, GateUp, InterleavedGateUp, Shard, Split, Weight

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
    """Location of a parameter: in the tensor `key`, at `index` of its leading dims."""

    key: str
    shape: tuple[int, ...]  # of the tensor
    index: tuple[int, ...]  # along the leading dims, which stack layers or experts

    def to_tensor_box(self, part: Box) -> Box:
        """Convert a box of the parameter to a box of the tensor."""
        return Box((*self.index, *part.offsets), ((1,) * len(self.index) + part.sizes))


def compute_chunks(weight: Weight, count: int) -> tuple[Box, ...]:
    """Return the boxes of a parameter that ranks with `count` shards save, in the order of shards.

    Gate and up are separate chunks, as Megatron saves them (transformer/mlp.py,
    apply_swiglu_sharded_factory), which cuts them in halves where their rows are in turns, too.

    >>> from mcore_rl.reshard.rules import LogicalTensor
    >>> rule = GateUp(LogicalTensor("g", (4, 3)), LogicalTensor("u", (4, 3)))
    >>> [box.offsets[0] for box in compute_chunks(Weight("w", rule, axis="tp"), 2)]
    [0, 4, 2, 6]
    """
    rule = weight.rule
    shards = range(count) if weight.axis else range(1)
    local = rule.get_local_shape(Shard(0, len(shards)))
    rest = (0,) * (len(local) - 1)
    if isinstance(rule, GateUp | InterleavedGateUp):
        part = (local[0] // 2, *local[1:])
        half = sum(tensor.shape[0] for tensor in rule.tensors) // 2
        return tuple(
            Box((start + index * part[0], *rest), part) for index in shards for start in (0, half)
        )
    dim = rule.dim if isinstance(rule, Split) else 0
    return tuple(
        Box(tuple(index * size if d == dim else 0 for d, size in enumerate(local)), local)
        for index in shards
    )
