"""Shards between processes that share no device: training ranks and vLLM workers in one group.

Both run the same exchange (reshard/executor.py), the ones to send and the others to receive. The
group is one of its own beside those of Megatron and vLLM. Its ranks meet in a store on training
rank 0, under keys that begin with a secret token.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.models.base import HFConfig
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import Arrival, Bucket, Exchange, LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.reshard.transport import Group, GroupTransport
from mcore_rl.weight_sync.checksums import is_checked
from mcore_rl.weight_sync.connection import StreamError
from mcore_rl.weight_sync.shards import generation_side, plan_disaggregated, training_side

c10d: Any = torch.distributed  # whose stores and groups have no type stubs


class CheckpointEngine(Protocol):
    """A rank's end of a route between a trainer and servers elsewhere; all ranks act together."""

    def send_weights(self, weights: LocalWeights, version: int) -> None:
        """A training rank's part of a version."""
        ...

    def receive_weights(self, version: int) -> Generator[list[Arrival], None, None]:
        """A generation rank's: its boxes, a bucket at a time, to be copied before the next."""
        ...


@dataclass(frozen=True, slots=True)
class GroupEndpoint:
    """Where the ranks of a group meet; plain fields, so that it crosses any process boundary."""

    host: str
    port: int
    token: str = field(repr=False)  # who knows it may join: keep it out of logs
    timeout_s: float


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What every rank makes the same plan from, with the model's config."""

    training: Layout
    num_mtp_layers: int
    generation: GenerationLayout
    dtype: str  # "bfloat16": of weights on their way
    settings: WeightSyncConfig

    @property
    def world_size(self) -> int:
        return self.training.world_size + self.generation.world_size

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> GroupPlan:
        return cls(
            Layout(**fields["training"]),
            fields["num_mtp_layers"],
            GenerationLayout(**fields["generation"]),
            fields["dtype"],
            WeightSyncConfig(**fields["settings"]),
        )


class MeetingPoint:
    """The store that ranks meet in. It stays while the group lives."""

    def __init__(self, bind_address: str, token: str, timeout_s: float) -> None:
        listener = socket.create_server((bind_address, 0))
        host, port = listener.getsockname()[:2]
        self._store = c10d.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
        self.endpoint = GroupEndpoint(host, port, token, timeout_s)


class GroupEngine:
    """A CheckpointEngine over gloo or NCCL: device d of the plan is rank d of the group."""

    def __init__(
        self,
        endpoint: GroupEndpoint,
        plan: GroupPlan,
        model: HFConfig,
        rank: int,
        device: torch.device,
    ) -> None:
        """Returns when all ranks of both sides have joined.

        Raises:
            ConfigError: the layouts do not fit the model, or buckets are too small.
            StreamError: not all ranks came in time.
        """
        settings, dtype = plan.settings, getattr(torch, plan.dtype)
        training = training_side(model, plan.training, plan.num_mtp_layers)
        _, generation = generation_side(model, plan.generation)
        rounds = schedule(
            plan_disaggregated(training, generation, dtype.itemsize),
            rank,
            half := settings.bucket_bytes // 2,  # as much again is for what leaves
        )
        try:
            self._group = _joined(endpoint, rank, plan.world_size, device)
            transport = GroupTransport(self._group, settings.timeout_s)
        except RuntimeError as error:
            raise StreamError(f"rank {rank} of the weights' group: {error}") from error
        self._verify, self._device, self._rank = settings.verify, device, rank
        self._exchange = Exchange(rounds, half, dtype, transport, self._allocate)

    def send_weights(self, weights: LocalWeights, version: int) -> None:
        for _ in self._run(weights, version):
            raise RuntimeError("a bucket arrived on a training rank")

    def receive_weights(self, version: int) -> Generator[list[Arrival], None, None]:
        buckets = self._run(LocalWeights({}), version)
        try:
            for bucket in buckets:
                yield list(bucket)
        finally:
            for _ in buckets:  # a consumer that stops must not stop the others' exchanges
                continue

    def _run(self, weights: LocalWeights, version: int) -> Iterator[Bucket]:
        self._agree(version)
        yield from self._exchange.run(
            weights, self._allocate, lambda name: is_checked(self._verify, name, version)
        )

    def _agree(self, version: int) -> None:
        """Raises StreamError unless every rank is at the same version."""
        mine = torch.tensor([version], dtype=torch.int64, device=self._device)
        found = [torch.empty_like(mine) for _ in range(self._group.size())]
        try:
            self._group.allgather([found], [mine]).wait()
        except RuntimeError as error:
            raise StreamError(f"version {version}, rank {self._rank}: {error}") from error
        versions = [int(tensor) for tensor in found]
        if len(set(versions)) > 1:
            raise StreamError(f"ranks of the weights' group are at versions {versions}")

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _joined(endpoint: GroupEndpoint, rank: int, world_size: int, device: torch.device) -> Group:
    timeout = timedelta(seconds=endpoint.timeout_s)
    address = (endpoint.host, endpoint.port)
    store = c10d.TCPStore(*address, is_master=False, timeout=timeout)
    keys = c10d.PrefixStore(endpoint.token, store)
    if device.type == "cuda":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupNCCL(keys, rank, world_size, options)
    with closing(socket.create_connection(address, endpoint.timeout_s)) as probe:
        own_address = probe.getsockname()[0]  # by which the others can reach this process
    settings = c10d.ProcessGroupGloo._Options()
    settings._devices = [c10d.ProcessGroupGloo.create_device(hostname=own_address)]
    settings._timeout = timeout
    return c10d.ProcessGroupGloo(keys, rank, world_size, settings)
