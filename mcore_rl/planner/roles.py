"""Layers and memory of each role on its ranks, from config.json and settings alone.

Pure functions: no process group, no cluster, no file but config.json of scoring models.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.checkpoint.peft import get_adapted_linear
from mcore_rl.config.schema import EngineConfig, Layout, LoRAConfig, RolloutConfig
from mcore_rl.engine.base import load_backend
from mcore_rl.inference.kv_cache import CPU_BYTES
from mcore_rl.inference.registry import load_server_class
from mcore_rl.jobs.run_plan import CRITIC, Role, RunPlan, Servers
from mcore_rl.models.base import (
    CLASSIFICATION,
    SEQUENCE,
    Family,
    HFConfig,
    get_family,
    get_model_sizes,
    pad_vocab_size,
    read_config,
)
from mcore_rl.models.heads import build_value_config, map_model_weights, map_value_weights
from mcore_rl.models.transformers_model import map_sharded_weights
from mcore_rl.parallel.mesh import Chunk, Mesh, split_into_chunks
from mcore_rl.reshard.layout import GenerationLayout, Holders, Ranks, ShardedRanks, TrainingRanks
from mcore_rl.reshard.rules import Shard, Weight
from mcore_rl.rollout.weight_updater import build_generation_layout
from mcore_rl.weight_sync.spec import WeightFormat, build_generation_side

ITEMSIZES = {"float32": 4, "bfloat16": 2}
_FLOAT32 = 4  # bytes of a gradient, a main parameter, each of Adam's two moments


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Ranks of a role with equal sizes. All sizes are of one rank."""

    ranks: tuple[int, ...]  # world ranks of the role, or workers of its servers
    layers: str  # such as "embedding, layers 0-11"
    parameters: int  # with padding of the vocabulary
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    cache_bytes: int = 0  # KV cache of a server's worker


@dataclass(frozen=True, slots=True)
class RolePlan:
    """A role of a run on its ranks."""

    name: str
    task: str  # such as "log-probs, updates"
    layout: str  # axes above 1
    stages: tuple[StagePlan, ...]
    has_servers: bool = False

    @property
    def num_ranks(self) -> int:
        return sum(len(stage.ranks) for stage in self.stages)


@dataclass(slots=True)
class _ElementCounts:
    """Numbers of elements on one rank."""

    parameters: int = 0
    float32: int = 0  # parameters that are float32 in every dtype: buffers, without gradients
    float8: int = 0  # codes of servers with rollout.quantization
    dense: int = 0  # trained, outside of experts
    expert: int = 0  # trained, in experts

    def add(self, other: _ElementCounts) -> None:
        self.parameters += other.parameters
        self.float32 += other.float32
        self.float8 += other.float8
        self.dense += other.dense
        self.expert += other.expert


def plan_roles(plan: RunPlan, model: HFConfig, device_type: str = "cuda") -> list[RolePlan]:
    """Return the roles in the order in which they run, servers last.

    Args:
        model: config.json of the policy, or of the supervised model.
        device_type: "cuda" or "cpu", which decides the size of a server's KV cache by default.
    """
    roles = [_plan_engine(role, read_role_config(plan, role, model)) for role in plan.roles]
    for servers in plan.servers:
        policy = plan.servers[0].model.path
        served = model if servers.model.path == policy else read_config(servers.model.path)
        roles.append(_plan_servers(servers, served, device_type))
    return roles


def read_role_config(plan: RunPlan, role: Role, model: HFConfig) -> HFConfig:
    """Return config.json of what a role trains or scores with: with the head of a value model.

    Args:
        model: config.json of the policy, which may be planned without its folder.
    """
    first = plan.roles[0]  # the policy
    config = model if role.path == first.path else read_config(role.path)
    if role.model_type == "language_model":
        return config
    return build_value_config(config, CLASSIFICATION if role.name == CRITIC else SEQUENCE)


