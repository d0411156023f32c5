"""Pushing a version of the weights from the trainer's ranks into the generation servers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from mcore_rl.config.schema import RLConfig, RolloutConfig
from mcore_rl.controller.pending import Limit, gathered
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.reshard.layout import GenerationLayout


class ExportError(RuntimeError):
    """New weights could not be written for the servers; the actor has them."""


class WeightSync(Protocol):
    def push(self, version: int) -> None:
        """Return when every server generates with this version.

        Waits for both sides together and raises the first failure on either: WorkerError, or
        ConfigError, as `gathered` does.
        """


@dataclass(frozen=True, slots=True)
class TransportSync:
    """Sends each worker of every server its shards, by a WeightTransport of all ranks.

    `in_flight`: servers keep the requests that they are answering, which go on with the new
    weights, and with `recompute_cache` on a KV cache of these. Otherwise none may run.
    """

    actor: WorkerGroup
    servers: WorkerGroup
    limit: Limit
    in_flight: bool = False
    recompute_cache: bool = False

    def push(self, version: int) -> None:
        kept = self.in_flight, self.recompute_cache
        sending = self.actor.send_weights.submit(version)
        receiving = self.servers.receive_weights.submit(version, *kept)
        gathered([sending, receiving], self.limit)


@dataclass(frozen=True, slots=True)
class CheckpointSync:
    """Writes a Hugging Face folder that servers load with vLLM's own reload.

    Slow for large models, works for every layout, and is the reference for tests of the transports.
    """

    actor: WorkerGroup
    servers: WorkerGroup
    limit: Limit
    folder: Path  # that all machines share
    num_bytes: int

    def push(self, version: int) -> None:
        try:
            sending = self.actor.export.submit(str(self.folder), self.num_bytes)
            refused = [reason for reason in gathered([sending], self.limit)[0] if reason]
            if refused:
                raise ExportError(f"weight_sync.method='full_export': {refused[0]}")
            loading = self.servers.load_checkpoint.submit(str(self.folder), version)
            gathered([loading], self.limit)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def connect(
    config: RLConfig, actor: WorkerGroup, servers: WorkerGroup, num_bytes: int
) -> WeightSync:
    """The connection that config.weight_sync names, made once between all ranks of both sides.

    `actor` and `servers` are worker groups of ModelWorker and RolloutWorker; `num_bytes` is what
    the weights take.

    Raises:
        ConfigError: there are more workers of servers than training ranks to share their devices
            with.
        WorkerError: a rank of either side failed; vLLM's layout of the model differs from the
            rules.
    """
    limit = Limit(config.weight_sync.timeout_s, "weight_sync.timeout_s")
    settings = replace(config.weight_sync, timeout_s=config.inner_timeout_s)
    if settings.method == "full_export":
        # The scope of a job removes what is called so, however the job ends.
        folder = Path(config.output_dir).absolute() / ".weights.partial"
        return CheckpointSync(actor, servers, limit, folder, num_bytes)
    endpoint, spec = actor.open_weights(generation_layout(config.rollout), settings)
    sides = (actor, servers)
    gathered([side.connect_weights.submit(endpoint, spec) for side in sides], limit)
    in_flight = config.trainer.mode == "fully_async"
    recompute_cache = config.trainer.asynchronous.recompute_cache
    return TransportSync(actor, servers, limit, in_flight, recompute_cache)


def generation_layout(rollout: RolloutConfig) -> GenerationLayout:
    """Each server is one engine; with `ep` it splits its experts over its workers."""
    return GenerationLayout(
        tp=rollout.tp, dp=rollout.num_servers, ep=rollout.tp if rollout.ep else 1
    )
