"""Weights between Hugging Face checkpoints and the ranks, both ways by the same rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.engine.megatron import versions
from mcore_rl.parallel.mesh import Coordinate, Mesh
from mcore_rl.parallel.stages import Chunk
from mcore_rl.reshard.boxes import LogicalTensor
from mcore_rl.reshard.rules import Shard, Weight


class WeightPlacement:
    """Which rank holds which shard of which parameter, and in which chunk."""

    def __init__(self, mesh: Mesh, stages: Sequence[Chunk], num_experts: int) -> None:
        self.mesh = mesh
        self.stages = stages
        self.experts_per_rank = max(1, num_experts // mesh.sizes["ep"])
        self._chunk_of_layer = {n: chunk for chunk in stages for n in chunk.layers}
        self._owners = cache(self._find_owners)

    def chunk(self, weight: Weight) -> Chunk | None:
        """The chunk that has the parameter; None for a replica that this layout does not need."""
        if weight.layer is not None:
            return self._chunk_of_layer[weight.layer]
        has = {
            "embedding": lambda chunk: chunk.has_embedding,
            "final_norm": lambda chunk: chunk.has_final_norm,
            "head": lambda chunk: chunk.has_head,
            "mtp": lambda chunk: chunk.num_mtp_layers > 0,
        }[weight.stage or "embedding"]
        found = next((chunk for chunk in self.stages if has(chunk)), None)
        if found is not None and weight.replica and found.has_embedding:
            return None
        return found

    def shard(self, weight: Weight, at: Coordinate) -> Shard:
        if weight.axis is None:
            return Shard(0, 1)
        return Shard(getattr(at, f"{weight.axis}_rank"), self.mesh.sizes[weight.axis])

    def holds(self, weight: Weight, at: Coordinate) -> bool:
        chunk = self.chunk(weight)
        if chunk is None or chunk.pp_rank != at.pp_rank:
            return False
        return weight.expert is None or weight.expert // self.experts_per_rank == at.ep_rank

    def local_name(self, weight: Weight) -> str:
        """The parameter's name inside its chunk."""
        first_expert = (weight.expert or 0) // self.experts_per_rank * self.experts_per_rank
        chunk = self.chunk(weight)
        first_layer = chunk.layers.start if chunk is not None else 0
        name = weight.local_name(first_layer=first_layer, first_expert=first_expert)
        return versions.parameter_name(name)

    def owners(self, weight: Weight) -> list[tuple[int, Shard]]:
        """For each shard, the lowest world rank that holds it; in shard order."""
        chunk = self.chunk(weight)
        if chunk is None:
            return []
        ep_rank = None if weight.expert is None else weight.expert // self.experts_per_rank
        return self._owners(weight.axis, chunk.pp_rank, ep_rank)

    def _find_owners(
        self, axis: str | None, pp_rank: int, ep_rank: int | None
    ) -> list[tuple[int, Shard]]:
        coordinates = {"pp_rank": pp_rank}
        if ep_rank is not None:
            coordinates["ep_rank"] = ep_rank
        if axis is None:
            return [(self.mesh.ranks(**coordinates)[0], Shard(0, 1))]
        size = self.mesh.sizes[axis]
        return [
            (self.mesh.ranks(**coordinates, **{f"{axis}_rank": index})[0], Shard(index, size))
            for index in range(size)
        ]


def local_tensors(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What rules speak of: parameters, and the selection bias of routers, which is a buffer.

    Adapters are left out: see computed.
    """
    tensors: dict[str, torch.Tensor] = {
        n: p for n, p in chunk.named_parameters() if not n.startswith("lora.")
    }
    tensors |= {n: b for n, b in chunk.named_buffers() if n.endswith("router.expert_bias")}
    return tensors


@torch.no_grad()
def computed(chunk: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A local tensor as the model computes with it: with the adapter that lora.py gave it."""
    adapters: Any = getattr(chunk, "lora", None)
    adapter = None if adapters is None else adapters.of(name)
    return tensor.data if adapter is None else adapter(tensor)


@torch.no_grad()
def load_weights(
    chunks: Sequence[torch.nn.Module],
    weights: Sequence[Weight],
    placement: WeightPlacement,
    at: Coordinate,
    reader: CheckpointReader,
    zeros: Collection[str] = (),
) -> None:
    """Fill this rank's parameters, reading only its own slices. Vocabulary padding becomes zero.

    `zeros` are tensors that the checkpoint does not have and that begin at zero.

    Raises:
        RuntimeError: a parameter has no rule, or a rule no parameter (a bug in a family).
    """
    unfilled = [local_tensors(chunk) for chunk in chunks]
    for weight in weights:
        if not placement.holds(weight, at):
            continue
        chunk = placement.chunk(weight)
        assert chunk is not None
        name, shard = placement.local_name(weight), placement.shard(weight, at)
        tensor = unfilled[chunk.vpp_rank].pop(name, None)
        if tensor is None or tuple(tensor.shape) != weight.rule.local_shape(shard):
            found = None if tensor is None else tuple(tensor.shape)
            wanted = weight.rule.local_shape(shard)
            raise RuntimeError(f"{name}: the model has shape {found}, its rule says {wanted}")
        tensor.zero_()
        for block in weight.rule.blocks(shard):
            if block.tensor.name not in zeros:
                tensor[block.local_slices].copy_(reader.read(block))
    if names := sorted(name for tensors in unfilled for name in tensors):
        raise RuntimeError(f"no rule names {', '.join(names[:3])}; {len(names)} parameters in all")


@torch.no_grad()
def export_weights(
    chunks: Sequence[torch.nn.Module],
    weights: Sequence[Weight],
    placement: WeightPlacement,
    world_rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream whole Hugging Face tensors (on the CPU) out of world rank 0, in rule order.

    Each shard travels once, from the lowest rank that holds it. Other ranks yield nothing but must
    exhaust the iterator. In memory at once: the logical tensors of one parameter.
    """
    tensors = [local_tensors(chunk) for chunk in chunks]
    like = next(iter(tensors[0].values()))
    for weight in weights:
        chunk = placement.chunk(weight)
        if weight.replica or chunk is None:
            continue
        dtype = torch.float32 if weight.float32 else like.dtype
        whole: dict[str, torch.Tensor] = {}
        for owner, shard in placement.owners(weight):
            if world_rank == owner:
                name = placement.local_name(weight)
                local = computed(chunks[chunk.vpp_rank], name, tensors[chunk.vpp_rank][name])
                if owner != 0:
                    dist.send(local.contiguous(), dst=0)
            if world_rank != 0:
                continue
            if owner != 0:
                shape = weight.rule.local_shape(shard)
                local = torch.empty(shape, dtype=dtype, device=like.device)
                dist.recv(local, src=owner)
            for block in weight.rule.blocks(shard):
                target = _whole(whole, block.tensor, local.dtype)
                target[block.box.slices].copy_(local[block.local_slices])
        for tensor in weight.rule.tensors:
            if tensor.name in whole:
                yield tensor.name, whole[tensor.name]
                # Tensors that share memory cannot be written to one file.
                yield from ((name, whole[tensor.name].clone()) for name in tensor.also)


def _whole(
    tensors: dict[str, torch.Tensor], tensor: LogicalTensor, dtype: torch.dtype
) -> torch.Tensor:
    if tensor.name not in tensors:
        tensors[tensor.name] = torch.empty(tensor.shape, dtype=dtype)
    return tensors[tensor.name]