def fold_stages(stages: Sequence[StagePlan]) -> list[StagePlan]:
    """Merge stages whose sizes are equal; the first one's layers stand for all, with their number.

    >>> stage = StagePlan((0,), "layers 0-1", 9, 18, 36, 72)
    >>> fold_stages([stage, replace(stage, ranks=(1,), layers="layers 2-3")])[0].layers
    'layers 0-1, and 1 more like it'
    """
    groups: dict[tuple[int, ...], list[StagePlan]] = {}
    for stage in stages:
        sizes = (
            stage.parameters,
            stage.weight_bytes,
            stage.gradient_bytes,
            stage.optimizer_bytes,
            stage.cache_bytes,
        )
        groups.setdefault(sizes, []).append(stage)
    folded = []
    for group in groups.values():
        ranks = tuple(rank for stage in group for rank in stage.ranks)
        more = f", and {len(group) - 1} more like it" if len(group) > 1 else ""
        folded.append(replace(group[0], ranks=ranks, layers=group[0].layers + more))
    return folded


def _plan_engine(role: Role, model: HFConfig) -> RolePlan:
    """Plan a role with a training engine: a stage for each pipeline rank.

    How an engine with the format "full" shards the model is not known: sizes are without sharding.
    """
    engine, task = role.spec.engine, role.task
    family, layout, sizes = get_family(model), engine.layout, get_model_sizes(model)
    shard_format = load_backend(engine).shard_format
    if shard_format == "rows":
        return _plan_sharded_engine(role, model)
    if shard_format == "full":
        layout, task = Layout(dp=layout.world_size), f"{task}; sizes without sharding"
    num_mtp = family.num_mtp_layers(model) if engine.mtp_loss_coef else 0
    chunks = split_into_chunks(layout, sizes.num_layers, num_mtp)
    mesh = Mesh(layout)
    padded = pad_vocab_size(model, layout.tp)
    is_critic = role.model_type == "value_model"
    all_weights = _map_weights(family, _format_config(model), padded, is_critic=is_critic)
    weights = [weight for weight in all_weights if num_mtp or weight.stage != "mtp"]
    ranks_of_layout = TrainingRanks(mesh, chunks, sizes.num_experts)
    rank_counts = _count_elements(ranks_of_layout, weights, engine.lora)
    itemsize = ITEMSIZES[role.spec.model.dtype]
    stages = []
    for pp_rank in range(layout.pp):
        ranks = mesh.get_ranks(pp_rank=pp_rank)
        counts = rank_counts[ranks[0]]
        trained = counts.dense + counts.expert if role.is_trained else 0
        optimizer_bytes = _compute_optimizer_bytes(counts, engine, mesh, itemsize)
        stages.append(
            StagePlan(
                ranks=tuple(ranks),
                layers=", ".join(
                    part
                    for chunk in chunks
                    if chunk.pp_rank == pp_rank
                    for part in _describe_chunk(chunk)
                ),
                parameters=counts.parameters,
                weight_bytes=_compute_weight_bytes(counts, itemsize),
                gradient_bytes=trained * _FLOAT32,
                optimizer_bytes=optimizer_bytes if role.is_trained else 0,
            )
        )
    return RolePlan(role.name, task, format_axes(engine.layout), tuple(stages))


def _plan_sharded_engine(role: Role, model: HFConfig) -> RolePlan:
    """Plan a role with an engine that shards by rows: the fullest rank stands for all.

    Weights, gradients and Adam's moments of one that trains are float32.
    """
    engine = role.spec.engine
    layout, lora = engine.layout, engine.lora
    ranks = ShardedRanks(layout.world_size, engine.fsdp.num_replicas, layout.ep)
    parameters, trained = Counter[int](), Counter[int]()
    for weight in map_sharded_weights(model, layout.ep):
        holders = ranks.get_holders(weight)
        for index, members in enumerate(holders):
            shape = weight.rule.get_local_shape(Shard(index, len(holders)))
            is_linear = len(shape) == 2 and weight.name.endswith("_proj.weight")
            is_linear &= not weight.name.startswith("model.visual.")
            adapter = lora.rank * sum(shape) * is_linear
            for rank in members:
                parameters[rank] += math.prod(shape) + adapter
                trained[rank] += adapter if lora.rank else math.prod(shape)
    most, most_trained = max(parameters.values()), max(trained.values()) if role.is_trained else 0
    itemsize = _FLOAT32 if role.is_trained else ITEMSIZES[role.spec.model.dtype]
    stage = StagePlan(
        ranks=tuple(range(layout.world_size)),
        layers="rows of every layer",
        parameters=most,
        weight_bytes=most * itemsize,
        gradient_bytes=most_trained * _FLOAT32,
        optimizer_bytes=most_trained * 2 * _FLOAT32,
    )
    return RolePlan(role.name, role.task, format_axes(layout), (stage,))


