"""The inputs from which all ranks of both sides make the same transfer plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.models.base import HFConfig, family_of, model_sizes, padded_vocab_size
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.reshard.layout import GenerationLayout, GenerationRanks, TrainingRanks
from mcore_rl.reshard.placement import Devices, most_overlap
from mcore_rl.reshard.planner import Plan, TransferRequirements
from mcore_rl.reshard.tensor_groups import Side


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """With the model's config.json, all inputs of a transfer plan except where ranks run."""

    training: Layout
    num_mtp_layers: int
    generation: GenerationLayout
    dtype: str  # "bfloat16": in which weights are sent
    settings: WeightSyncConfig

    @property
    def num_training(self) -> int:
        return self.training.world_size

    @property
    def world_size(self) -> int:
        """Ranks of both sides: generation rank g is rank num_training + g."""
        return self.training.world_size + self.generation.world_size

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TransferSpec:
        return cls(
            Layout(**fields["training"]),
            fields["num_mtp_layers"],
            GenerationLayout(**fields["generation"]),
            fields["dtype"],
            WeightSyncConfig(**fields["settings"]),
        )


@dataclass(frozen=True, slots=True)
class Sites:
    """Where ranks run, as shared_memory.site_of names it."""

    training: tuple[str, ...]
    generation: tuple[str, ...]
    ranks_per_node: int  # training ranks of one host


def training_side(config: HFConfig, layout: Layout, num_mtp_layers: int) -> Side:
    """The training side of a plan, for Megatron. `config` is that of a CheckpointReader."""
    sizes = model_sizes(config)
    chunks = split_into_chunks(layout, sizes.num_layers, num_mtp_layers)
    weights = family_of(config).weights(config, padded_vocab_size(config, layout.tp))
    return TrainingRanks(Mesh(layout), chunks, sizes.num_experts), weights


def generation_side(config: HFConfig, layout: GenerationLayout) -> tuple[GenerationRanks, Side]:
    sizes = model_sizes(config)
    ranks = GenerationRanks(layout, sizes.num_layers, sizes.num_experts)
    return ranks, (ranks, family_of(config).vllm_weights(config))


def plan_transfer(
    spec: TransferSpec, config: HFConfig, itemsize: int, sites: Sites | None = None
) -> Plan:
    """With `sites`, each generation rank shares the device of a training rank of its site: of the
    one that has most of what it needs. Without, it has a device after those of all of them.

    Raises:
        ConfigError: the layouts do not fit the model, or some site has more generation ranks than
            training ranks.
    """
    training = training_side(config, spec.training, spec.num_mtp_layers)
    _, generation = generation_side(config, spec.generation)
    demand = TransferRequirements(training, generation, itemsize)
    if sites is None:
        # Which of them are close to each other is not known; those of one side are taken to be.
        num_training, num_generation = spec.num_training, spec.generation.world_size
        return demand.plan(Devices.disaggregated(num_training, num_generation, num_training))
    together = np.array(sites.generation)[:, None] == np.array(sites.training)
    hosts = most_overlap(demand.overlap(), allowed=together)
    return demand.plan(Devices.colocated(hosts, spec.num_training, sites.ranks_per_node))


def sites_of(found: Sequence[tuple[str, str]], num_training: int) -> Sites:
    """`found`: site and host of each rank, the training ranks first."""
    training, hosts = zip(*found[:num_training], strict=True)
    generation = tuple(site for site, _ in found[num_training:])
    return Sites(training, generation, hosts.count(hosts[0]))
