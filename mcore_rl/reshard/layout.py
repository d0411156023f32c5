"""Layouts: which rank holds which shard of which parameter. No torch.

A training layout depends on the mesh and the pipeline chunks, a generation layout on the parallel
sizes of vLLM. Both have the same methods for a Weight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from mcore_rl.config.errors import ConfigError
from mcore_rl.parallel.mesh import Chunk, Mesh
from mcore_rl.reshard.rules import ListedRule, StackedRows, Stage, Weight

Holders = tuple[tuple[int, ...], ...]  # ranks per shard, ascending


class Ranks(Protocol):
    """The ranks of an engine, and the parameters on them."""

    @property
    def world_size(self) -> int: ...

    def get_holders(self, weight: Weight) -> Holders:
        """Return the ranks that have each shard; empty if no rank has the parameter."""
        ...

    def get_local_name(self, weight: Weight) -> str:
        """Return the parameter's name on the ranks that have it."""
        ...


class FullRanks:
    """Ranks that each have every tensor of a checkpoint whole, under its name there."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._holders = (tuple(range(world_size)),)

    def get_holders(self, weight: Weight) -> Holders:
        return self._holders

    def get_local_name(self, weight: Weight) -> str:
        return weight.name


class ShardedRanks:
    """Ranks of FSDP2: `num_replicas` copies of a model, each sharded over consecutive ranks.

    Experts are divided over ep consecutive ranks first, then over ranks with the same ep rank.
    """

    def __init__(self, world_size: int, num_replicas: int = 1, ep: int = 1) -> None:
        self.world_size, self.num_replicas, self.ep = world_size, num_replicas, ep
        self.num_shards = world_size // num_replicas  # ranks of a replica
        self._everywhere = (tuple(range(world_size)),)
        self._holders = cache(self._find_holders)

    def get_holders(self, weight: Weight) -> Holders:
        if weight.axis is None:
            return self._everywhere
        if weight.expert is None:
            return self._holders(None)
        assert isinstance(weight.rule, StackedRows)  # of the experts of an ep rank
        return self._holders(weight.expert // weight.rule.num_units)

    def get_local_name(self, weight: Weight) -> str:
        return weight.name

    def _find_holders(self, ep_rank: int | None) -> Holders:
        ranks = (
            range(self.num_shards) if ep_rank is None else range(ep_rank, self.num_shards, self.ep)
        )
        replicas = range(0, self.world_size, self.num_shards)
        return tuple(tuple(first + rank for first in replicas) for rank in ranks)


class TrainingRanks:
    """Ranks of Megatron, in the order of parallel/mesh.py."""

    def __init__(self, mesh: Mesh, chunks: Sequence[Chunk], num_experts: int) -> None:
        self.mesh, self.chunks = mesh, tuple(chunks)
        self.experts_per_rank = max(1, num_experts // mesh.sizes["ep"])
        self._chunk_of_layer = {n: chunk for chunk in chunks for n in chunk.layers}
        self._holders = cache(self._find_holders)
        self._ranks_by_stage = cache(self._group_ranks)

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def find_chunk(self, weight: Weight) -> Chunk | None:
        """Return the chunk that has the parameter, or None for a replica that is not needed."""
        if weight.layer is not None:
            return self._chunk_of_layer[weight.layer]
        chunk = next((chunk for chunk in self.chunks if _has_stage(chunk, weight.stage)), None)
        if chunk is not None and weight.replica and chunk.has_embedding:
            return None
        return chunk

    def get_holders(self, weight: Weight) -> Holders:
        chunk = self.find_chunk(weight)
        if chunk is None:
            return ()
        ep_rank = None if weight.expert is None else weight.expert // self.experts_per_rank
        return self._holders(weight.axis, chunk.pp_rank, ep_rank)

    def get_local_name(self, weight: Weight) -> str:
        """Return the index of the model chunk on the rank, a colon, and the name inside it."""
        chunk = self.find_chunk(weight)
        assert chunk is not None  # the weight has holders
        first_expert = (weight.expert or 0) // self.experts_per_rank * self.experts_per_rank
        name = weight.get_local_name(first_layer=chunk.layers.start, first_expert=first_expert)
        return f"{chunk.vpp_rank}:{name}"

    def _find_holders(self, axis: str | None, pp_rank: int, ep_rank: int | None) -> Holders:
        """Return the ranks of a stage by their shard along a mesh axis; None: one shard."""
        holders: dict[int, list[int]] = {}
        for rank in self._ranks_by_stage()[pp_rank, ep_rank]:
            shard = 0 if axis is None else getattr(self.mesh.get_coordinate(rank), f"{axis}_rank")
            holders.setdefault(shard, []).append(rank)
        return tuple(tuple(holders[shard]) for shard in sorted(holders))

    def _group_ranks(self) -> dict[tuple[int, int | None], list[int]]:
        """Group ranks by (pp_rank, ep_rank) and by (pp_rank, None)."""
        groups: dict[tuple[int, int | None], list[int]] = {}
        for rank in range(self.world_size):
            coordinate = self.mesh.get_coordinate(rank)
            for ep_rank in (None, coordinate.ep_rank):
                groups.setdefault((coordinate.pp_rank, ep_rank), []).append(rank)
        return groups


def _has_stage(chunk: Chunk, stage: Stage | None) -> bool:
    """Return whether a chunk has that part of the model outside the decoder layers."""
    if stage == "final_norm":
        return chunk.has_final_norm
    if stage == "head":
        return chunk.has_head
    return chunk.num_mtp_layers > 0 if stage == "mtp" else chunk.has_embedding


@dataclass(frozen=True, slots=True)
class GenerationLayout:
    """Parallel layout of vLLM: `dp` engines with consecutive ranks, each over pp * tp ranks.

    With `ep` above 1 experts are unsplit and distributed over groups of ep ranks: the tp ranks of
    an engine, or of ep / tp engines of a data-parallel server. With ep=1 their columns are split
    over tp, like those of dense layers.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp", "ep"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"generate.{axis}={getattr(self, axis)}; allowed: at least 1")
        if self.ep > 1 and (self.ep % self.tp or (self.tp * self.dp) % self.ep):
            raise ConfigError(
                f"generate.ep={self.ep}; allowed: 1, or a multiple of generate.tp={self.tp} that "
                f"divides generate.tp * generate.dp = {self.tp * self.dp}"
            )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def splits_tokens(self) -> bool:
        """True if each tp rank sends its part of the tokens to the experts.

        vLLM's `use_sequence_parallel_moe` (config/parallel.py:763): its shared experts, of models
        that have it, are not split over tp then.
        """
        return self.ep > self.tp > 1


