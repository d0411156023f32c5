"""Layers and memory of each role on its ranks, from config.json and settings alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.config.resolve_models import ROLE, served_models
from mcore_rl.config.schema import EngineConfig, Layout, LoRAConfig, RLConfig, RolloutConfig
from mcore_rl.config.train_schema import RMConfig, TrainConfig
from mcore_rl.data.routed_experts import ExpertLayers
from mcore_rl.engine.lora_targets import adapted_linear
from mcore_rl.jobs.placement import (
    get_frozen_engines,
    get_frozen_paths,
    needs_critic,
    needs_reference,
)
from mcore_rl.models.base import (
    SEQUENCE,
    HFConfig,
    get_family,
    get_model_sizes,
    list_moe_layers,
    pad_vocab_size,
    read_config,
)
from mcore_rl.models.heads import build_value_config, map_model_weights, map_value_weights
from mcore_rl.parallel.mesh import Chunk, Mesh, split_into_chunks
from mcore_rl.reshard.layout import GenerationLayout, GenerationRanks, Ranks, TrainingRanks
from mcore_rl.reshard.rules import Shard, Weight
from mcore_rl.rollout.weight_updater import build_generation_layout

ITEMSIZES = {"float32": 4, "bfloat16": 2}
_FLOAT32 = 4  # bytes of a gradient, of a main parameter, of each of Adam's two moments


@dataclass(frozen=True, slots=True)
class Stage:
    """Ranks of a role with the same numbers of everything."""

    ranks: tuple[int, ...]  # world ranks of the role, or workers of its servers
    layers: str  # which decoder layers, and what is before and after them
    parameters: int  # of one rank, padding of the vocabulary included
    weight_bytes: int  # of one rank, as are the others
    gradient_bytes: int
    optimizer_bytes: int
    cache_bytes: int = 0  # key/value cache of a server's worker


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    task: str  # what it is there for
    layout: str  # axes above 1
    stages: tuple[Stage, ...]

    @property
    def num_ranks(self) -> int:
        return sum(len(stage.ranks) for stage in self.stages)


@dataclass(slots=True)
class _Held:
    """Elements on one rank."""

    parameters: int = 0
    wide: int = 0  # of them, those kept in float32 whatever the dtype: buffers, without gradients
    dense: int = 0  # trained, outside of experts
    expert: int = 0  # trained, of experts


def roles(config: RLConfig, model: HFConfig) -> list[Role]:
    """In the order in which they run; the warm start is over when the others begin."""
    found = []
    actor = config.actor
    plain = replace(actor, lora=LoRAConfig())
    if config.warm_start.num_steps:
        settings = config.warm_start
        warm = replace(plain, layout=settings.layout, optimizer=settings.optimizer)
        found.append(_trainer("warm_start", "supervised training", warm, config, model))
    found.append(_trainer("actor", "log-probs, updates", actor, config, model))
    if needs_reference(config):
        found.append(
            _trainer("reference", "log-probs for the KL", plain, config, model, trains=False)
        )
    if needs_critic(config):
        found.append(_trainer("critic", "values, updates", config.critic, config, model))
    for role, engine in get_frozen_engines(config).items():
        scored, task = read_config(get_frozen_paths(config)[role]), "log-probs to learn from"
        if role == "reward_model":
            scored, task = build_value_config(scored), "scores of responses"
        found.append(_trainer(role, task, engine, config, scored, trains=False))
    num = config.rollout.num_servers
    found.append(_servers("rollout", f"generation: {_counted(num)}", config.rollout, config, model))
    for name, served in served_models(config).items():
        task = f"frozen: {_counted(served.servers.num_servers)}"
        read = read_config(served.path) if served.path else model
        found.append(_servers(f"{ROLE}{name}", task, served.servers, config, read))
    return found


def expert_layers(config: RLConfig) -> ExpertLayers | None:
    """Of the actor, if it replays what servers have recorded; config.model.path has to be there."""
    if config.actor.moe.router_replay != "rollout":
        return None
    model = read_config(config.model.path)
    fields, mine = get_family(model).config_map(model), list_moe_layers(model)
    stages: list[list[int]] = [[] for _ in range(config.actor.layout.pp)]
    for chunk in split_into_chunks(config.actor.layout, fields["num_layers"]):
        stages[chunk.pp_rank] += [layer for layer in chunk.layers if layer in mine]
    return ExpertLayers(tuple(map(tuple, stages)), fields["moe_router_topk"])


def training_roles(config: TrainConfig, model: HFConfig, *, has_reference: bool) -> list[Role]:
    """Of a job that trains on examples; `has_reference` for a frozen model beside the trained."""
    if isinstance(config, RMConfig):
        model = build_value_config(model, SEQUENCE)
    found = [_trainer("model", "updates", config.engine, config, model)]
    if has_reference:
        plain = replace(config.engine, lora=LoRAConfig())
        found.append(
            _trainer("reference", "log-probs for the loss", plain, config, model, trains=False)
        )
    return found


def _trainer(
    name: str,
    task: str,
    engine: EngineConfig,
    config: RLConfig | TrainConfig,
    model: HFConfig,
    *,
    trains: bool = True,
) -> Role:
    """A role of Megatron's: a stage for each pipeline rank."""
    family, layout, sizes = get_family(model), engine.layout, get_model_sizes(model)
    num_mtp = family.num_mtp_layers(model) if engine.mtp_loss_coef else 0
    chunks = split_into_chunks(layout, sizes.num_layers, num_mtp)
    mesh = Mesh(layout)
    padded = pad_vocab_size(model, layout.tp)
    if name == "critic":
        whole = map_value_weights(build_value_config(model), padded)
    else:
        whole = map_model_weights(model, padded)
    weights = [weight for weight in whole if num_mtp or weight.stage != "mtp"]
    held = _held(TrainingRanks(mesh, chunks, sizes.num_experts), weights, engine.lora)
    itemsize = ITEMSIZES[config.model.dtype]
    stages = []
    for pp_rank in range(layout.pp):
        ranks = mesh.get_ranks(pp_rank=pp_rank)
        mine = held[ranks[0]]
        trained = mine.dense + mine.expert if trains else 0
        stages.append(
            Stage(
                ranks=tuple(ranks),
                layers=_layers([chunk for chunk in chunks if chunk.pp_rank == pp_rank]),
                parameters=mine.parameters,
                weight_bytes=mine.parameters * itemsize + mine.wide * (_FLOAT32 - itemsize),
                gradient_bytes=trained * _FLOAT32,
                optimizer_bytes=_optimizer_bytes(mine, engine, mesh, itemsize) if trains else 0,
            )
        )
    return Role(name, task, _axes(layout), tuple(stages))


