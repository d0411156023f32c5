"""Shards between processes that share no device: what all transports of them have in common.

Training ranks and vLLM workers run the same exchange (reshard/executor.py), the ones to send and
the others to receive. Device d of the plan is training rank d, or a generation rank behind them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.models.base import HFConfig
from mcore_rl.observability.garbage import uncollected
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import Arrival, Bucket, Exchange, IsChecked, LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.reshard.transport import Transport
from mcore_rl.weight_sync.checksums import is_checked
from mcore_rl.weight_sync.shards import generation_side, plan_disaggregated, training_side


@dataclass(frozen=True, slots=True)
class RoutePlan:
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
    def from_dict(cls, fields: dict[str, Any]) -> RoutePlan:
        return cls(
            Layout(**fields["training"]),
            fields["num_mtp_layers"],
            GenerationLayout(**fields["generation"]),
            fields["dtype"],
            WeightSyncConfig(**fields["settings"]),
        )


class CheckpointEngine(ABC):
    """A rank's end of a route between a trainer and servers elsewhere.

    All ranks make theirs together, and send and receive together.
    """

    def __init__(self, plan: RoutePlan, model: HFConfig, rank: int, device: torch.device) -> None:
        """
        Raises:
            ConfigError: the layouts do not fit the model, or buckets are too small.
        """
        self._dtype: torch.dtype = getattr(torch, plan.dtype)
        self._half = plan.settings.bucket_bytes // 2  # as much again is for what leaves
        training = training_side(model, plan.training, plan.num_mtp_layers)
        _, generation = generation_side(model, plan.generation)
        reshard = plan_disaggregated(training, generation, self._dtype.itemsize)
        with uncollected():
            self._rounds = schedule(reshard, rank, self._half)
        self._verify, self._rank, self._device = plan.settings.verify, rank, device

    def send_weights(self, weights: LocalWeights, version: int) -> None:
        """A training rank's part of a version. Raises ReshardError, StreamError, ConfigError."""
        for _ in self._run(weights, version):
            raise RuntimeError("a bucket arrived on a training rank")

    def receive_weights(self, version: int) -> Generator[list[Arrival], None, None]:
        """A generation rank's: its boxes, a bucket at a time, to be copied before the next.

        Raises as `send_weights` does.
        """
        buckets = self._run(LocalWeights({}), version)
        try:
            for bucket in buckets:
                yield list(bucket)
        finally:
            for _ in buckets:  # a consumer that stops must not stop the others' exchanges
                continue

    def _run(self, weights: LocalWeights, version: int) -> Iterator[Bucket]:
        def checked(name: str) -> bool:
            return is_checked(self._verify, name, version)

        with self._transport(version, checked) as transport:
            exchange = Exchange(self._rounds, self._half, self._dtype, transport, self._allocate)
            yield from exchange.run(weights, self._allocate, checked)

    @abstractmethod
    def _transport(self, version: int, checked: IsChecked) -> AbstractContextManager[Transport]:
        """What carries the messages of a version."""

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
