"""The candidates of `bench reshard`, as one rank of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mcore_rl.config.schema import Layout
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.models.base import HFConfig, get_family, get_model_sizes, pad_vocab_size
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.reshard import ops
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import Exchange, GroupTransport, LocalWeights
from mcore_rl.reshard.layout import GenerationRanks, Ranks, TrainingRanks
from mcore_rl.reshard.planner import Devices, Side, TransferRequirements, assign_hosts
from mcore_rl.reshard.rules import Block, Shard, Weight

if TYPE_CHECKING:
    from mcore_rl.tools.bench_reshard import Candidate, Settings

DTYPE = torch.bfloat16
Parameters = dict[str, torch.Tensor]
_TIMEOUT_S = 300.0


class PlannedExchange:
    """Ours: plan and schedule are made once, buckets are placed as they come."""

    def __init__(self, training: Side, target: Side, is_placed: bool, bucket_bytes: int) -> None:
        """`is_placed`: generation ranks go where most bytes stay, not where they are numbered."""
        start = time.perf_counter()
        device = dist.get_rank()
        demand = TransferRequirements(training, target, DTYPE.itemsize)
        world = training[0].world_size
        hosts = assign_hosts(demand.compute_overlap()) if is_placed else tuple(range(world))
        plan = demand.plan(Devices.colocated(hosts, world, world))
        # Two buckets' worth of memory in all: two halves on their way in, two on the way out.
        half = bucket_bytes // 2
        rounds = schedule(plan, device, half)
        self.schedule_s = time.perf_counter() - start
        self.rank = hosts.index(device)  # of this device, on the target side
        # By the plan: what the network carries is measured apart, and is a little more.
        self.received_bytes = plan.compute_totals().received[self.rank]
        group = dist.group.WORLD
        assert group is not None  # the default group has been made
        transport = GroupTransport(group, _TIMEOUT_S, torch.device("cpu"))
        self._exchange = Exchange(rounds, half, DTYPE, transport, _allocate)
        self._layouts: dict[int, ops.BoxLayout] = {}  # by bucket

    def run(self, weights: Parameters, parameters: Parameters) -> None:
        for bucket in self._exchange.run(LocalWeights(weights), _allocate):
            targets = dict.fromkeys(part.target for part in bucket.parts)
            tensors = [bucket.memory, *(parameters[target] for target in targets)]
            if bucket.index not in self._layouts:
                pairs = (
                    (box.data, ops.narrow_box(parameters[box.target], box.offset, box.data.shape))
                    for box in bucket
                )
                self._layouts[bucket.index] = ops.BoxLayout(pairs, tensors)
            self._layouts[bucket.index].run(tensors)


def _allocate(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class GatherThenSlice:
    """Every parameter gathered on every rank, then sliced: what most systems do.

    As verl does from Megatron (utils/megatron_utils.py, per_tensor_generator): a shard goes from
    its pipeline stage to the others, shards of a parameter are gathered over tensor-parallel
    ranks, and experts over expert-parallel ranks. verl does it for one parameter at a time;
    `bucket_bytes` above 0 sends as many together as fit, in flat buffers: the stronger baseline.
    """

    def __init__(
        self,
        training: TrainingRanks,
        weights: Sequence[Weight],
        target: Side,
        rank: int,
        bucket_bytes: int = 0,
    ) -> None:
        """`rank` is this device's on the target side; `bucket_bytes` bounds a rank's own shards."""
        self._ranks, self._device = training, dist.get_rank()
        self._at = training.mesh.get_coordinate(self._device)
        self._groups = {axis: self._group(axis) for axis in ("pp", "tp", "ep", "etp")}
        self._buckets = self._bucketed(weights, bucket_bytes // DTYPE.itemsize)
        self._wanted: dict[str, list[tuple[Block, str]]] = {}  # by tensor
        for weight, shard in held(*target, rank):
            for block in weight.rule.get_blocks(shard):
                wanted = block, target[0].get_local_name(weight)
                self._wanted.setdefault(block.tensor.name, []).append(wanted)

    def _group(self, axis: str) -> dist.ProcessGroup:
        """That of this rank; all ranks make all groups."""
        found: dist.ProcessGroup | None = None
        for ranks in self._ranks.mesh.get_groups(axis):
            group = dist.new_group(ranks)
            found = group if self._device in ranks else found
        assert found is not None  # every rank is in a group of every axis
        return found

    def _bucketed(self, weights: Sequence[Weight], num_elements: int) -> list[list[_Unit]]:
        """Units that travel in the same way: as many as `num_elements` hold, or one alone."""
        units: dict[tuple[str, int | None, int | None], list[Weight]] = {}
        for weight in weights:
            if self._ranks.get_holders(weight):
                expert = weight.expert
                place = None if expert is None else expert % self._ranks.experts_per_rank
                units.setdefault((weight.name, weight.layer, place), []).append(weight)
        buckets: list[list[_Unit]] = []
        open_buckets: dict[_Way, list[_Unit]] = {}
        for experts in units.values():
            unit = _Unit(tuple(experts), self._way(experts[0]))
            bucket = open_buckets.get(unit.way)
            if bucket is None or sum(u.numel for u in (*bucket, unit)) > num_elements:
                bucket = open_buckets[unit.way] = []
                buckets.append(bucket)
            bucket.append(unit)
        return buckets

    def _way(self, weight: Weight) -> _Way:
        chunk = self._ranks.find_chunk(weight)
        assert chunk is not None  # it has holders
        num_shards = len(self._ranks.get_holders(weight))
        return _Way(chunk.pp_rank, weight.axis, num_shards, weight.expert is not None)

    def run(self, local: Parameters, parameters: Parameters) -> None:
        for bucket in self._buckets:
            for unit, by_expert in zip(bucket, self._gathered(bucket, local), strict=True):
                for weight, shards in zip(unit.weights, by_expert, strict=True):
                    self._place(weight, shards, parameters)

    def _place(self, weight: Weight, shards: list[torch.Tensor], parameters: Parameters) -> None:
        whole = {t.name: torch.empty(t.shape, dtype=DTYPE) for t in weight.rule.tensors}
        for index, tensor in enumerate(shards):
            for block in weight.rule.get_blocks(Shard(index, len(shards))):
                whole[block.tensor.name][block.box.slices] = tensor[block.local_slices]
        for name, tensor in whole.items():
            for block, parameter in self._wanted.get(name, ()):
                parameters[parameter][block.local_slices] = tensor[block.box.slices]

    def _gathered(
        self, bucket: list[_Unit], local: Parameters
    ) -> Iterator[list[list[torch.Tensor]]]:
        """Of each unit, for each of its weights, all shards."""
        way, mesh = bucket[0].way, self._ranks.mesh
        if way.pp_rank != self._at.pp_rank:
            mine = torch.empty(sum(unit.numel for unit in bucket), dtype=DTYPE)
        else:
            names = [self._ranks.get_local_name(unit.mine(self._at.ep_rank)) for unit in bucket]
            flat = [local[name].view(-1) for name in names]
            mine = flat[0] if len(flat) == 1 else torch.cat(flat)
        if mesh.sizes["pp"] > 1:
            stages = mesh.get_group(self._device, "pp")
            dist.broadcast(mine, src=stages[way.pp_rank], group=self._groups["pp"])
        shards = [mine]
        if way.axis is not None and way.num_shards > 1:
            shards = _all_gather(mine, way.num_shards, self._groups[way.axis])
        by_expert = [shards]
        if way.is_expert and mesh.sizes["ep"] > 1:
            by_shard = [_all_gather(s, mesh.sizes["ep"], self._groups["ep"]) for s in shards]
            by_expert = [list(of_expert) for of_expert in zip(*by_shard, strict=True)]
        start = 0
        for unit in bucket:
            end = start + unit.numel
            yield [[s[start:end].view(unit.shape) for s in shards] for shards in by_expert]
            start = end


@dataclass(frozen=True, slots=True)
class _Way:
    """How shards get to all ranks: what can travel together has the same."""

    pp_rank: int  # the stage that has them
    axis: str | None  # that they are cut over
    num_shards: int
    is_expert: bool


@dataclass(frozen=True, slots=True)
class _Unit:
    """One parameter, or one expert of each expert-parallel rank."""

    weights: tuple[Weight, ...]
    way: _Way

    def mine(self, ep_rank: int) -> Weight:
        return self.weights[ep_rank] if self.way.is_expert else self.weights[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a shard."""
        return self.weights[0].rule.get_local_shape(Shard(0, self.way.num_shards))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _all_gather(tensor: torch.Tensor, count: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(count)]
    dist.all_gather(found, tensor, group=group)
    return found


