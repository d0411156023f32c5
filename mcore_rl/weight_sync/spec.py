"""Inputs of the transfer plan, the same on all ranks of both sides; checks against vLLM's layout.

A plan relies on the rules for names, shapes and dtypes of vLLM's parameters. Each vLLM worker
compares them when it connects, so that a version with another layout is refused by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.checkpoint.fp8 import is_block_quantized
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.models.base import (
    HFConfig,
    drop_mtp_layers,
    get_family,
    get_model_sizes,
    get_vllm_weights,
    pad_vocab_size,
    use_family,
)
from mcore_rl.models.transformers_model import map_sharded_weights
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.reshard.float8 import add_scales, quantize_weights
from mcore_rl.reshard.layout import (
    FullRanks,
    GenerationLayout,
    GenerationRanks,
    ListedRanks,
    ShardedRanks,
    TrainingRanks,
)
from mcore_rl.reshard.planner import Devices, Plan, Side, TransferRequirements, assign_hosts
from mcore_rl.reshard.rules import (
    Block,
    Box,
    ListedRule,
    LogicalTensor,
    Replicated,
    Shard,
    Weight,
)

SAMPLED_VERSIONS = 16  # number of versions in which weight_sync.verify=sampled checks everything
# Parameters of a worker of a server: vLLM's, or all tensors of a Hugging Face checkpoint, whole.
WeightFormat = Literal["vllm", "huggingface"]
# Weights of a training rank: all tensors of a Hugging Face checkpoint, whole; parameters of
# Megatron, by the rules of the family; or rows of the parameters of a model of transformers.
ShardFormat = Literal["full", "megatron", "rows"]
Parameters = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype


@dataclass(frozen=True, slots=True)
class ListedParameter:
    """A parameter of a worker, or a row of a stacked one, and what it is made of."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    def to_list(self) -> list[Any]:
        """Convert to JSON values."""
        blocks = [[*b.tensor[:2], b.box.offsets, b.box.sizes, b.local_offset] for b in self.blocks]
        return [self.name, self.dtype, self.shape, blocks]

    @classmethod
    def parse(cls, values: Sequence[Any]) -> ListedParameter:
        """Build a parameter from the values of `to_list`."""
        name, dtype, shape, blocks = values
        tensors: dict[str, LogicalTensor] = {}  # one object each: plans compare them by identity
        return cls(
            name,
            dtype,
            tuple(shape),
            tuple(
                Block(
                    tensors.setdefault(tensor, LogicalTensor(tensor, tuple(full))),
                    Box(tuple(offsets), tuple(sizes)),
                    tuple(local),
                )
                for tensor, full, offsets, sizes, local in blocks
            ),
        )


# The parameters of each worker of a server, as ListedParameter.to_list.
WorkerLists = list[list[list[Any]]]


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """All inputs of a transfer plan, except the model's config.json and memory domains."""

    training: Layout
    num_mtp_layers: int
    generation: GenerationLayout
    dtype: str  # in which weights are sent: "bfloat16"
    settings: WeightSyncConfig
    _: KW_ONLY
    shard_format: ShardFormat = "megatron"  # of training ranks
    num_replicas: int = 1  # of the model, for "rows"
    weight_format: WeightFormat = "vllm"  # of generation ranks
    family: str = ""  # model.family
    drafts: bool = False  # generation ranks have vLLM's draft model, too
    # Parameters of the workers of a server, where no family has the rules of vLLM's.
    worker_lists: WorkerLists = field(default_factory=list)
    quantization: str | None = None  # rollout.quantization

    @property
    def num_training(self) -> int:
        return self.training.world_size

    @property
    def world_size(self) -> int:
        """Number of ranks of both sides: generation rank g is rank num_training + g."""
        return self.training.world_size + self.generation.world_size

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> TransferSpec:
        """Build a spec from the values of `to_dict`."""
        return cls(
            Layout(**fields["training"]),
            fields["num_mtp_layers"],
            GenerationLayout(**fields["generation"]),
            fields["dtype"],
            WeightSyncConfig(**fields["settings"]),
            shard_format=fields["shard_format"],
            num_replicas=fields["num_replicas"],
            weight_format=fields["weight_format"],
            family=fields["family"],
            drafts=fields["drafts"],
            worker_lists=fields["worker_lists"],
            quantization=fields["quantization"],
        )


