"""Where the parameters of a model are in a distributed checkpoint. Pure: no torch.

A checkpoint stores every parameter unsharded, whatever the layout of the ranks that wrote it: as
the parameter of a single rank, cut into chunks. Layers and experts may be stacked into one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.reshard.boxes import Box
from mcore_rl.reshard.rules import GateUp, Shard, Split, Weight

# How our checkpoints name their tensors, as Megatron's own loaders are told of it: they ask the
# model for its shards with this (`content_metadata`, dist_checkpointing/serialization.py).
CONTENT_METADATA: dict[str, bool | str] = {
    # A name for each layer, also if all layers are homogeneous.
    "non_homogeneous_layers": True,
    # Experts of a layer are one tensor.
    "singleton_local_shards": False,
    # One name for a parameter's state, whichever of the chained optimizers has it.
    "chained_optim_avoid_prefix": True,
    # Of the sharded optimizer: whole tensors on disk, so that any layout can read them.
    "distrib_optim_sharding_type": "fully_reshardable",
}


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Where one parameter is stored: in the tensor `key`, at `index` of the dims that stack it."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    index: tuple[int, ...]  # of this parameter along the first dims, which count layers or experts

    def box(self, part: Box) -> Box:
        """A box of the parameter as a box of the tensor."""
        return Box((*self.index, *part.offsets), ((1,) * len(self.index) + part.sizes))


def chunks(weight: Weight, count: int) -> tuple[Box, ...]:
    """The boxes of a whole parameter that ranks in `count` shards save, in the order of the shards.

    Gate and up halves are chunks of their own, as Megatron saves them (transformer/mlp.py,
    apply_swiglu_sharded_factory).

    >>> from mcore_rl.reshard.boxes import LogicalTensor
    >>> rule = GateUp(LogicalTensor("g", (4, 3)), LogicalTensor("u", (4, 3)))
    >>> [box.offsets[0] for box in chunks(Weight("w", rule, axis="tp"), 2)]
    [0, 4, 2, 6]
    """
    rule = weight.rule
    shards = range(count) if weight.axis else range(1)
    local = rule.local_shape(Shard(0, len(shards)))
    rest = (0,) * (len(local) - 1)
    if isinstance(rule, GateUp):
        part, half = (local[0] // 2, *local[1:]), rule.gate.shape[0]
        return tuple(
            Box((start + index * part[0], *rest), part) for index in shards for start in (0, half)
        )
    dim = rule.dim if isinstance(rule, Split) else 0
    return tuple(
        Box(tuple(index * size if d == dim else 0 for d, size in enumerate(local)), local)
        for index in shards
    )