def _compute_weight_bytes(counts: _ElementCounts, itemsize: int) -> int:
    other = counts.parameters - counts.float32 - counts.float8
    return other * itemsize + counts.float32 * _FLOAT32 + counts.float8


def _compute_optimizer_bytes(
    counts: _ElementCounts, engine: EngineConfig, mesh: Mesh, itemsize: int
) -> int:
    """Return the bytes of a rank's optimizer state.

    The distributed optimizer shards it over data-parallel ranks.
    """
    dense, expert = counts.dense, counts.expert
    if engine.optimizer.distributed:
        dense = -(-dense // (mesh.sizes["dp"] * mesh.sizes["cp"]))
        expert = -(-expert // mesh.sizes["edp"])
    return (dense + expert) * get_optimizer_itemsize(engine, itemsize)


def get_optimizer_itemsize(engine: EngineConfig, itemsize: int) -> int:
    """Return the bytes of a parameter's optimizer state.

    Adam has two moments and, for bfloat16 weights, float32 main weights. The precision-aware
    optimizer has moments in their own dtypes and, of a main weight, the lower 16 bits alone: the
    upper ones are the weight (Megatron-core, optimizer/distrib_optimizer.py:1008); not with float8
    products (optimizer/optimizer_config.py:404). On the host all is float32.

    Args:
        itemsize: Bytes of a weight.
    """
    has_main = itemsize < _FLOAT32
    fields = engine.megatron
    if engine.optimizer.cpu_offload or not fields.get("use_precision_aware_optimizer"):
        return _FLOAT32 * (2 + has_main)
    moments: int = sum(
        getattr(torch, str(fields.get(name, "float32")).removeprefix("torch.")).itemsize
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    )
    has_remainders = fields.get("store_param_remainders", True) and engine.fp8.recipe == "off"
    return moments + (2 if has_remainders else _FLOAT32) * has_main


def _format_servers(servers: RolloutConfig) -> str:
    name = load_server_class(servers).display_name or servers.backend.rpartition(":")[2]
    return f"{servers.num_servers} {name} server{'s' * (servers.num_servers > 1)}"


def count_cache_bytes(
    servers: Servers, model: HFConfig, device_type: str, room: int | None = None
) -> int:
    """Return the bytes of the KV cache of a worker; 0 if it is not known, as of a server at a URL.

    Args:
        room: What a GPU has left for a cache of the default size. None: any.
    """
    need = servers.count_cache_need(model, device_type)
    settings = need.fill_settings(servers.settings, CPU_BYTES if device_type == "cpu" else room)
    return load_server_class(settings).get_kv_cache_bytes(settings) or 0


def _plan_servers(servers: Servers, model: HFConfig, device_type: str) -> RolePlan:
    """Plan servers, which are all equal: one stage."""
    rollout, sizes = servers.settings, get_model_sizes(model)
    layout = build_generation_layout(rollout, 1)
    server_class = load_server_class(rollout)
    weight_format = server_class.features.weight_format or "huggingface"
    if get_family(model).vllm_weights is None:
        weight_format = "huggingface"  # all tensors on each worker, at most
    largest = _count_largest_worker(
        get_family(model),
        _format_config(model),
        layout,
        weight_format,
        drafts=bool(rollout.speculative.num_tokens),
        quantization=rollout.quantization,
    )
    stage = StagePlan(
        ranks=tuple(range(servers.num_workers)),
        layers=f"all {sizes.num_layers} layers",
        parameters=largest.parameters,
        weight_bytes=_compute_weight_bytes(largest, ITEMSIZES[servers.model.dtype]),
        gradient_bytes=0,
        optimizer_bytes=0,
        cache_bytes=count_cache_bytes(servers, model, device_type),
    )
    server = GenerationLayout(tp=rollout.tp, dp=rollout.dp)
    task = f"{servers.task}: {_format_servers(rollout)}"
    return RolePlan(servers.name, task, format_axes(server) + " ep" * rollout.ep, (stage,), True)


# A search plans one model hundreds of times, and a large one has 60,000 weights. Its config is text
# below, so that it can be a key of a cache; the family is no more than a part of the key.


def _format_config(model: HFConfig) -> str:
    return json.dumps(model, sort_keys=True)


@lru_cache(maxsize=4)
def _map_weights(
    _family: Family, model: str, padded_vocab: int, *, is_critic: bool
) -> tuple[Weight, ...]:
    """Return the rules of a trained model, or of a critic of its architecture."""
    config = json.loads(model)
    if is_critic:
        return map_value_weights(build_value_config(config), padded_vocab)
    return map_model_weights(config, padded_vocab)


@lru_cache(maxsize=16)
def _count_largest_worker(
    _family: Family,
    model: str,
    layout: GenerationLayout,
    weight_format: WeightFormat,
    *,
    drafts: bool,
    quantization: str | None,
) -> _ElementCounts:
    """Count the elements on the worker that has most: experts may not divide evenly."""
    ranks, (_, weights) = build_generation_side(
        json.loads(model), layout, weight_format, drafts=drafts, quantization=quantization
    )
    rank_counts = _count_elements(ranks, weights, LoRAConfig())
    return max(rank_counts, key=lambda counts: counts.parameters)


def _count_elements(
    ranks: Ranks, weights: Sequence[Weight], lora: LoRAConfig
) -> list[_ElementCounts]:
    """Count the elements on each rank."""
    # Thousands of weights have the same holders: the equal shards of these are added first.
    shard_counts: dict[int, tuple[Holders, _ElementCounts]] = {}  # by the identity of the holders
    for weight in weights:
        holders = ranks.get_holders(weight)
        if not holders:
            continue
        _, counts = shard_counts.setdefault(id(holders), (holders, _ElementCounts()))
        shape = weight.rule.get_local_shape(Shard(0, len(holders)))
        size, trained = math.prod(shape), _count_trained(weight, shape, lora)
        counts.parameters += size + (trained if lora.rank else 0)
        if weight.float32:
            counts.float32 += size
        elif weight.float8:
            counts.float8 += size
        elif weight.expert is None:
            counts.dense += trained
        else:
            counts.expert += trained
    rank_counts = [_ElementCounts() for _ in range(ranks.world_size)]
    for holders, counts in shard_counts.values():
        for rank in itertools.chain.from_iterable(holders):
            rank_counts[rank].add(counts)
    return rank_counts


def _count_trained(weight: Weight, shape: tuple[int, ...], lora: LoRAConfig) -> int:
    """Count elements with gradients: those of the weight, or of the factors of its adapter."""
    if not lora.rank:
        return 0 if weight.float32 else math.prod(shape)
    return lora.rank * sum(shape) if get_adapted_linear(weight) in lora.targets else 0


def _describe_chunk(chunk: Chunk) -> Iterator[str]:
    if chunk.has_embedding:
        yield "embedding"
    if len(chunk.layers):
        first, last = chunk.layers[0], chunk.layers[-1]
        yield f"layer {first}" if first == last else f"layers {first}-{last}"
    if chunk.has_head:
        yield "head"


def format_axes(layout: Layout | GenerationLayout) -> str:
    """
    >>> format_axes(Layout(tp=2, ep=2))
    'tp=2 ep=2'
    """
    sizes = asdict(layout)
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n not in (1, None)) or "tp=1"
