"""Pushing a version of the weights from the trainer's ranks into the generation servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from mcore_rl.config.schema import RolloutConfig, WeightSyncConfig
from mcore_rl.models.base import HFConfig
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.announced import Announced, check_announced
from mcore_rl.weight_sync.shards import Places, by_generation_rank, generation_side
from mcore_rl.weight_sync.stream import StreamEndpoint


class WeightSync(Protocol):
    def push(self, version: int) -> None:
        """Return when every server generates with this version; raise when one does not."""


class _ShardSync(ABC):
    """To each worker of every server the shards that it needs, and no others.

    `actor` and `servers` are worker groups of ModelWorker and RolloutWorker.

    Raises:
        ConfigError: vLLM lays the model out in another way than the rules say.
    """

    def __init__(
        self,
        actor: Any,
        servers: Any,
        config: WeightSyncConfig,
        rollout: RolloutConfig,
        model: HFConfig,
        dtype: str,
    ) -> None:
        self._actor, self._servers, self._timeout_s = actor, servers, config.timeout_s
        layout = generation_layout(rollout)
        self._connect(layout, _announced(servers, layout, model, dtype), config)

    @abstractmethod
    def _connect(
        self, layout: GenerationLayout, announced: list[Announced], config: WeightSyncConfig
    ) -> None:
        """Make the route, once, between all ranks of both sides."""


class ColocatedSync(_ShardSync):
    """To each worker of every server its shards, from the training rank on the same device.

    `actor` and `servers` are worker groups of ModelWorker and RolloutWorker.

    Raises:
        ConfigError: vLLM lays the model out in another way than the rules say, or there are more
            workers of servers than training ranks to share their devices with.
    """

    def _connect(
        self, layout: GenerationLayout, announced: list[Announced], config: WeightSyncConfig
    ) -> None:
        sites, hosts = zip(*self._actor.site(), strict=True)
        places = Places(sites, tuple(w.site for w in announced), hosts.count(hosts[0]))
        endpoints = self._actor.open_shard_route(layout, places, config)
        self._endpoints = by_generation_rank(endpoints)

    def push(self, version: int) -> None:
        sending = self._actor.send_shards.submit(version)
        self._servers.receive_shards(self._endpoints, version)
        sending.result(self._timeout_s)


class DisaggregatedSync(_ShardSync):
    """To each worker of every server its shards, over a process group of both sides.

    Raises:
        ConfigError: vLLM lays the model out in another way than the rules say.
    """

    def _connect(
        self, layout: GenerationLayout, announced: list[Announced], config: WeightSyncConfig
    ) -> None:
        endpoint, plan = self._actor.open_group(layout, config)
        joining = self._actor.join_group.submit(endpoint, plan)
        self._servers.join_group(endpoint, plan)
        joining.result(self._timeout_s)

    def push(self, version: int) -> None:
        sending = self._actor.send_to_group.submit(version)
        self._servers.receive_from_group(version)
        sending.result(self._timeout_s)


class FullExportSync:
    """Every tensor in Hugging Face form to every worker of every server.

    The plain route: slow for large models, right for every layout, and the oracle of faster ones.
    `actor` and `servers` are worker groups of ModelWorker and RolloutWorker.
    """

    def __init__(
        self, actor: Any, servers: Any, config: WeightSyncConfig, rollout: RolloutConfig
    ) -> None:
        self._actor, self._servers, self._timeout_s = actor, servers, config.timeout_s
        self._endpoint: StreamEndpoint = actor.open_weight_stream(
            config.bind_address, rollout.num_servers * rollout.tp, config.timeout_s
        )

    def push(self, version: int) -> None:
        sending = self._actor.send_weights.submit(version)
        self._servers.update_weights(self._endpoint, version)
        sending.result(self._timeout_s)


def _announced(
    servers: Any, layout: GenerationLayout, model: HFConfig, dtype: str
) -> list[Announced]:
    """What all workers say, after a comparison with the rules."""
    announced: list[Announced] = [w for server in servers.weight_layout() for w in server]
    ranks, (_, weights) = generation_side(model, layout)
    check_announced(announced, ranks, weights, dtype)
    return announced


def generation_layout(rollout: RolloutConfig) -> GenerationLayout:
    """Servers are engines side by side; with `ep` each deals its experts to its own workers."""
    return GenerationLayout(
        tp=rollout.tp, dp=rollout.num_servers, ep=rollout.tp if rollout.ep else 1
    )
