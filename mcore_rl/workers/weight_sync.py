"""Pushing a version of the weights from the trainer's ranks into the generation servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mcore_rl.config.schema import RLConfig, RolloutConfig, WeightSyncConfig
from mcore_rl.controller.pending import Limit, gathered
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.models.base import HFConfig
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.announced import Announced, check_announced
from mcore_rl.weight_sync.shards import Places, by_generation_rank, generation_side
from mcore_rl.weight_sync.stream import StreamEndpoint


class WeightSync(Protocol):
    def push(self, version: int) -> None:
        """Return when every server generates with this version.

        Waits for both sides together and raises what went wrong first, on either: WorkerError, or
        ConfigError, as `gathered` does.
        """


class ColocatedSync:
    """To each worker of every server its shards, from the training rank on the same device."""

    def __init__(
        self,
        actor: WorkerGroup,
        servers: WorkerGroup,
        layout: GenerationLayout,
        sites: Sequence[str],
        config: WeightSyncConfig,
        limit: Limit,
    ) -> None:
        """`sites`: where each worker of the servers is.

        Raises:
            ConfigError: there are more workers of servers than training ranks to share their
                devices with.
        """
        self._actor, self._servers, self._limit = actor, servers, limit
        training, hosts = zip(*actor.site(), strict=True)
        places = Places(training, tuple(sites), hosts.count(hosts[0]))
        endpoints = actor.open_shard_route(layout, places, config)
        self._endpoints = by_generation_rank(endpoints)

    def push(self, version: int) -> None:
        sending = self._actor.send_shards.submit(version)
        receiving = self._servers.receive_shards.submit(self._endpoints, version)
        gathered([sending, receiving], self._limit)


class DisaggregatedSync:
    """To each worker of every server its shards, by a CheckpointEngine of both sides."""

    def __init__(
        self,
        actor: WorkerGroup,
        servers: WorkerGroup,
        layout: GenerationLayout,
        config: WeightSyncConfig,
        limit: Limit,
        folder: Path,
    ) -> None:
        """Joins both sides. `folder` is for the files of weight_sync.transport="disk".

        Raises:
            ConfigError, WorkerError: as `gathered`.
        """
        self._actor, self._servers, self._limit = actor, servers, limit
        endpoint, plan = actor.open_checkpoint_engine(layout, config, folder)
        sides = (actor, servers)
        gathered([side.join_checkpoint_engine.submit(endpoint, plan) for side in sides], limit)

    def push(self, version: int) -> None:
        sending = self._actor.send_checkpoint.submit(version)
        receiving = self._servers.receive_checkpoint.submit(version)
        gathered([sending, receiving], self._limit)


class FullExportSync:
    """Every tensor in Hugging Face form to every worker of every server.

    The plain route: slow for large models, right for every layout, and the oracle of faster ones.
    """

    def __init__(
        self,
        actor: WorkerGroup,
        servers: WorkerGroup,
        rollout: RolloutConfig,
        config: WeightSyncConfig,
        limit: Limit,
    ) -> None:
        self._actor, self._servers, self._limit = actor, servers, limit
        self._endpoint: StreamEndpoint = actor.open_weight_stream(
            config.bind_address, rollout.num_servers * rollout.tp, config.timeout_s
        )

    def push(self, version: int) -> None:
        sending = self._actor.send_weights.submit(version)
        receiving = self._servers.update_weights.submit(self._endpoint, version)
        gathered([sending, receiving], self._limit)


def connect(
    config: RLConfig, model: HFConfig, actor: WorkerGroup, servers: WorkerGroup
) -> WeightSync:
    """The route that config.weight_sync names, made once between all ranks of both sides.

    `actor` and `servers` are worker groups of ModelWorker and RolloutWorker.

    Raises:
        ConfigError: vLLM lays the model out in another way than the rules say, or as ColocatedSync.
        WorkerError: a rank of either side failed.
    """
    rollout, limit = config.rollout, Limit(config.weight_sync.timeout_s, "weight_sync.timeout_s")
    settings = replace(config.weight_sync, timeout_s=config.inner_timeout_s)
    if settings.method == "full_export":
        return FullExportSync(actor, servers, rollout, settings, limit)
    layout = generation_layout(rollout)
    announced = _announced(servers, layout, model, config.model.dtype)
    if settings.method == "colocated":
        sites = [worker.site for worker in announced]
        return ColocatedSync(actor, servers, layout, sites, settings, limit)
    # The guard of a job removes what is called so, however the job ends.
    folder = Path(config.output_dir).absolute() / ".weights.partial"
    return DisaggregatedSync(actor, servers, layout, settings, limit, folder)


def _announced(
    servers: WorkerGroup, layout: GenerationLayout, model: HFConfig, dtype: str
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
