"""Pushing a version of the weights from the trainer's ranks into the generation servers."""

from __future__ import annotations

from typing import Any, Protocol

from mcore_rl.config.schema import RolloutConfig, WeightSyncConfig
from mcore_rl.weight_sync.stream import StreamEndpoint


class WeightSync(Protocol):
    def push(self, version: int) -> None:
        """Return when every server generates with this version; raise when one does not."""


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