def read_served_config(spec: TransferSpec, model_path: str | Path) -> HFConfig:
    """Return config.json of the model of a server, whose family this process uses from then on."""
    use_family(spec.family)
    return CheckpointReader(model_path).read_config()


@dataclass(frozen=True, slots=True)
class MemoryDomains:
    """Memory domains of all ranks: ranks of a domain can share memory on their devices."""

    training: tuple[str, ...]
    generation: tuple[str, ...]
    ranks_per_node: int  # training ranks per host


def build_training_side(
    config: HFConfig,
    layout: Layout,
    num_mtp_layers: int,
    shard_format: ShardFormat = "megatron",
    num_replicas: int = 1,
) -> Side:
    """Return ranks and rules of an engine; `config` is that of CheckpointReader.read_config."""
    if shard_format == "full":
        return FullRanks(layout.world_size), map_checkpoint_weights(config)
    if shard_format == "rows":
        ranks = ShardedRanks(layout.world_size, num_replicas, layout.ep)
        return ranks, map_sharded_weights(config, layout.ep)
    sizes = get_model_sizes(config)
    chunks = split_into_chunks(layout, sizes.num_layers, num_mtp_layers)
    weights = get_family(config).weights(config, pad_vocab_size(config, layout.tp))
    return TrainingRanks(Mesh(layout), chunks, sizes.num_experts), weights


def build_generation_side(
    config: HFConfig,
    layout: GenerationLayout,
    weight_format: WeightFormat = "vllm",
    *,
    drafts: bool = False,
    quantization: str | None = None,
) -> tuple[GenerationRanks, Side]:
    """Return the ranks of all servers, and ranks and rules as a side.

    Args:
        quantization: rollout.quantization.
    """
    sizes = get_model_sizes(config)
    ranks = GenerationRanks(layout, sizes.num_layers, sizes.num_experts)
    if weight_format == "huggingface":
        return ranks, (ranks, map_checkpoint_weights(config))
    weights = get_vllm_weights(config, drafts=drafts)
    if quantization is not None:
        weights = tuple(quantize_weights(weights, is_block_quantized))
    return ranks, (ranks, weights)


def add_training_scales(side: Side) -> Side:
    """Return the training side of servers in float8 blocks."""
    return side[0], tuple(add_scales(side[1], is_block_quantized))


def build_listed_side(layout: GenerationLayout, worker_lists: WorkerLists) -> Side:
    """Return ranks and rules of servers whose workers have listed their parameters."""
    ranks_of: dict[ListedParameter, list[int]] = {}
    for rank, parameters in enumerate(worker_lists):
        for values in parameters:
            ranks_of.setdefault(ListedParameter.parse(values), []).append(rank)
    return ListedRanks(layout, len(worker_lists)), tuple(
        Weight(
            parameter.name,
            ListedRule(parameter.shape, parameter.blocks, tuple(ranks)),
            float32=parameter.dtype == "float32",
        )
        for parameter, ranks in ranks_of.items()
    )


def map_checkpoint_weights(config: HFConfig) -> tuple[Weight, ...]:
    """Return the rules of a worker with all tensors of a Hugging Face checkpoint, by their names.

    Without layers of multi-token prediction, and without a tied head.
    """
    config = drop_mtp_layers(config)
    return tuple(
        Weight(
            tensor.name,
            Replicated(tensor),
            layer=weight.layer,
            stage=weight.stage,
            float32=weight.float32,
        )
        for weight in get_family(config).weights(config, pad_vocab_size(config, 1))
        if not weight.replica
        for tensor in weight.rule.tensors
    )


def plan_transfer(
    spec: TransferSpec, config: HFConfig, itemsize: int, domains: MemoryDomains | None = None
) -> Plan:
    """Plan a transfer.

    Args:
        itemsize: Bytes of an element as it is sent.
        domains: If given, each generation rank shares the device of a training rank of its domain,
            assigned so that most bytes stay local. Otherwise the generation ranks have separate
            devices.

    Raises:
        ConfigError: The layouts do not fit the model, a site has more generation ranks than
            training ranks, or workers that have listed their parameters leave a tensor out.
    """
    training = build_training_side(
        config, spec.training, spec.num_mtp_layers, spec.shard_format, spec.num_replicas
    )
    if spec.worker_lists:
        generation = build_listed_side(spec.generation, spec.worker_lists)
        _check_all_served(training[1], generation[1])
    else:
        _, generation = build_generation_side(
            config,
            spec.generation,
            spec.weight_format,
            drafts=spec.drafts,
            quantization=spec.quantization,
        )
    if spec.quantization is not None:
        training = add_training_scales(training)
    requirements = TransferRequirements(training, generation, itemsize)
    if domains is None:
        # Nodes are not known: all training ranks count as one node.
        num_training, num_generation = spec.num_training, spec.generation.world_size
        return requirements.plan(Devices.disaggregated(num_training, num_generation, num_training))
    allowed = np.array(domains.generation)[:, None] == np.array(domains.training)
    hosts = assign_hosts(requirements.compute_overlap(), allowed=allowed)
    return requirements.plan(Devices.colocated(hosts, spec.num_training, domains.ranks_per_node))


