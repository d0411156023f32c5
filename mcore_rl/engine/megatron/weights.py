"""Weights between Hugging Face checkpoints and the ranks, both ways by the same rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.parallel.mesh import Chunk, Coordinate, Mesh
from mcore_rl.reshard.layout import TrainingRanks
from mcore_rl.reshard.rules import LogicalTensor, Shard, Weight, slice_rows

EXPORT_BUCKET_BYTES = 128 << 20  # of parameters that are sent together


class WeightPlacement:
    """Which rank holds which shard of which parameter, and in which chunk: for a rank's own use.

    TrainingRanks, which plans are made from, with names as the installed Megatron has them.
    """

    def __init__(self, mesh: Mesh, stages: Sequence[Chunk], num_experts: int) -> None:
        self.mesh = mesh
        self.ranks = TrainingRanks(mesh, stages, num_experts)

    def chunk(self, weight: Weight) -> Chunk | None:
        """The chunk that has the parameter; None for a replica that this layout does not need."""
        return self.ranks.find_chunk(weight)

    def shard(self, weight: Weight, at: Coordinate) -> Shard:
        if weight.axis is None:
            return Shard(0, 1)
        return Shard(getattr(at, f"{weight.axis}_rank"), self.mesh.sizes[weight.axis])

    def holds(self, weight: Weight, at: Coordinate) -> bool:
        chunk = self.chunk(weight)
        if chunk is None or chunk.pp_rank != at.pp_rank:
            return False
        return weight.expert is None or weight.expert // self.ranks.experts_per_rank == at.ep_rank

    def get_local_name(self, weight: Weight) -> str:
        """The parameter's name inside its chunk."""
        return parameter_of(self.ranks.get_local_name(weight))[1]

    def owners(self, weight: Weight) -> list[tuple[int, Shard]]:
        """For each shard, the lowest world rank that has it; in shard order."""
        holders = self.ranks.get_holders(weight)
        return [(ranks[0], Shard(index, len(holders))) for index, ranks in enumerate(holders)]


def parameter_of(name: str) -> tuple[int, str]:
    """The chunk and the name inside it, from one that a plan uses ("chunk:name")."""
    chunk, _, inner = name.partition(":")
    return int(chunk), inner


