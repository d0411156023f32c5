"""Which CheckpointEngine carries shards between a trainer and servers that share no device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from mcore_rl.models.base import HFConfig
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.weight_sync.checkpoint_engine import CheckpointEngine, RoutePlan
from mcore_rl.weight_sync.disk import DiskEngine, FolderEndpoint
from mcore_rl.weight_sync.group import GroupEngine
from mcore_rl.weight_sync.nixl import NixlEngine

Endpoint = RendezvousEndpoint | FolderEndpoint
# By weight_sync.transport.
_TRANSPORTS: Mapping[str, tuple[type[Endpoint], Any]] = MappingProxyType(
    {
        "process_group": (RendezvousEndpoint, GroupEngine),
        "nixl": (RendezvousEndpoint, NixlEngine),
        "disk": (FolderEndpoint, DiskEngine),
    }
)


def endpoint_of(plan: RoutePlan, fields: Mapping[str, Any]) -> Endpoint:
    """An endpoint from its fields, as dataclasses.asdict gives them."""
    endpoint, _ = _TRANSPORTS[plan.settings.transport]
    return endpoint(**fields)


def checkpoint_engine(
    endpoint: Endpoint, plan: RoutePlan, model: HFConfig, rank: int, device: torch.device
) -> CheckpointEngine:
    """One rank's end; may return when all ranks have made theirs.

    Raises:
        ConfigError: the layouts do not fit the model, buckets are too small, a folder that machines
            should share is not on this one, or the package of the transport is not installed.
        StreamError: not all ranks came in time.
    """
    _, engine = _TRANSPORTS[plan.settings.transport]
    made: CheckpointEngine = engine(endpoint, plan, model, rank, device)
    return made