def held(ranks: Ranks, weights: Sequence[Weight], rank: int) -> list[tuple[Weight, Shard]]:
    """The parameters of a rank, and which shard of each."""
    found = []
    for weight in weights:
        holders = ranks.get_holders(weight)
        for index, members in enumerate(holders):
            if rank in members:
                found.append((weight, Shard(index, len(holders))))
    return found


def _empty(side: Side, rank: int) -> Parameters:
    ranks, weights = side
    return {
        ranks.get_local_name(weight): torch.zeros(weight.rule.get_local_shape(shard), dtype=DTYPE)
        for weight, shard in held(ranks, weights, rank)
    }


def _random(side: Side, rank: int) -> Parameters:
    """Ranks with the same shard have the same numbers."""
    ranks, weights = side
    found = {}
    for number, (weight, shard) in enumerate(held(ranks, weights, rank)):
        generator = torch.Generator().manual_seed(number * 1009 + shard.index)
        tensor = torch.empty(weight.rule.get_local_shape(shard), dtype=DTYPE)
        found[ranks.get_local_name(weight)] = tensor.uniform_(-1, 1, generator=generator)
    return found


def _training(config: HFConfig, layout: Layout) -> tuple[TrainingRanks, tuple[Weight, ...]]:
    sizes = get_model_sizes(config)
    chunks = split_into_chunks(layout, sizes.num_layers)
    rules = get_family(config).weights(config, pad_vocab_size(config, layout.tp))
    return TrainingRanks(Mesh(layout), chunks, sizes.num_experts), rules