def local_tensors(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What rules speak of: parameters, and the selection bias of routers, which is a buffer.

    Adapters are left out: see computed.
    """
    tensors: dict[str, torch.Tensor] = {
        n: p for n, p in chunk.named_parameters() if not n.startswith("lora.")
    }
    tensors |= {n: b for n, b in chunk.named_buffers() if n.endswith("router.expert_bias")}
    return tensors


def adapter_of(chunk: torch.nn.Module, name: str) -> Any:
    """The adapter that lora.py gave a parameter of a chunk, or None."""
    adapters: Any = getattr(chunk, "lora", None)
    return None if adapters is None else adapters.of(name)


@torch.no_grad()
def computed(chunk: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A local tensor as the model computes with it: with its adapter, if it has one."""
    adapter = adapter_of(chunk, name)
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
        name, shard = placement.get_local_name(weight), placement.shard(weight, at)
        tensor = unfilled[chunk.vpp_rank].pop(name, None)
        if tensor is None or tuple(tensor.shape) != weight.rule.get_local_shape(shard):
            found = None if tensor is None else tuple(tensor.shape)
            wanted = weight.rule.get_local_shape(shard)
            raise RuntimeError(f"{name}: the model has shape {found}, its rule says {wanted}")
        tensor.zero_()
        for block in weight.rule.get_blocks(shard):
            if block.tensor.name not in zeros:
                tensor[block.local_slices].copy_(reader.read(block))
    if names := sorted(name for tensors in unfilled for name in tensors):
        raise RuntimeError(f"no rule names {', '.join(names[:3])}; {len(names)} parameters in all")


@torch.no_grad()
def untouched_weights(
    weights: Sequence[Weight], placement: WeightPlacement, reader: CheckpointReader
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the checkpoint that no chunk has: prediction layers that are not trained."""
    unheld = [w for w in weights if not w.replica and placement.chunk(w) is None]
    for tensor in (tensor for weight in unheld for tensor in weight.rule.tensors):
        yield tensor.name, reader.read(slice_rows(tensor, 0, tensor.shape[0], 0))


def export_weights(
    chunks: Sequence[torch.nn.Module],
    weights: Sequence[Weight],
    placement: WeightPlacement,
    world_rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream whole Hugging Face tensors (on the CPU) out of world rank 0, in rule order.

    Each shard is sent once, from the lowest rank that has it. Ranks send their shards of a bucket
    of parameters as one message, all at the same time. Other ranks than 0 yield nothing but must
    exhaust the iterator. In memory at a time: the tensors of a bucket, or of one parameter.
    """
    tensors = [local_tensors(chunk) for chunk in chunks]
    like = next(iter(tensors[0].values()))
    if like.device.type == "cuda":  # NCCL makes the group's communicator when all ranks take part
        dist.all_reduce(torch.zeros(1, device=like.device))

    def local(weight: Weight) -> torch.Tensor:
        chunk = placement.chunk(weight)
        assert chunk is not None
        name = placement.get_local_name(weight)
        return computed(chunks[chunk.vpp_rank], name, tensors[chunk.vpp_rank][name])

    for bucket in export_buckets(weights, placement, like.dtype):
        own = [shard for shard in bucket if shard.owner == world_rank]
        if world_rank != 0:
            _send([local(shard.weight) for shard in own], like.device)
            continue
        received = _receive(bucket, like.device)
        for weight, shards in groupby(bucket, key=attrgetter("weight")):
            whole: dict[str, torch.Tensor] = {}
            for shard in shards:
                data = received[shard] if shard.owner else local(weight)
                for block in weight.rule.get_blocks(shard.shard):
                    target = _whole(whole, block.tensor, data.dtype)
                    target[block.box.slices].copy_(data[block.local_slices])
            for tensor in weight.rule.tensors:
                if tensor.name in whole:
                    yield tensor.name, whole[tensor.name]
                    # Tensors that share memory cannot be written to one file.
                    yield from ((name, whole[tensor.name].clone()) for name in tensor.aliases)


@dataclass(frozen=True, eq=False, slots=True)
class _ExportShard:
    """A shard of a parameter, and the rank that sends it."""

    weight: Weight
    owner: int
    shard: Shard
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def export_buckets(
    weights: Sequence[Weight], placement: WeightPlacement, dtype: torch.dtype
) -> Iterator[list[_ExportShard]]:
    """All shards that are exported, in rule order: equal on all ranks, whole parameters each."""
    bucket: list[_ExportShard] = []
    num_bytes = 0
    for weight in weights:
        if weight.replica or placement.chunk(weight) is None:
            continue
        of_weight = torch.float32 if weight.float32 else dtype
        shards = [
            _ExportShard(weight, owner, shard, weight.rule.get_local_shape(shard), of_weight)
            for owner, shard in placement.owners(weight)
        ]
        size = sum(shard.num_bytes for shard in shards)
        if bucket and num_bytes + size > EXPORT_BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket += shards
        num_bytes += size
    yield bucket


def _send(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """To rank 0, as one message."""
    if not tensors:
        return
    places, num_bytes = _places([tensor.nbytes for tensor in tensors])
    message = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for tensor, place in zip(tensors, places, strict=True):
        message[place].view(tensor.dtype).copy_(tensor.reshape(-1))
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, message, 0)]):
        work.wait()


def _receive(
    bucket: Sequence[_ExportShard], device: torch.device
) -> dict[_ExportShard, torch.Tensor]:
    """The shards of other ranks, on the CPU; these send at the same time."""
    by_owner: dict[int, list[_ExportShard]] = {}
    for shard in bucket:
        if shard.owner:
            by_owner.setdefault(shard.owner, []).append(shard)
    places = {
        owner: _places([shard.num_bytes for shard in shards]) for owner, shards in by_owner.items()
    }
    messages = {
        owner: torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for owner, (_, num_bytes) in places.items()
    }
    receives = [dist.P2POp(dist.irecv, message, owner) for owner, message in messages.items()]
    for work in dist.batch_isend_irecv(receives) if receives else ():
        work.wait()
    found: dict[_ExportShard, torch.Tensor] = {}
    for owner, shards in by_owner.items():
        message = messages.pop(owner).cpu()
        for shard, place in zip(shards, places[owner][0], strict=True):
            found[shard] = message[place].view(shard.dtype).view(shard.shape)
    return found


def _places(sizes: Sequence[int]) -> tuple[list[slice], int]:
    """Where tensors of these bytes are in a message, at multiples of 16, and its bytes."""
    starts = list(accumulate((-(-size // 16) * 16 for size in sizes), initial=0))
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)], starts[
        -1
    ]


def _whole(
    tensors: dict[str, torch.Tensor], tensor: LogicalTensor, dtype: torch.dtype
) -> torch.Tensor:
    if tensor.name not in tensors:
        tensors[tensor.name] = torch.empty(tensor.shape, dtype=dtype)
    return tensors[tensor.name]
