"""Plans between a training engine and servers, and a training rank's part on shared devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.models.base import HFConfig, family_of, model_sizes, padded_vocab_size
from mcore_rl.observability.garbage import uncollected
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.stages import split_into_chunks
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import Exchange, LocalWeights
from mcore_rl.reshard.layout import GenerationLayout, GenerationRanks, TrainingRanks
from mcore_rl.reshard.placement import Devices, most_overlap
from mcore_rl.reshard.planner import Demand, Plan
from mcore_rl.reshard.standing import Side
from mcore_rl.reshard.transport import Group, GroupTransport
from mcore_rl.weight_sync.checksums import is_checked
from mcore_rl.weight_sync.colocated import ShardEndpoint, ShardSender
from mcore_rl.weight_sync.shared_memory import shared_buckets


@dataclass(frozen=True, slots=True)
class Places:
    """Where ranks run, as shared_memory.site_of names it."""

    training: tuple[str, ...]
    generation: tuple[str, ...]
    ranks_per_node: int  # training ranks of one host


@uncollected()
def training_side(config: HFConfig, layout: Layout, num_mtp_layers: int) -> Side:
    """What an engine of Megatron is to a plan. `config` is that of a CheckpointReader."""
    sizes = model_sizes(config)
    chunks = split_into_chunks(layout, sizes.num_layers, num_mtp_layers)
    weights = family_of(config).weights(config, padded_vocab_size(config, layout.tp))
    return TrainingRanks(Mesh(layout), chunks, sizes.num_experts), weights


@uncollected()
def generation_side(config: HFConfig, layout: GenerationLayout) -> tuple[GenerationRanks, Side]:
    sizes = model_sizes(config)
    ranks = GenerationRanks(layout, sizes.num_layers, sizes.num_experts)
    return ranks, (ranks, family_of(config).vllm_weights(config))


@uncollected()
def plan_colocated(training: Side, generation: Side, places: Places, itemsize: int) -> Plan:
    """Each generation rank at the training rank of its place that holds most of what it needs.

    Raises:
        ConfigError: some place has more generation ranks than training ranks.
    """
    demand = Demand(training, generation, itemsize)
    together = np.array(places.generation)[:, None] == np.array(places.training)
    hosts = most_overlap(demand.overlap(), allowed=together)
    devices = Devices.colocated(hosts, len(places.training), places.ranks_per_node)
    return demand.plan(devices)


@uncollected()
def plan_disaggregated(training: Side, generation: Side, itemsize: int) -> Plan:
    """Generation ranks on devices of their own, behind those of the training ranks."""
    num_training = training[0].world_size
    # Which of them are close to each other is not known here; those of one side are taken to be.
    devices = Devices.disaggregated(num_training, generation[0].world_size, num_training)
    return Demand(training, generation, itemsize).plan(devices)


class ShardRoute:
    """All ranks of the training world make theirs together, and send together."""

    def __init__(
        self,
        plan: Plan,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        config: WeightSyncConfig,
    ) -> None:
        self._verify, self._device = config.verify, device
        half = config.bucket_bytes // 2  # as much again is for what leaves
        transport = GroupTransport(group, config.timeout_s)
        with uncollected():
            rounds = schedule(plan, transport.rank, half)
        self._exchange = Exchange(rounds, half, dtype, transport, self._allocate)
        self._sender: ShardSender | None = None
        if transport.rank in plan.devices.generation:
            generation_rank = plan.devices.generation.index(transport.rank)
            self._sender = ShardSender(generation_rank, config.timeout_s)

    @property
    def endpoint(self) -> ShardEndpoint | None:
        """Where the generation rank on this device gets its shards, if there is one."""
        return None if self._sender is None else self._sender.endpoint

    def send(self, weights: LocalWeights, version: int) -> None:
        """
        Raises:
            ReshardError, StreamError: another training rank, or the server, did not do its part.
        """
        memory = shared_buckets(self._device)
        buckets = self._exchange.run(
            weights, memory.allocate, lambda name: is_checked(self._verify, name, version)
        )
        if self._sender is not None:
            self._sender.send(buckets, memory, version)
        else:
            for _ in buckets:
                raise RuntimeError("a bucket arrived on a device without a generation rank")

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def by_generation_rank(endpoints: Sequence[ShardEndpoint | None]) -> list[ShardEndpoint]:
    found = [endpoint for endpoint in endpoints if endpoint is not None]
    return sorted(found, key=lambda endpoint: endpoint.generation_rank)