def _check_all_served(training: Sequence[Weight], generation: Sequence[Weight]) -> None:
    """Refuse a model of which vLLM's loader drops a tensor: it would serve another one."""
    served = {tensor.name for weight in generation for tensor in weight.rule.tensors}
    for weight in training:
        for tensor in weight.rule.tensors:
            if tensor.name not in served:
                raise ConfigError(
                    f"tensor {tensor.name}: vLLM's loader leaves it out, so a server would have "
                    "another model; allowed: a model of which vLLM loads every tensor"
                )


def group_memory_domains(locations: Sequence[tuple[str, str]], num_training: int) -> MemoryDomains:
    """Split (memory domain, host) of all ranks, the training ranks first, into both sides."""
    training, hosts = zip(*locations[:num_training], strict=True)
    generation = tuple(domain for domain, _ in locations[num_training:])
    return MemoryDomains(training, generation, hosts.count(hosts[0]))


def is_checked(verify: str, name: str, version: int) -> bool:
    """Return whether a parameter is verified in this version; the same on both sides.

    `sampled` verifies one in sixteen parameters, by a hash of the name, and other ones in the next
    version.

    >>> [version for version in range(32) if is_checked("sampled", "lm_head.weight", version)]
    [14, 30]
    """
    if verify == "sampled":
        return (zlib.crc32(name.encode()) + version) % SAMPLED_VERSIONS == 0
    return verify == "full"


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """Parameters of a vLLM worker."""

    parameters: Parameters
    experts: Mapping[str, tuple[int, ...]]  # experts in the rows of each stacked parameter


def check_worker_layout(
    layout: WorkerLayout, ranks: GenerationRanks, weights: Sequence[Weight], rank: int, dtype: str
) -> None:
    """Raise ConfigError for the first difference between a worker's layout and the rules."""
    tied = {weight.name for weight in weights if weight.replica and not ranks.get_holders(weight)}
    parameters, experts = compute_expected_layout(ranks, weights, rank, dtype)
    untied = {name: value for name, value in layout.parameters.items() if name not in tied}
    _check_values(f"vLLM worker {rank}", "shape and dtype", untied, parameters)
    rows = {name: rows for name, rows in layout.experts.items() if name in experts}
    if rows:  # vLLM has no list if every rank has all experts
        _check_values(f"vLLM worker {rank}", "experts", rows, experts)


def compute_expected_layout(
    ranks: GenerationRanks, weights: Sequence[Weight], rank: int, dtype: str
) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, tuple[int, ...]]]:
    """Return parameters and experts of a rank by the rules, for weights in `dtype`."""
    parameters: dict[str, tuple[tuple[int, ...], str]] = {}
    experts: dict[str, tuple[int, ...]] = {}
    for weight in weights:
        holders = ranks.get_holders(weight)
        shard = next((n for n, members in enumerate(holders) if rank in members), None)
        if shard is None:
            continue
        shape = weight.rule.get_local_shape(Shard(shard, len(holders)))
        name = ranks.get_local_name(weight)
        if weight.expert is not None:
            name = name.partition("[")[0]
            experts[name] = (*experts.get(name, ()), weight.expert)
            shape = (len(experts[name]), *shape)
        dtypes = {1: "float8_e4m3fn", 4: "float32", None: dtype}
        parameters[name] = shape, dtypes[weight.itemsize]
    return parameters, experts


def _check_values(
    who: str, what: str, actual: Mapping[str, object], expected: Mapping[str, object]
) -> None:
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise ConfigError(
                f"{who}: {what} of {name} are {actual.get(name, 'missing')}, but the rules of the "
                f"model's family say {expected.get(name, 'that it does not exist')}; "
                "weight_sync.method=full_export does without these rules"
            )
