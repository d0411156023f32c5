"""Which CheckpointEngine carries shards between a trainer and servers that share no device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from mcore_rl.models.base import HFConfig
from mcore_rl.weight_sync.checkpoint_engine import CheckpointEngine, RoutePlan
from mcore_rl.weight_sync.disk import DiskEngine, FolderEndpoint
from mcore_rl.weight_sync.group import GroupEndpoint, GroupEngine

Endpoint = GroupEndpoint | FolderEndpoint
_ENDPOINTS: Mapping[str, type[Endpoint]] = MappingProxyType(
    {"process_group": GroupEndpoint, "disk": FolderEndpoint}
)


def endpoint_of(plan: RoutePlan, fields: Mapping[str, Any]) -> Endpoint:
    """An endpoint from its fields, as dataclasses.asdict gives them."""
    return _ENDPOINTS[plan.settings.transport](**fields)


def checkpoint_engine(
    endpoint: Endpoint, plan: RoutePlan, model: HFConfig, rank: int, device: torch.device
) -> CheckpointEngine:
    """One rank's end; may return when all ranks have made theirs.

    Raises:
        ConfigError: the layouts do not fit the model, buckets are too small, or a folder that
            machines should share is not on this one.
        StreamError: not all ranks came in time.
    """
    if isinstance(endpoint, FolderEndpoint):
        return DiskEngine(endpoint, plan, model, rank, device)
    return GroupEngine(endpoint, plan, model, rank, device)
