"""Weights between Hugging Face checkpoints and the ranks, both ways by the same rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.parallel.mesh import Coordinate, Mesh
from mcore_rl.reshard.boxes import LogicalTensor
from mcore_rl.reshard.rules import Shard, Weight


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """Which rank holds which shard of which parameter."""

    mesh: Mesh
    num_layers: int
    num_experts: int

    def shard(self, weight: Weight, at: Coordinate) -> Shard:
        if weight.axis is None:
            return Shard(0, 1)
        return Shard(getattr(at, f"{weight.axis}_rank"), self.mesh.sizes[weight.axis])

    @property
    def layers_per_stage(self) -> int:
        return self.num_layers // self.mesh.sizes["pp"]

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.mesh.sizes["ep"]

    def holds(self, weight: Weight, at: Coordinate) -> bool:
        if weight.expert is not None and weight.expert // self.experts_per_rank != at.ep_rank:
            return False
        if weight.layer is not None:
            return weight.layer // self.layers_per_stage == at.pp_rank
        return at.pp_rank == (0 if weight.stage == "first" else self.mesh.sizes["pp"] - 1)

    def local_name(self, weight: Weight, at: Coordinate) -> str:
        return weight.local_name(
            first_layer=at.pp_rank * self.layers_per_stage,
            first_expert=at.ep_rank * self.experts_per_rank,
        )

    def owners(self, weight: Weight) -> list[tuple[int, Shard]]:
        """For each shard, the lowest world rank that holds it; in shard order."""
        found: dict[int, tuple[int, Shard]] = {}
        for rank in range(self.mesh.world_size):
            at = self.mesh.coordinate(rank)
            if self.holds(weight, at):
                shard = self.shard(weight, at)
                found.setdefault(shard.index, (rank, shard))
        return [found[index] for index in sorted(found)]


@torch.no_grad()
def load_weights(
    model: torch.nn.Module,
    weights: Sequence[Weight],
    placement: WeightPlacement,
    at: Coordinate,
    reader: CheckpointReader,
) -> None:
    """Fill this rank's parameters, reading only its own slices. Vocabulary padding becomes zero.

    Raises:
        RuntimeError: a parameter has no rule, or a rule no parameter (a bug in a family).
    """
    parameters = dict(model.named_parameters())
    filled = set()
    for weight in weights:
        if not placement.holds(weight, at):
            continue
        name, shard = placement.local_name(weight, at), placement.shard(weight, at)
        parameter = parameters.get(name)
        if parameter is None or tuple(parameter.shape) != weight.rule.local_shape(shard):
            found = None if parameter is None else tuple(parameter.shape)
            wanted = weight.rule.local_shape(shard)
            raise RuntimeError(f"{name}: the model has shape {found}, its rule says {wanted}")
        parameter.zero_()
        for block in weight.rule.blocks(shard):
            parameter[block.local_slices].copy_(reader.read(block))
        filled.add(name)
    if unfilled := sorted(set(parameters) - filled):
        raise RuntimeError(
            f"no rule names {', '.join(unfilled[:3])}; {len(unfilled)} parameters in all"
        )


@torch.no_grad()
def export_weights(
    model: torch.nn.Module, weights: Sequence[Weight], placement: WeightPlacement, world_rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream whole Hugging Face tensors (on the CPU) out of world rank 0, in rule order.

    Each shard travels once, from the lowest rank that holds it. Other ranks yield nothing but must
    exhaust the iterator. In memory at once: the logical tensors of one parameter.
    """
    parameters = dict(model.named_parameters())
    at = placement.mesh.coordinate(world_rank)
    for weight in weights:
        whole: dict[str, torch.Tensor] = {}
        for owner, shard in placement.owners(weight):
            if world_rank == owner:
                local = parameters[placement.local_name(weight, at)].data
                if owner != 0:
                    dist.send(local.contiguous(), dst=0)
            if world_rank != 0:
                continue
            if owner != 0:
                like = next(iter(parameters.values()))
                local = torch.empty(
                    weight.rule.local_shape(shard), dtype=like.dtype, device=like.device
                )
                dist.recv(local, src=owner)
            for block in weight.rule.blocks(shard):
                target = _whole(whole, block.tensor, local.dtype)
                target[block.box.slices].copy_(local[block.local_slices])
        yield from whole.items()


def _whole(
    tensors: dict[str, torch.Tensor], tensor: LogicalTensor, dtype: torch.dtype
) -> torch.Tensor:
    if tensor.name not in tensors:
        tensors[tensor.name] = torch.empty(tensor.shape, dtype=dtype)
    return tensors[tensor.name]
