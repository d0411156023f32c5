"""A WeightTransport over a process group of training ranks and vLLM workers.

The group is separate from those of Megatron and vLLM.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed

from mcore_rl.models.base import HFConfig
from mcore_rl.parallel.network import use_interface_of
from mcore_rl.parallel.rendezvous import WAITS_ENDED_KEY, RendezvousEndpoint
from mcore_rl.parallel.store import GlooDevice, GuardedGloo, RendezvousStore
from mcore_rl.reshard.executor import Bucket, Group, GroupTransport, LocalWeights, MessageTransport
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import (
    POLL_S,
    ExchangeTransport,
    IsLost,
    StreamError,
    WeightUpdate,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupNCCL

c10d: Any = torch.distributed  # its groups have no type stubs
# Timeout for all ranks to connect to each other: nothing else detects a rank that dies before it
# has connected to a peer.
_MESH_S = 15.0
_UPDATE_BYTES = 128  # of an update, as JSON
T = TypeVar("T")


class ProcessGroupTransport(ExchangeTransport):
    """A transport over gloo or NCCL: device d of the plan is rank d of the group."""

    def __init__(
        self,
        spec: TransferSpec,
        endpoint: RendezvousEndpoint,
        model: HFConfig,
        rank: int,
        device: torch.device,
    ) -> None:
        """Join the group; return when all ranks of both sides have joined."""
        super().__init__(spec, model, rank, device)
        timeout_s = spec.settings.timeout_s
        try:
            store = RendezvousStore(endpoint, rank, spec.world_size, timeout_s)
            self._store = store
            use_interface_of(store.own_address)
            store.barrier("here")  # fails when end_waits is called
            mesh_s = timeout_s if device.type == "cuda" else min(_MESH_S, timeout_s)
            self._group = _create_group(store, rank, spec.world_size, device, mesh_s)
            self._transport = GroupTransport(self._group, timeout_s, device)
            self._group.set_timeout(timedelta(seconds=timeout_s))  # no longer that of connecting
        except RuntimeError as error:
            raise StreamError(f"rank {rank} of the weights' group: {error}") from error

    def close(self) -> None:
        if self._device.type == "cuda":  # NCCL's thread would continue transfers in flight
            self._group.abort()
        del self._transport, self._group  # closes gloo's connections
        self._store.close()

    def _run(self, weights: LocalWeights, update: WeightUpdate) -> Iterator[Bucket]:
        buckets = super()._run(weights, update)
        return buckets if self._device.type == "cuda" else watch_peers(buckets, self._is_lost)

    @contextmanager
    def _open_messages(self, update: WeightUpdate) -> Iterator[MessageTransport]:
        self._check_update(update)
        yield self._transport

    def _is_lost(self) -> bool:
        """Return whether end_waits was called at the rendezvous."""
        return bool(self._store.check([WAITS_ENDED_KEY]))

    def _check_update(self, update: WeightUpdate) -> None:
        """Raise StreamError unless every rank is at the same update."""
        group = self._group  # keeps it alive: its end, in `close`, would wait for the work
        # A collective takes messages of one size; JSON ignores blanks at the end.
        encoded = json.dumps(asdict(update)).encode().ljust(_UPDATE_BYTES)
        sent = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(self._device)
        received = [torch.empty_like(sent) for _ in range(group.size())]
        try:
            group.allgather([received], [sent]).wait()
        except RuntimeError as error:
            raise StreamError(f"{update}, rank {self._rank}: {error}") from error
        for peer, tensor in enumerate(received):
            update.check_equal(peer, json.loads(bytes(tensor.tolist())))


def _create_group(
    store: RendezvousStore, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> Group:
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        nccl: type[ProcessGroupNCCL] = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, world_size, options)
    gloo = GlooDevice(hostname=store.own_address)
    return GuardedGloo(store, rank, world_size, timeout, [gloo])


def watch_peers(steps: Iterator[T], is_lost: IsLost) -> Iterator[T]:
    """Iterate over `steps` in a thread, step by step, until a peer is known to be dead.

    gloo sometimes misses that a connection was closed: of 40 exchanges in which a rank closed its
    connections in the first messages, 3 had a peer that waited for the whole timeout. Such a wait
    continues in the thread, with the memory of its message, until then.

    Args:
        steps: Iterator without None.

    Raises:
        StreamError: A peer is dead; or any error of `steps`.
    """
    requests: SimpleQueue[bool] = SimpleQueue()  # True: next step; False: end
    results: SimpleQueue[T | Exception | None] = SimpleQueue()
    thread = threading.Thread(target=_run_steps, args=(steps, requests, results), daemon=True)
    thread.start()
    is_waiting = False
    try:
        while True:
            requests.put(True)
            is_waiting = True
            result = _wait_for_step(results, is_lost)
            is_waiting = False
            if result is None:
                return
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        requests.put(False)
        if not is_waiting:  # so that nothing of the exchange remains
            thread.join()


def _wait_for_step(
    results: SimpleQueue[T | Exception | None], is_lost: IsLost
) -> T | Exception | None:
    while True:
        try:
            return results.get(timeout=POLL_S)
        except Empty:
            if is_lost():
                raise StreamError("a peer has died, or has left") from None


def _run_steps(
    steps: Iterator[T], requests: SimpleQueue[bool], results: SimpleQueue[T | Exception | None]
) -> None:
    while requests.get():
        try:
            results.put(next(steps, None))
        except Exception as error:  # noqa: BLE001 (watch_peers raises it)
            results.put(error)
            return