class _Case:
    """Candidates that write into the same parameters."""

    parameters: Parameters
    _first: Parameters | None = None

    def check(self, name: str) -> None:
        """Raises RunFailed unless a candidate has left the bits that the first one left."""
        if self._first is None:
            self._first = {key: tensor.clone() for key, tensor in self.parameters.items()}
        for key, tensor in self.parameters.items():
            if not torch.equal(tensor, self._first[key]):
                raise RunFailed(f"{name}: {key} differs from what the first candidate left")
            tensor.zero_()


class IntoVLLM(_Case):
    def __init__(self, settings: Settings) -> None:
        config = settings.config()
        training = _training(config, settings.train)
        sizes = get_model_sizes(config)
        served = GenerationRanks(settings.generate, sizes.num_layers, sizes.num_experts)
        target: Side = served, get_family(config).vllm_weights(config)
        self.exchange = PlannedExchange(training, target, True, settings.bucket_bytes)
        self.gather, self.gather_bucketed = (
            GatherThenSlice(*training, target, self.exchange.rank, bucket_bytes)
            for bucket_bytes in (0, settings.bucket_bytes)
        )
        self.weights = _random(training, dist.get_rank())
        self.parameters = _empty(target, self.exchange.rank)
        tensors = [t for w in training[1] if not w.replica for t in w.rule.tensors]
        self.model_bytes = sum(torch.Size(t.shape).numel() for t in tensors) * DTYPE.itemsize

    def candidates(self) -> dict[str, Candidate]:
        return {
            "exchange": self._with(self.exchange.run),
            "gather": self._with(self.gather.run),
            "gather_bucketed": self._with(self.gather_bucketed.run),
        }

    def _with(self, run: Callable[[Parameters, Parameters], None]) -> Callable[[], None]:
        return lambda: run(self.weights, self.parameters)


class IntoMegatron(_Case):
    """Where Megatron's modules are needed: they replace what "cuda" means in this process."""

    def __init__(self, settings: Settings) -> None:
        from mcore_rl.engine.megatron import device

        device.install(num_threads=1, on_cpu=True)
        from mcore_rl.engine.megatron.refit_baseline import MegatronRefit

        config, rank = settings.config(), dist.get_rank()
        layouts = settings.train, settings.target
        self.refit = MegatronRefit(config, *layouts, DTYPE, rank)
        self.weights, self.parameters = self.refit.parameters()
        sides = [_training(config, layout) for layout in layouts]
        self.exchange = PlannedExchange(sides[0], sides[1], False, settings.bucket_bytes)
        for name, tensor in _random(sides[0], rank).items():
            self.weights[name].copy_(tensor)
        for tensor in self.parameters.values():
            tensor.zero_()

    def candidates(self) -> dict[str, Candidate]:
        return {
            "exchange": lambda: self.exchange.run(self.weights, self.parameters),
            "megatron": self.refit.run,
        }
