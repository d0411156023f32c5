"""Jobs of test_reshard.py: exchanges out of engines, and between ranks of both sides."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lora_jobs
import ranks
import torch
import torch.distributed as dist

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout
from mcore_rl.engine.base import EngineSpec
from mcore_rl.models.base import HFConfig, get_family, get_model_sizes, pad_vocab_size
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.parallel.store import join_world
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import Exchange, GroupTransport, LocalWeights, ReshardError
from mcore_rl.reshard.layout import GenerationLayout, GenerationRanks, Ranks, TrainingRanks
from mcore_rl.reshard.ops import compute_checksums
from mcore_rl.reshard.planner import Devices, Plan, Side, TransferRequirements
from mcore_rl.reshard.rules import Block, Shard, Weight

Result = ranks.Result
Servers = Mapping[str, tuple[GenerationLayout, tuple[int, ...]]]  # and their devices, if colocated
BUCKET_BYTES = 8192  # rows of the tiny models are cut, and there are some hundred buckets
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sides(
    config: HFConfig, layout: Layout, generation: GenerationLayout, num_mtp: int = 0
) -> tuple[Side, Side]:
    family, sizes = get_family(config), get_model_sizes(config)
    chunks = split_into_chunks(layout, sizes.num_layers, num_mtp)
    training = TrainingRanks(Mesh(layout), chunks, sizes.num_experts)
    served = GenerationRanks(generation, sizes.num_layers, sizes.num_experts)
    rules = family.weights(config, pad_vocab_size(config, layout.tp))
    return (training, rules), (served, family.vllm_weights(config))


def filled(side: Side, rank: int, read: Callable[[Block], torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's parameters as the rules say; NaN where they say nothing: padding."""
    engine_ranks, weights = side
    parameters = {}
    for weight, shard in held(engine_ranks, weights, rank):
        local = torch.full(weight.rule.get_local_shape(shard), torch.nan)
        for block in weight.rule.get_blocks(shard):
            local[block.local_slices] = read(block)
        parameters[engine_ranks.get_local_name(weight)] = local
    return parameters


def held(engine_ranks: Ranks, weights: tuple[Weight, ...], rank: int) -> list[tuple[Weight, Shard]]:
    shards = []
    for weight in weights:
        holders = engine_ranks.get_holders(weight)
        index = next((n for n, members in enumerate(holders) if rank in members), None)
        if index is not None:
            shards.append((weight, Shard(index, len(holders))))
    return shards


@dataclass
class Memory:
    """Counts what a run allocates. All of it lives until the run ends."""

    sizes: list[int] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.sizes.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)  # NaN in all dtypes


def sync(
    exchange: Exchange, memory: Memory, weights: LocalWeights, served: Side, rank: int | None
) -> Result:
    """Receive into parameters that are NaN before; return them, with every checksum right."""
    parameters = {}
    if rank is not None:
        parameters = filled(served, rank, lambda block: torch.tensor(torch.nan))
    for bucket in exchange.run(weights, memory.allocate, lambda name: True):
        for box in bucket:
            [checksum] = compute_checksums([(box.data, box.data.dtype)]).tolist()
            assert box.checksum == checksum, box
            ranges = zip(box.offset, box.data.shape, strict=True)
            target = parameters[box.target]
            if box.data.dtype != target.dtype and not target.isfinite().any():
                target = parameters[box.target] = target.to(box.data.dtype)
            place = tuple(slice(o, o + n) for o, n in ranges)
            assert target[place].isnan().all(), f"{box.target} is written twice"
            target[place] = box.data
        bucket.memory.fill_(255)  # whoever reads on reads NaN
    return parameters


def _join() -> None:
    """The default group, which an engine would make."""
    if not dist.is_initialized():
        join_world("gloo", timeout_s=60.0)


def _rank_of(device: int, devices: tuple[int, ...]) -> int | None:
    return devices.index(device) if device in devices else None


def _exchange(
    plan: Plan, dtype: str, bucket_bytes: int, is_ordered: bool = False
) -> tuple[Exchange, GroupTransport, Memory]:
    transport = GroupTransport(dist.group.WORLD, timeout_s=60, device=torch.device("cpu"))
    transport.is_ordered |= is_ordered
    rounds = schedule(plan, dist.get_rank(), bucket_bytes)
    memory = Memory()
    exchange = Exchange(rounds, bucket_bytes, DTYPES[dtype], transport, memory.allocate)
    return exchange, transport, memory


def _report(plan: Plan, transport: GroupTransport, memory: Memory) -> Result:
    device, totals = dist.get_rank(), plan.compute_totals()
    training = _rank_of(device, plan.devices.training)
    generation = _rank_of(device, plan.devices.generation)
    return {
        "wire": [transport.sent_bytes, transport.received_bytes],
        "planned": [
            0 if training is None else totals.sent[training],
            0 if generation is None else totals.received[generation],
        ],
        "allocated": memory.sizes,
    }


