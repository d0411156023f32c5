"""Push a version of the weights from the training ranks to the generation servers."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from mcore_rl.config.rules import get_loop
from mcore_rl.config.schema import RLConfig, RolloutConfig, WeightSyncConfig
from mcore_rl.controller.pending_call import PendingCall, Timeout, gather_results
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.inference.registry import load_server_class
from mcore_rl.parallel import rendezvous
from mcore_rl.parallel.rendezvous import RendezvousConnectionError, RendezvousEndpoint
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.rollout.server_pool import ServerPool
from mcore_rl.rollout.worker import RolloutWorker

_END_S = 5.0  # limit of the call that ends waits at the rendezvous


class ExportError(RuntimeError):
    """New weights could not be written for the servers. The actor has them."""


class WeightSync(Protocol):
    """A way to bring new weights to the servers."""

    def push(self, version: int) -> None:
        """Send the actor's weights; return when every server generates with this version.

        Raises:
            WorkerError, ConfigError: the first failure on either side.
        """


@dataclass(slots=True)
class TransportSync:
    """Sends each worker of every server its weights, by a WeightTransport between all ranks.

    The ranks connect anew when servers have joined or left.

    Args:
        in_flight: Keep running requests, which continue with the new weights. Otherwise none may
            run.
        recompute_cache: Recompute the KV cache of running requests with the new weights.
    """

    actor: WorkerGroup
    servers: ServerPool
    timeout: Timeout
    rollout: RolloutConfig
    settings: WeightSyncConfig
    in_flight: bool = False
    recompute_cache: bool = False
    _connected: int = -1  # ServerPool.membership when all ranks were connected
    _endpoint: RendezvousEndpoint | None = None  # of the last connect

    def push(self, version: int) -> None:
        self.servers.admit()
        while not (self.connect() and self._send(version)):
            self.servers.admit()
        self.servers.mark_updated(version)

    def connect(self) -> bool:
        """Connect the servers that are up, unless they are; return False if one has died."""
        membership = self.servers.membership
        if membership == self._connected:
            return True
        weight_format = load_server_class(self.rollout).features.weight_format
        assert weight_format is not None  # else weight_sync.method is full_export
        lists = self.servers.list_parameters()  # [] where the family has the rules
        if self.servers.membership != membership:  # the server that was asked has died
            return False
        layout = build_generation_layout(self.rollout, self.servers.num_up)
        endpoint, spec = self.actor.call(
            ModelWorker.open_weights, layout, self.settings, weight_format, lists
        )
        spec = replace(
            spec,
            drafts=bool(self.rollout.speculative.num_tokens),
            quantization=self.rollout.quantization,
        )
        actors = self.actor.submit(ModelWorker.connect_weights, endpoint, spec)

        def connect_server(server: WorkerGroup, index: int) -> PendingCall[list[None]]:
            # Workers of all servers, in a row, are the generation ranks.
            first_rank = index * self.rollout.num_workers
            return server.submit(RolloutWorker.connect_weights, endpoint, spec, first_rank)

        self._endpoint = endpoint
        self._connected = -1
        attempt = self.servers.attempt
        if not attempt(connect_server, [actors], self.timeout, self._end_waits):
            return False
        self._connected = membership
        return True

    def _send(self, version: int) -> bool:
        """Send a version to the servers that are connected; return False if one has died."""
        sending = self.actor.submit(ModelWorker.send_weights, version)

        def update_server(server: WorkerGroup, _: int) -> PendingCall[list[None]]:
            return server.submit(
                RolloutWorker.receive_weights, version, self.in_flight, self.recompute_cache
            )

        return self.servers.attempt(update_server, [sending], self.timeout, self._end_waits)

    def _end_waits(self) -> None:
        """End the waits of ranks for a server that has died, or leave them to their time limit."""
        assert self._endpoint is not None  # connect came first
        with contextlib.suppress(RendezvousConnectionError):
            rendezvous.end_waits(self._endpoint, "a server has died", _END_S)


@dataclass(frozen=True, slots=True)
class AdapterSync:
    """Sends a LoRA actor's adapters, which servers add to the model that they have loaded."""

    actor: WorkerGroup
    servers: ServerPool
    timeout: Timeout
    alpha: float

    def push(self, version: int) -> None:
        collecting = self.actor.submit(ModelWorker.collect_adapters)
        [contents] = gather_results([collecting], self.timeout)
        [content] = filter(None, contents)

        def load(server: WorkerGroup, _: int) -> PendingCall[list[None]]:
            return server.submit(RolloutWorker.load_adapters, content, self.alpha, version)

        self.servers.admit()
        while not self.servers.attempt(load, [], self.timeout):
            self.servers.admit()
        self.servers.mark_updated(version)


@dataclass(frozen=True, slots=True)
class CheckpointSync:
    """Writes a Hugging Face checkpoint that servers load.

    Slow for large models; works for every layout; the reference for tests of the transports.
    """

    actor: WorkerGroup
    servers: ServerPool
    timeout: Timeout
    folder: Path  # on a file system that all nodes share
    num_bytes: int
    in_flight: bool = False
    recompute_cache: bool = False

    def push(self, version: int) -> None:
        try:
            sending = self.actor.submit(ModelWorker.export, str(self.folder), self.num_bytes)
            refused = [reason for reason in gather_results([sending], self.timeout)[0] if reason]
            if refused:
                raise ExportError(f"weight_sync.method='full_export': {refused[0]}")
            self.servers.admit()
            while not self.servers.attempt(partial(self._load, version), [], self.timeout):
                self.servers.admit()
            self.servers.mark_updated(version)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _load(self, version: int, server: WorkerGroup, _: int) -> PendingCall[list[None]]:
        options = self.in_flight, self.recompute_cache
        return server.submit(RolloutWorker.load_checkpoint, str(self.folder), version, *options)


def connect(
    config: RLConfig, actor: WorkerGroup, servers: ServerPool, num_bytes: int
) -> WeightSync:
    """Connect training ranks and servers by the method of config.weight_sync.

    Args:
        actor: Workers of class ModelWorker.
        num_bytes: Size of the weights.

    Raises:
        ConfigError: there are more workers of servers than training ranks to share their devices
            with.
        WorkerError: a rank of either side failed; vLLM's layout of the model differs from the
            rules.
    """
    timeout = Timeout(config.weight_sync.timeout_s, "weight_sync.timeout_s")
    settings = replace(config.weight_sync, timeout_s=config.inner_timeout_s)
    is_in_flight = get_loop(config.trainer) == "fully_async"
    in_flight = is_in_flight, is_in_flight and config.trainer.asynchronous.recompute_cache
    if config.rollout.lora == "adapter":
        return AdapterSync(actor, servers, timeout, config.actor.lora.alpha)
    if settings.method == "full_export":
        # A job removes folders of this name at its end, in any case.
        folder = Path(config.output_dir).absolute() / ".weights.partial"
        return CheckpointSync(actor, servers, timeout, folder, num_bytes, *in_flight)
    sync = TransportSync(actor, servers, timeout, config.rollout, settings, *in_flight)
    sync.connect()  # servers that die in it are started again, and a push connects anew
    return sync


def build_generation_layout(rollout: RolloutConfig, num_servers: int) -> GenerationLayout:
    """Return the layout of all servers: with `ep` each splits its experts over its workers."""
    ep = rollout.num_workers if rollout.ep else 1
    return GenerationLayout(tp=rollout.tp, dp=num_servers * rollout.dp, ep=ep)
