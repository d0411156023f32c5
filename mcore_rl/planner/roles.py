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
from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.inputs import get_needs
from mcore_rl.algorithms.preference import PREFERENCE_LOSSES
from mcore_rl.checkpoint.peft import get_adapted_linear
from mcore_rl.config.rules_algorithm import build_teachers
from mcore_rl.config.rules_rollout import ROLE, build_models_with_servers
from mcore_rl.config.schema import (
    DPOConfig,
    EngineConfig,
    Layout,
    LoRAConfig,
    RLConfig,
    RMConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.engine.base import load_backend
from mcore_rl.inference.registry import load_server_class
from mcore_rl.models.base import (
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


# The models of a run, from its settings


def needs_reference_log_probs(config: RLConfig | TrainConfig) -> bool:
    """Return whether a job reads log-probs of a reference: a KL penalty, or the loss of dpo."""
    if isinstance(config, RLConfig):
        return bool(config.algorithm.kl_coef)
    if not isinstance(config, DPOConfig):
        return False
    return "reference_log_probs" in get_needs(PREFERENCE_LOSSES[config.loss])


def has_reference_model(config: RLConfig | TrainConfig) -> bool:
    """Return whether a job has a separate reference model.

    A LoRA model without its adapters is the reference.
    """
    engine = config.actor if isinstance(config, RLConfig) else config.engine
    return needs_reference_log_probs(config) and not engine.lora.rank


def needs_critic(config: RLConfig) -> bool:
    """Return whether a run has a value model: its advantage function reads values."""
    return "values" in get_needs(ADVANTAGES[config.algorithm.advantage])


def count_actor_steps(config: RLConfig) -> int:
    """Return the optimizer steps of the actor, at least one: none while only the critic trains."""
    skipped = config.critic.warmup_steps if needs_critic(config) else 0
    return max(config.trainer.num_steps - skipped, 1) * config.algorithm.num_mini_batches


def build_warm_engine(config: RLConfig) -> EngineConfig:
    """Return the settings of the actor's engine during the warm start, which trains no adapters."""
    warm = config.warm_start
    moe = replace(config.actor.moe, aux_loss_coef=warm.moe_aux_loss_coef, router_replay="off")
    return replace(
        config.actor,
        layout=warm.layout,
        optimizer=warm.optimizer,
        moe=moe,
        lora=LoRAConfig(),
        indexer_replay="off",
    )


def get_frozen_engines(config: RLConfig) -> dict[str, EngineConfig]:
    """Return the engine settings of the scoring roles: reward_model, teacher.NAME."""
    engines: dict[str, EngineConfig] = {}
    if config.reward_model.model_path:
        engines["reward_model"] = config.reward_model
    for name, teacher in build_teachers(config.teacher).items():
        engines[f"teacher.{name}"] = teacher.engine
    return engines


def get_frozen_paths(config: RLConfig) -> dict[str, str]:
    """Return the checkpoint of each scoring role; by default a teacher has the policy's."""
    paths = {}
    if config.reward_model.model_path:
        paths["reward_model"] = config.reward_model.model_path
    for name, teacher in build_teachers(config.teacher).items():
        paths[f"teacher.{name}"] = teacher.model_path or config.model.path
    return paths


# Their plans


def plan_roles(config: RLConfig, model: HFConfig) -> list[RolePlan]:
    """Return the roles in the order in which they run; the warm start ends before the rest starts.

    Args:
        model: config.json of the policy.
    """
    plans = []
    actor = config.actor
    plain = replace(actor, lora=LoRAConfig())
    if config.warm_start.num_steps:
        warm = build_warm_engine(config)
        plans.append(_plan_engine("warm_start", "supervised training", warm, config, model))
    plans.append(_plan_engine("actor", "log-probs, updates", actor, config, model))
    if has_reference_model(config):
        plans.append(
            _plan_engine("reference", "log-probs for the KL", plain, config, model, trains=False)
        )
    if needs_critic(config):
        plans.append(_plan_engine("critic", "values, updates", config.critic, config, model))
    for role, engine in get_frozen_engines(config).items():
        frozen, task = read_config(get_frozen_paths(config)[role]), "log-probs to learn from"
        if role == "reward_model":
            frozen, task = build_value_config(frozen), "scores of responses"
        plans.append(_plan_engine(role, task, engine, config, frozen, trains=False))
    separate = build_models_with_servers(config)
    names = ", ".join(f"{ROLE}{name}" for name in config.models if name not in separate)
    task = f"generation{names and f', {names}'}: {_format_servers(config.rollout)}"
    plans.append(_plan_servers("rollout", task, config.rollout, config, model))
    for name, served in separate.items():
        task = f"frozen: {_format_servers(served.servers)}"
        frozen = read_config(served.path) if served.path else model
        plans.append(_plan_servers(f"{ROLE}{name}", task, served.servers, config, frozen))
    return plans


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


def plan_supervised_roles(config: TrainConfig, model: HFConfig) -> list[RolePlan]:
    """Return the roles of a supervised job: the model, and a reference model if it has one."""
    if isinstance(config, RMConfig):
        model = build_value_config(model, SEQUENCE)
    plans = [_plan_engine("model", "updates", config.engine, config, model)]
    if has_reference_model(config):
        plain = replace(config.engine, lora=LoRAConfig())
        plans.append(
            _plan_engine("reference", "log-probs for the loss", plain, config, model, trains=False)
        )
    return plans


def _plan_engine(
    name: str,
    task: str,
    engine: EngineConfig,
    config: RLConfig | TrainConfig,
    model: HFConfig,
    *,
    trains: bool = True,
) -> RolePlan:
    """Plan a role with a training engine: a stage for each pipeline rank.

    How an engine with the format "full" shards the model is not known: sizes are without sharding.
    """
    family, layout, sizes = get_family(model), engine.layout, get_model_sizes(model)
    shard_format = load_backend(engine).shard_format
    if shard_format == "rows":
        return _plan_sharded_engine(name, task, engine, config, model, trains=trains)
    if shard_format == "full":
        layout, task = Layout(dp=layout.world_size), f"{task}; sizes without sharding"
    num_mtp = family.num_mtp_layers(model) if engine.mtp_loss_coef else 0
    chunks = split_into_chunks(layout, sizes.num_layers, num_mtp)
    mesh = Mesh(layout)
    padded = pad_vocab_size(model, layout.tp)
    all_weights = _map_weights(family, _format_config(model), padded, is_critic=name == "critic")
    weights = [weight for weight in all_weights if num_mtp or weight.stage != "mtp"]
    ranks_of_layout = TrainingRanks(mesh, chunks, sizes.num_experts)
    rank_counts = _count_elements(ranks_of_layout, weights, engine.lora)
    itemsize = ITEMSIZES[config.model.dtype]
    stages = []
    for pp_rank in range(layout.pp):
        ranks = mesh.get_ranks(pp_rank=pp_rank)
        counts = rank_counts[ranks[0]]
        trained = counts.dense + counts.expert if trains else 0
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
                optimizer_bytes=optimizer_bytes if trains else 0,
            )
        )
    return RolePlan(name, task, _format_axes(engine.layout), tuple(stages))