def colocated(
    spec: EngineSpec, servers: Servers, dtype: str = "float32", is_ordered: bool = False
) -> Result:
    """Two syncs out of an engine into each server, the second one with weights times -2.

    Adapters are not zero. `is_ordered` goes the way that NCCL needs.
    """
    engine = ranks.start_engine(spec)
    if spec.engine.lora.rank:
        lora_jobs.set_factors(engine)
    world = dist.get_world_size()
    runs = {}
    for name, (generation, hosts) in servers.items():
        mtp = engine.num_mtp_layers
        training, served = sides(engine.hf_config, spec.engine.layout, generation, mtp)
        devices = Devices.colocated(hosts, world, per_node=world)
        plan = TransferRequirements(training, served, DTYPES[dtype].itemsize).plan(devices)
        runs[name] = (plan, served, *_exchange(plan, dtype, BUCKET_BYTES, is_ordered))
    results: Result = {name: {"syncs": []} for name in servers}
    results["exported"] = []
    for _ in range(2):
        for name, (plan, served, exchange, transport, memory) in runs.items():
            transport.sent_bytes = transport.received_bytes = 0
            rank = _rank_of(dist.get_rank(), plan.devices.generation)
            weights = engine.get_local_weights()
            results[name]["syncs"].append(sync(exchange, memory, weights, served, rank))
            results[name] |= _report(plan, transport, memory)
        results["exported"].append(dict(engine.get_per_tensor_param()))
        with torch.no_grad():
            for tensor in (t for c in engine.chunks for t in (*c.parameters(), *c.buffers())):
                tensor.mul_(-2)
    return results


def disaggregated(
    path: Path,
    layout: Layout,
    servers: Servers,
    dtype: str = "float32",
    bucket_bytes: int = BUCKET_BYTES,
) -> Result:
    """The first ranks train, the ranks behind them generate, and there may be others."""
    _join()
    reader = CheckpointReader(path)
    results = {}
    for name, (generation, _) in servers.items():
        training, served = sides(reader.read_config(), layout, generation)
        worlds = training[0].world_size, served[0].world_size
        devices = Devices.disaggregated(*worlds, per_node=2)
        plan = TransferRequirements(training, served, DTYPES[dtype].itemsize).plan(devices)
        exchange, transport, memory = _exchange(plan, dtype, bucket_bytes)
        weights = LocalWeights({})
        trainer = _rank_of(dist.get_rank(), devices.training)
        if trainer is not None:
            weights.stored.update(filled(training, trainer, reader.read))
        rank = _rank_of(dist.get_rank(), devices.generation)
        arrived = sync(exchange, memory, weights, served, rank)
        results[name] = {"syncs": [arrived], **_report(plan, transport, memory)}
    return results


def random_model(
    config: Mapping[str, Any],
    layout: Layout,
    generation: GenerationLayout,
    bucket_bytes: int,
    is_ordered: bool,
) -> Result:
    """Return what a sync allocates for a model without a checkpoint, colocated on all ranks."""
    _join()
    training, served = sides(dict(config), layout, generation)
    world, rank = dist.get_world_size(), dist.get_rank()
    plan = TransferRequirements(training, served, 4).plan(
        Devices.colocated(tuple(range(world)), world, world)
    )
    exchange, transport, memory = _exchange(plan, "float32", bucket_bytes, is_ordered)
    stored = filled(training, rank, lambda block: torch.zeros(block.box.sizes))
    sync(exchange, memory, LocalWeights(stored), served, rank)
    return _report(plan, transport, memory)


def lost_peers(rank: int, store: str, answers: Any) -> None:
    """A process of two: rank 1 makes no move in the first exchange and dies in the second."""
    file = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=2)
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=60)) for _ in range(2)]
    transports = [
        GroupTransport(group, timeout_s=2, device=torch.device("cpu")) for group in groups
    ]
    if rank == 1:
        dist.barrier()  # the first exchange has failed
        os._exit(0)
    for number, transport in enumerate(transports):
        if number == 1:
            dist.barrier()
        try:
            _lonely(transport)
        except ReshardError as error:
            answers.put(str(error))
    answers.close()
    answers.join_thread()
    os._exit(0)  # nothing of this world can be taken down in good order


def _lonely(transport: GroupTransport) -> None:
    """Rank 0's side of an exchange in which it gets one row from rank 1."""
    config = tiny_dense()
    training, served = sides(config, Layout(pp=2), GenerationLayout())
    plan = TransferRequirements(training, served, 4).plan(Devices.colocated((0,), 2, 2))
    rounds = schedule(plan, 0, BUCKET_BYTES)
    memory = Memory()
    exchange = Exchange(rounds, BUCKET_BYTES, torch.float32, transport, memory.allocate)
    stored = filled(training, 0, lambda block: torch.zeros(block.box.sizes))
    sync(exchange, memory, LocalWeights(stored), served, 0)


def tiny_dense(num_layers: int = 2) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 32,
        "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    }  # fmt: skip