class GenerationRanks:
    """Ranks of vLLM: data-parallel engines outermost, tensor-parallel ranks innermost."""

    def __init__(self, layout: GenerationLayout, num_layers: int, num_experts: int) -> None:
        self.layout = layout
        self._stage_of_layer = _assign_stages(num_layers, layout.pp)
        self._first_experts = _list_first_experts(num_experts, layout.ep)
        self._holders = cache(self._find_holders)
        self._ranks_by_stage = cache(self._group_ranks)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def find_stage(self, weight: Weight) -> int:
        """Return the pipeline rank that has the parameter."""
        if weight.layer is not None:
            return self._stage_of_layer[weight.layer]
        return 0 if weight.stage == "embedding" else self.layout.pp - 1

    def get_holders(self, weight: Weight) -> Holders:
        if weight.replica and self.layout.pp == 1:
            return ()  # a tied head is the embedding of the same rank
        expert_rank = None if weight.expert is None else self._find_expert_rank(weight.expert)
        return self._holders(weight.axis, self.find_stage(weight), expert_rank)

    def get_local_name(self, weight: Weight) -> str:
        if weight.expert is None:
            return weight.get_local_name()
        return weight.get_local_name(
            first_expert=self._first_experts[self._find_expert_rank(weight.expert)]
        )

    def _find_expert_rank(self, expert: int) -> int:
        return bisect_right(self._first_experts, expert) - 1

    def _find_holders(self, axis: str | None, stage: int, expert_rank: int | None) -> Holders:
        """Return the ranks of a stage by their shard along a rule's axis; None: one shard."""
        layout, holders = self.layout, dict[int, list[int]]()
        is_split = axis == "tp" or (axis == "etp" and layout.ep == 1)
        is_split |= axis == "shared_tp" and not layout.splits_tokens
        for rank in self._ranks_by_stage()[stage, expert_rank]:
            holders.setdefault(rank % layout.tp if is_split else 0, []).append(rank)
        return tuple(tuple(holders[shard]) for shard in sorted(holders))

    def _group_ranks(self) -> dict[tuple[int, int | None], list[int]]:
        """Group ranks by (stage, expert rank) and by (stage, None)."""
        layout, groups = self.layout, dict[tuple[int, int | None], list[int]]()
        for rank in range(layout.world_size):
            tp_rank, stage = rank % layout.tp, rank // layout.tp % layout.pp
            engine = rank // (layout.tp * layout.pp)
            for expert_rank in (None, (engine * layout.tp + tp_rank) % layout.ep):
                groups.setdefault((stage, expert_rank), []).append(rank)
        return groups


class ListedRanks:
    """Ranks of servers whose parameters are listed (rules.ListedRule).

    Args:
        num_workers: Ranks of each server.
    """

    def __init__(self, layout: GenerationLayout, num_workers: int) -> None:
        self.layout, self._num_workers = layout, num_workers
        self._holders = cache(self._find_holders)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def get_holders(self, weight: Weight) -> Holders:
        assert isinstance(weight.rule, ListedRule)
        return self._holders(weight.rule.ranks)

    def _find_holders(self, ranks: tuple[int, ...]) -> Holders:
        servers = range(0, self.world_size, self._num_workers)
        return (tuple(first + rank for first in servers for rank in ranks),)

    def get_local_name(self, weight: Weight) -> str:
        return weight.name


def _assign_stages(num_layers: int, pp: int) -> list[int]:
    """Return the pipeline rank of each layer; remaining layers go to the stages before the last.

    As get_pp_indices of vLLM 0.32 (distributed/utils.py).
    """
    counts, remaining = [num_layers // pp] * pp, num_layers % pp
    for index in range(2, remaining + 2):
        counts[-index] += 1
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def _list_first_experts(num_experts: int, ep: int) -> list[int]:
    """Return the first expert of each rank; remaining experts go to the first ranks.

    As determine_expert_map of vLLM, "linear"
    (model_executor/layers/fused_moe/expert_map_manager.py).
    """
    base, remainder = divmod(num_experts, ep)
    return [rank * base + min(rank, remainder) for rank in range(ep)]