def _plan_sharded_engine(
    name: str,
    task: str,
    engine: EngineConfig,
    config: RLConfig | TrainConfig,
    model: HFConfig,
    *,
    trains: bool,
) -> RolePlan:
    """Plan a role with an engine that shards by rows: the fullest rank stands for all.

    Weights, gradients and Adam's moments of one that trains are float32.
    """
    layout, lora = engine.layout, engine.lora
    kind = build_value_config(model) if name == "critic" else model
    ranks = ShardedRanks(layout.world_size, engine.fsdp.num_replicas, layout.ep)
    parameters, trained = Counter[int](), Counter[int]()
    for weight in map_sharded_weights(kind, layout.ep):
        holders = ranks.get_holders(weight)
        for index, members in enumerate(holders):
            shape = weight.rule.get_local_shape(Shard(index, len(holders)))
            is_linear = len(shape) == 2 and weight.name.endswith("_proj.weight")
            is_linear &= not weight.name.startswith("model.visual.")
            adapter = lora.rank * sum(shape) * is_linear
            for rank in members:
                parameters[rank] += math.prod(shape) + adapter
                trained[rank] += adapter if lora.rank else math.prod(shape)
    most, most_trained = max(parameters.values()), max(trained.values()) if trains else 0
    itemsize = _FLOAT32 if trains else ITEMSIZES[config.model.dtype]
    stage = StagePlan(
        ranks=tuple(range(layout.world_size)),
        layers="rows of every layer",
        parameters=most,
        weight_bytes=most * itemsize,
        gradient_bytes=most_trained * _FLOAT32,
        optimizer_bytes=most_trained * 2 * _FLOAT32,
    )
    return RolePlan(name, task, _format_axes(layout), (stage,))


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


def _plan_servers(
    name: str, task: str, rollout: RolloutConfig, config: RLConfig, model: HFConfig
) -> RolePlan:
    """Plan a role with servers, which are all equal: one stage."""
    sizes = get_model_sizes(model)
    num_ranks = rollout.num_servers * rollout.num_workers
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
        ranks=tuple(range(num_ranks)),
        layers=f"all {sizes.num_layers} layers",
        parameters=largest.parameters,
        weight_bytes=_compute_weight_bytes(largest, ITEMSIZES[config.model.dtype]),
        gradient_bytes=0,
        optimizer_bytes=0,
        cache_bytes=server_class.get_kv_cache_bytes(rollout),
    )
    server = GenerationLayout(tp=rollout.tp, dp=rollout.dp)
    return RolePlan(name, task, _format_axes(server) + " ep" * rollout.ep, (stage,), True)


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


def _format_axes(layout: Layout | GenerationLayout) -> str:
    """
    >>> _format_axes(Layout(tp=2, ep=2))
    'tp=2 ep=2'
    """
    sizes = asdict(layout)
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n not in (1, None)) or "tp=1"
