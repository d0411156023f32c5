"""Weights between Hugging Face checkpoints and the ranks, both ways by the same rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from math import prod
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.parallel.mesh import Chunk, Coordinate, Mesh
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import TrainingRanks
from mcore_rl.reshard.rules import Shard, Weight, slice_rows

EXPORT_BUCKET_BYTES = 128 << 20  # of parameters that are sent together


class WeightPlacement:
    """The rank, chunk and shard of each parameter, with names of the installed Megatron.

    It adds to TrainingRanks, which reshard plans use, the questions of a rank.
    """

    def __init__(self, mesh: Mesh, stages: Sequence[Chunk], num_experts: int) -> None:
        self.mesh = mesh
        self.ranks = TrainingRanks(mesh, stages, num_experts)

    def find_chunk(self, weight: Weight) -> Chunk | None:
        """Return the chunk of a parameter; None for a replica that this layout does not need."""
        return self.ranks.find_chunk(weight)

    def get_shard(self, weight: Weight, coordinate: Coordinate) -> Shard:
        if weight.axis is None:
            return Shard(0, 1)
        return Shard(getattr(coordinate, f"{weight.axis}_rank"), self.mesh.sizes[weight.axis])

    def has_weight(self, weight: Weight, coordinate: Coordinate) -> bool:
        """Return whether the rank has a shard of the parameter."""
        chunk = self.find_chunk(weight)
        if chunk is None or chunk.pp_rank != coordinate.pp_rank:
            return False
        ep_rank = coordinate.ep_rank
        return weight.expert is None or weight.expert // self.ranks.experts_per_rank == ep_rank

    def get_local_name(self, weight: Weight) -> str:
        """Return the parameter's name inside its chunk."""
        return split_chunk_name(self.ranks.get_local_name(weight))[1]

    def list_owners(self, weight: Weight) -> list[tuple[int, Shard]]:
        """Return the lowest world rank of each shard, with the shard, in shard order."""
        holders = self.ranks.get_holders(weight)
        return [(ranks[0], Shard(index, len(holders))) for index, ranks in enumerate(holders)]


def split_chunk_name(name: str) -> tuple[int, str]:
    """Split a parameter's name in a plan ("chunk:name") into chunk index and name."""
    chunk, _, inner = name.partition(":")
    return int(chunk), inner