def _optimizer_bytes(held: _Held, engine: EngineConfig, mesh: Mesh, itemsize: int) -> int:
    """Adam's two moments and, for weights in bfloat16, a copy in float32; all of it sharded
    over data-parallel ranks by the distributed optimizer."""
    dense, expert = held.dense, held.expert
    if engine.optimizer.distributed:
        dense = -(-dense // (mesh.sizes["dp"] * mesh.sizes["cp"]))
        expert = -(-expert // mesh.sizes["edp"])
    return (dense + expert) * _FLOAT32 * (2 if itemsize == _FLOAT32 else 3)


def _counted(num_servers: int) -> str:
    return f"{num_servers} vLLM server{'s' * (num_servers > 1)}"


def _servers(
    name: str, task: str, rollout: RolloutConfig, config: RLConfig, model: HFConfig
) -> Role:
    """vLLM's workers: all servers are equal."""
    sizes = get_model_sizes(model)
    layout = build_generation_layout(rollout, rollout.num_servers)
    held = _held(
        GenerationRanks(layout, sizes.num_layers, sizes.num_experts),
        get_family(model).vllm_weights(model),
        LoRAConfig(),
    )
    itemsize = ITEMSIZES[config.model.dtype]
    most = max(held, key=lambda rank: rank.parameters)  # experts may not divide evenly
    stage = Stage(
        ranks=tuple(range(layout.world_size)),
        layers=f"all {sizes.num_layers} layers",
        parameters=most.parameters,
        weight_bytes=most.parameters * itemsize + most.wide * (_FLOAT32 - itemsize),
        gradient_bytes=0,
        optimizer_bytes=0,
        cache_bytes=rollout.kv_cache_bytes,
    )
    server = GenerationLayout(tp=rollout.tp)
    return Role(name, task, _axes(server) + " ep" * rollout.ep, (stage,))


def _held(ranks: Ranks, weights: Sequence[Weight], lora: LoRAConfig) -> list[_Held]:
    """What each rank holds."""
    found = [_Held() for _ in range(ranks.world_size)]
    for weight in weights:
        holders = ranks.get_holders(weight)
        for index, members in enumerate(holders):
            shape = weight.rule.get_local_shape(Shard(index, len(holders)))
            size, trained = math.prod(shape), _trained(weight, shape, lora)
            for rank in members:
                mine = found[rank]
                mine.parameters += size + (trained if lora.rank else 0)
                if weight.float32:
                    mine.wide += size
                elif weight.expert is None:
                    mine.dense += trained
                else:
                    mine.expert += trained
    return found


def _trained(weight: Weight, shape: tuple[int, ...], lora: LoRAConfig) -> int:
    """Elements that get gradients: those of the weight, or of the two factors of its adapter."""
    if not lora.rank:
        return 0 if weight.float32 else math.prod(shape)
    return lora.rank * sum(shape) if adapted_linear(weight) in lora.targets else 0


def _layers(chunks: Sequence[Chunk]) -> str:
    return ", ".join(_parts(chunks))


def _parts(chunks: Sequence[Chunk]) -> Iterator[str]:
    for chunk in chunks:
        if chunk.has_embedding:
            yield "embedding"
        if len(chunk.layers):
            first, last = chunk.layers[0], chunk.layers[-1]
            yield f"layer {first}" if first == last else f"layers {first}-{last}"
        if chunk.has_head:
            yield "head"


def _axes(layout: Layout | GenerationLayout) -> str:
    """
    >>> _axes(Layout(tp=2, ep=2))
    'tp=2 ep=2'
    """
    sizes = asdict(layout)
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n not in (1, None)) or "tp=1"
