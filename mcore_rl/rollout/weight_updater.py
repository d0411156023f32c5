"""Pushing a version of the weights from the trainer's ranks into the generation servers."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from mcore_rl.config.schema import RLConfig, RolloutConfig, WeightSyncConfig
from mcore_rl.controller.pending import Limit, gathered
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.parallel import rendezvous
from mcore_rl.parallel.rendezvous import RendezvousConnectionError, RendezvousEndpoint
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.rollout.server_pool import ServerPool

_END_S = 5.0  # for the rendezvous to hear of a death


class ExportError(RuntimeError):
    """New weights could not be written for the servers; the actor has them."""


class WeightSync(Protocol):
    def push(self, version: int) -> None:
        """Return when every server generates with this version.

        Waits for both sides together and raises the first failure on either: WorkerError, or
        ConfigError, as `gathered` does.
        """


@dataclass(slots=True)
class TransportSync:
    """Sends each worker of every server its shards, by a WeightTransport of all ranks.

    The ranks connect anew when servers have come or gone. `in_flight`: servers keep the requests
    that they are answering, which go on with the new weights, and with `recompute_cache` on a KV
    cache of these. Otherwise none may run.
    """

    actor: WorkerGroup
    servers: ServerPool
    limit: Limit
    rollout: RolloutConfig
    settings: WeightSyncConfig
    in_flight: bool = False
    recompute_cache: bool = False
    _connected: int = -1  # which membership of the servers has connected
    _endpoint: RendezvousEndpoint | None = None  # where they met

    def push(self, version: int) -> None:
        self.servers.admit()
        while not (self.connect() and self._sent(version)):
            self.servers.admit()
        self.servers.updated(version)

    def connect(self) -> bool:
        """Whether all servers that are up are connected: none has died meanwhile."""
        membership = self.servers.membership
        if membership == self._connected:
            return True
        layout = generation_layout(self.rollout, self.servers.num_up)
        endpoint, spec = self.actor.open_weights(layout, self.settings)
        actors = self.actor.connect_weights.submit(endpoint, spec)

        def place_of(place: int) -> tuple[object, ...]:
            # The workers of all servers are the generation ranks in a row.
            return endpoint, spec, place * self.rollout.tp

        self._endpoint = endpoint
        self._connected = -1
        attempt = self.servers.attempt
        if not attempt("connect_weights", place_of, [actors], self.limit, self._end_waits):
            return False
        self._connected = membership
        return True

    def _sent(self, version: int) -> bool:
        sending = self.actor.send_weights.submit(version)
        kept = (True, self.recompute_cache) if self.in_flight else ()
        arguments = version, *kept
        attempt, method = self.servers.attempt, "receive_weights"
        return attempt(method, lambda _: arguments, [sending], self.limit, self._end_waits)

    def _end_waits(self) -> None:
        """Of ranks for a server that has died. If the driver does not reach them, their time-out
        ends them.
        """
        assert self._endpoint is not None  # connect came first
        with contextlib.suppress(RendezvousConnectionError):
            rendezvous.end_waits(self._endpoint, "a server has died", _END_S)


@dataclass(frozen=True, slots=True)
class CheckpointSync:
    """Writes a Hugging Face folder that servers load with vLLM's own reload.

    Slow for large models, works for every layout, and is the reference for tests of the transports.
    """

    actor: WorkerGroup
    servers: ServerPool
    limit: Limit
    folder: Path  # that all machines share
    num_bytes: int
    in_flight: bool = False
    recompute_cache: bool = False

    def push(self, version: int) -> None:
        try:
            sending = self.actor.export.submit(str(self.folder), self.num_bytes)
            refused = [reason for reason in gathered([sending], self.limit)[0] if reason]
            if refused:
                raise ExportError(f"weight_sync.method='full_export': {refused[0]}")
            kept = (True, self.recompute_cache) if self.in_flight else ()
            arguments = str(self.folder), version, *kept
            self.servers.admit()
            while not self.servers.attempt("load_checkpoint", lambda _: arguments, [], self.limit):
                self.servers.admit()
            self.servers.updated(version)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def connect(
    config: RLConfig, actor: WorkerGroup, servers: ServerPool, num_bytes: int
) -> WeightSync:
    """The connection that config.weight_sync names, made between all ranks of both sides.

    `actor` is a group of ModelWorker; `num_bytes` is what the weights take.

    Raises:
        ConfigError: there are more workers of servers than training ranks to share their devices
            with.
        WorkerError: a rank of either side failed; vLLM's layout of the model differs from the
            rules.
    """
    limit = Limit(config.weight_sync.timeout_s, "weight_sync.timeout_s")
    settings = replace(config.weight_sync, timeout_s=config.inner_timeout_s)
    mode, recompute_cache = config.trainer.mode, config.trainer.asynchronous.recompute_cache
    in_flight = mode == "fully_async", recompute_cache
    if settings.method == "full_export":
        # The scope of a job removes what is called so, however the job ends.
        folder = Path(config.output_dir).absolute() / ".weights.partial"
        return CheckpointSync(actor, servers, limit, folder, num_bytes, *in_flight)
    sync = TransportSync(actor, servers, limit, config.rollout, settings, *in_flight)
    sync.connect()  # servers that die of it are started again, and a push connects anew
    return sync


def generation_layout(rollout: RolloutConfig, num_servers: int) -> GenerationLayout:
    """Each server is one engine; with `ep` it splits its experts over its workers."""
    return GenerationLayout(tp=rollout.tp, dp=num_servers, ep=rollout.tp if rollout.ep else 1)