def get_local_tensors(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that rules name: parameters, and the selection bias of routers (a buffer).

    Adapters are left out: see merge_adapter.
    """
    tensors: dict[str, torch.Tensor] = {
        n: p for n, p in chunk.named_parameters() if not n.startswith("lora.")
    }
    tensors |= {n: b for n, b in chunk.named_buffers() if n.endswith("router.expert_bias")}
    return tensors


def find_adapter(chunk: torch.nn.Module, name: str) -> Any:
    """Return the adapter (lora.py) of a parameter of a chunk, or None."""
    adapters: Any = getattr(chunk, "lora", None)
    return None if adapters is None else adapters.find(name)


@torch.no_grad()
def merge_adapter(chunk: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a local tensor merged with its adapter, if it has one: as the model computes."""
    adapter = find_adapter(chunk, name)
    return tensor.data if adapter is None else adapter(tensor)


def collect_local_weights(
    chunks: Sequence[torch.nn.Module],
    weights: Sequence[Weight],
    placement: WeightPlacement,
    coordinate: Coordinate,
) -> LocalWeights:
    """Return the rank's shards by their names in reshard plans; layers with adapters are merged.

    Merged weights are computed when they are read. The others are the live parameters, which must
    not change while they are read.
    """
    tensors = [get_local_tensors(chunk) for chunk in chunks]
    local_weights = LocalWeights({}, {})
    for weight in weights:
        if not placement.has_weight(weight, coordinate):
            continue
        name = placement.ranks.get_local_name(weight)
        index, parameter = split_chunk_name(name)
        tensor = tensors[index][parameter]
        if find_adapter(chunks[index], parameter) is None:
            local_weights.stored[name] = tensor.data
        else:
            local_weights.computed[name] = partial(merge_adapter, chunks[index], parameter, tensor)
    return local_weights


@torch.no_grad()
def load_weights(
    chunks: Sequence[torch.nn.Module],
    weights: Sequence[Weight],
    placement: WeightPlacement,
    coordinate: Coordinate,
    reader: CheckpointReader,
    zeros: Collection[str] = (),
) -> None:
    """Fill this rank's parameters, reading only its own slices. Vocabulary padding becomes zero.

    Args:
        zeros: Tensors that start at zero and are not in the checkpoint.

    Raises:
        RuntimeError: A parameter has no rule, or a rule no parameter (a bug in a family).
    """
    unfilled = [get_local_tensors(chunk) for chunk in chunks]
    for weight in weights:
        if not placement.has_weight(weight, coordinate):
            continue
        chunk = placement.find_chunk(weight)
        assert chunk is not None
        name, shard = placement.get_local_name(weight), placement.get_shard(weight, coordinate)
        tensor, expected = (
            unfilled[chunk.vpp_rank].pop(name, None),
            weight.rule.get_local_shape(shard),
        )
        if tensor is None or tuple(tensor.shape) != expected:
            shape = None if tensor is None else tuple(tensor.shape)
            raise RuntimeError(f"{name}: the model has shape {shape}, its rule says {expected}")
        tensor.zero_()  # padding of the vocabulary is in no block
        for block in weight.rule.get_blocks(shard):
            if block.tensor.name not in zeros:
                tensor[block.local_slices].copy_(reader.read(block))
    if names := sorted(name for tensors in unfilled for name in tensors):
        raise RuntimeError(f"no rule names {', '.join(names[:3])}; {len(names)} parameters in all")


@torch.no_grad()
def iter_unbuilt_weights(
    weights: Sequence[Weight], placement: WeightPlacement, reader: CheckpointReader
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield checkpoint tensors that no chunk has: prediction layers that are not trained."""
    unbuilt = [w for w in weights if not w.replica and placement.find_chunk(w) is None]
    for tensor in (tensor for weight in unbuilt for tensor in weight.rule.tensors):
        yield tensor.name, reader.read(slice_rows(tensor, 0, tensor.shape[0], 0))


def export_weights(
    chunks: Sequence[torch.nn.Module],
    weights: Sequence[Weight],
    placement: WeightPlacement,
    world_rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream full Hugging Face tensors (on the CPU) from world rank 0, in rule order.

    Each shard is sent once, from the lowest rank that has it. Ranks send their shards of a bucket
    of parameters as one message, all at the same time. Ranks other than 0 yield nothing but must
    exhaust the iterator. In memory at a time: the tensors of a bucket, or of one parameter.
    """
    tensors = [get_local_tensors(chunk) for chunk in chunks]
    like = next(iter(tensors[0].values()))
    if like.device.type == "cuda":  # NCCL needs all ranks to create the group's communicator
        dist.all_reduce(torch.zeros(1, device=like.device))

    def get_merged(weight: Weight) -> torch.Tensor:
        chunk = placement.find_chunk(weight)
        assert chunk is not None
        name = placement.get_local_name(weight)
        return merge_adapter(chunks[chunk.vpp_rank], name, tensors[chunk.vpp_rank][name])

    for bucket in iter_export_buckets(weights, placement, like.dtype):
        if world_rank != 0:
            # Rank 0 has the same buckets, so a message needs no header with names and shapes.
            sent = [shard.weight for shard in bucket if shard.owner == world_rank]
            _send_to_rank_zero([get_merged(weight) for weight in sent], like.device)
            continue
        received = _receive_shards(bucket, like.device)
        for weight, shards in groupby(bucket, key=attrgetter("weight")):
            full: dict[str, torch.Tensor] = {}
            for shard in shards:
                data = received[shard] if shard.owner else get_merged(weight)
                for block in weight.rule.get_blocks(shard.shard):
                    name, shape = block.tensor.name, block.tensor.shape
                    if name not in full:
                        full[name] = torch.empty(shape, dtype=data.dtype)
                    full[name][block.box.slices].copy_(data[block.local_slices])
            for tensor in weight.rule.tensors:
                if tensor.name in full:
                    yield tensor.name, full[tensor.name]
                    # Tensors that share memory cannot be written to one file.
                    yield from ((name, full[tensor.name].clone()) for name in tensor.aliases)


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


def iter_export_buckets(
    weights: Sequence[Weight], placement: WeightPlacement, dtype: torch.dtype
) -> Iterator[list[_ExportShard]]:
    """Yield the exported shards in rule order, in buckets of full parameters, same on all ranks."""
    bucket: list[_ExportShard] = []
    num_bytes = 0
    for weight in weights:
        if weight.replica or placement.find_chunk(weight) is None:
            continue
        weight_dtype = torch.float32 if weight.float32 else dtype
        shards = [
            _ExportShard(weight, owner, shard, weight.rule.get_local_shape(shard), weight_dtype)
            for owner, shard in placement.list_owners(weight)
        ]
        size = sum(shard.num_bytes for shard in shards)
        if bucket and num_bytes + size > EXPORT_BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket += shards
        num_bytes += size
    yield bucket


def _send_to_rank_zero(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Send tensors as one message."""
    if not tensors:
        return
    slices, num_bytes = _lay_out_message([tensor.nbytes for tensor in tensors])
    message = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for tensor, part in zip(tensors, slices, strict=True):
        message[part].view(tensor.dtype).copy_(tensor.reshape(-1))
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, message, 0)]):
        work.wait()


def _receive_shards(
    bucket: Sequence[_ExportShard], device: torch.device
) -> dict[_ExportShard, torch.Tensor]:
    """Receive the shards of all other ranks at the same time; return them on the CPU."""
    by_owner: dict[int, list[_ExportShard]] = {}
    for shard in bucket:
        if shard.owner:  # rank 0's own are not sent
            by_owner.setdefault(shard.owner, []).append(shard)
    layouts = {
        owner: _lay_out_message([shard.num_bytes for shard in shards])
        for owner, shards in by_owner.items()
    }
    messages = {
        owner: torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for owner, (_, num_bytes) in layouts.items()
    }
    receives = [dist.P2POp(dist.irecv, message, owner) for owner, message in messages.items()]
    for work in dist.batch_isend_irecv(receives) if receives else ():
        work.wait()
    tensors: dict[_ExportShard, torch.Tensor] = {}
    for owner, shards in by_owner.items():
        message = messages.pop(owner).cpu()  # one message at a time has a copy on the host
        for shard, part in zip(shards, layouts[owner][0], strict=True):
            tensors[shard] = message[part].view(shard.dtype).view(shard.shape)
    return tensors


def _lay_out_message(sizes: Sequence[int]) -> tuple[list[slice], int]:
    """Return the slice of each tensor of `sizes` bytes, aligned to 16, and the message's bytes."""
    starts = list(accumulate((-(-size // 16) * 16 for size in sizes), initial=0))
    slices = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    return slices, starts[-1]
