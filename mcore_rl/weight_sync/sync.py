"""Pushing a version of the weights from the trainer's ranks into the generation servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.config.schema import RLConfig, RolloutConfig, WeightSyncConfig
from mcore_rl.models.base import HFConfig
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.announced import Announced, check_announced
from mcore_rl.weight_sync.shards import Places, by_generation_rank, generation_side
from mcore_rl.weight_sync.stream import StreamEndpoint


class WeightSync(Protocol):
    def push(self, version: int) -> None:
        """Return when every server generates with this version; raise when one does not."""


class ColocatedSync:
    """To each worker of every server its shards, from the training rank on the same device."""

    def __init__(
        self,
        actor: Any,
        servers: Any,
        layout: GenerationLayout,
        sites: Sequence[str],
        config: WeightSyncConfig,
    ) -> None:
        """`sites`: where each worker of the servers is.

        Raises:
            ConfigError: there are more workers of servers than training ranks to share their
                devices with.
        """
        self._actor, self._servers, self._timeout_s = actor, servers, config.timeout_s
        training, hosts = zip(*actor.site(), strict=True)
        places = Places(training, tuple(sites), hosts.count(hosts[0]))
        endpoints = actor.open_shard_route(layout, places, config)
        self._endpoints = by_generation_rank(endpoints)

    def push(self, version: int) -> None:
        sending = self._actor.send_shards.submit(version)
        self._servers.receive_shards(self._endpoints, version)
        sending.result(self._timeout_s)


class DisaggregatedSync:
    """To each worker of every server its shards, by a CheckpointEngine of both sides."""

    def __init__(
        self,
        actor: Any,
        servers: Any,
        layout: GenerationLayout,
        config: WeightSyncConfig,
        folder: Path,
    ) -> None:
        """`folder` is for the files of weight_sync.transport="disk".

        Raises:
            StreamError: not all ranks of both sides came in time.
        """
        self._actor, self._servers, self._timeout_s = actor, servers, config.timeout_s
        endpoint, plan = actor.open_checkpoint_engine(layout, config, folder)
        joining = actor.join_checkpoint_engine.submit(endpoint, plan)
        servers.join_checkpoint_engine(endpoint, plan)
        joining.result(self._timeout_s)

    def push(self, version: int) -> None:
        sending = self._actor.send_checkpoint.submit(version)
        self._servers.receive_checkpoint(version)
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


def connect(config: RLConfig, model: HFConfig, actor: Any, servers: Any) -> WeightSync:
    """The route that config.weight_sync names, made once between all ranks of both sides.

    `actor` and `servers` are worker groups of ModelWorker and RolloutWorker.

    Raises:
        ConfigError: vLLM lays the model out in another way than the rules say, or as ColocatedSync.
    """
    settings, rollout = config.weight_sync, config.rollout
    if settings.method == "full_export":
        return FullExportSync(actor, servers, settings, rollout)
    layout = generation_layout(rollout)
    announced = _announced(servers, layout, model, config.model.dtype)
    if settings.method == "colocated":
        sites = [worker.site for worker in announced]
        return ColocatedSync(actor, servers, layout, sites, settings)
    # The guard of a job removes what is called so, however the job ends.
    folder = Path(config.output_dir).absolute() / ".weights.partial"
    return DisaggregatedSync(actor, servers, layout, settings, folder)


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
