"""A WeightTransport over a process group of training ranks and vLLM workers.

The group is separate from those of Megatron and vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from mcore_rl.models.base import HFConfig
from mcore_rl.parallel.network import use_interface_of
from mcore_rl.parallel.rendezvous import WAITS_ENDED_KEY, RendezvousEndpoint
from mcore_rl.parallel.store import GlooDevice, GuardedGloo, RendezvousStore
from mcore_rl.reshard.executor import Bucket, LocalWeights
from mcore_rl.reshard.transport import Group, GroupTransport, Transport
from mcore_rl.weight_sync.connection import StreamError
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import ExchangeTransport, WeightUpdate
from mcore_rl.weight_sync.watched import watched

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupNCCL

c10d: Any = torch.distributed  # which says nothing of its groups' types
# For all ranks to connect to each other when all are there: a rank that dies meanwhile, before it
# has connected to another one, is not missed by that one in any other way.
_MESH_S = 15.0
_UPDATE_BYTES = 128  # of an update, as JSON


class ProcessGroupTransport(ExchangeTransport):
    """Over gloo or NCCL: device d of the plan is rank d of the group."""

    def __init__(
        self,
        spec: TransferSpec,
        endpoint: RendezvousEndpoint,
        model: HFConfig,
        rank: int,
        device: torch.device,
    ) -> None:
        """Returns when all ranks of both sides have joined."""
        super().__init__(spec, model, rank, device)
        timeout_s = spec.settings.timeout_s
        try:
            store = RendezvousStore(endpoint, rank, spec.world_size, timeout_s)
            self._store = store
            use_interface_of(store.own_address)
            store.barrier("here")  # ends when the rendezvous is told of a death
            mesh_s = timeout_s if device.type == "cuda" else min(_MESH_S, timeout_s)
            self._group = _joined(store, rank, spec.world_size, device, mesh_s)
            self._transport = GroupTransport(self._group, timeout_s, device)
            self._group.set_timeout(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise StreamError(f"rank {rank} of the weights' group: {error}") from error

    def close(self) -> None:
        if self._device.type == "cuda":  # NCCL's thread would go on with what is in flight
            self._group.abort()
        del self._transport, self._group  # gloo's connections end with it
        self._store.close()

    def _run(self, weights: LocalWeights, update: WeightUpdate) -> Iterator[Bucket]:
        buckets = super()._run(weights, update)
        return buckets if self._device.type == "cuda" else watched(buckets, self._is_lost)

    @contextmanager
    def _messages(self, update: WeightUpdate) -> Iterator[Transport]:
        self._agree(update)
        yield self._transport

    def _is_lost(self) -> bool:
        """Whether the rendezvous has been told that a rank is gone."""
        return bool(self._store.check([WAITS_ENDED_KEY]))

    def _agree(self, update: WeightUpdate) -> None:
        """Raises StreamError unless every rank is at the same update."""
        group = self._group  # whose end, in `close`, would wait for the work
        told = json.dumps(asdict(update)).encode().ljust(_UPDATE_BYTES)
        mine = torch.frombuffer(bytearray(told), dtype=torch.uint8).to(self._device)
        found = [torch.empty_like(mine) for _ in range(group.size())]
        try:
            group.allgather([found], [mine]).wait()
        except RuntimeError as error:
            raise StreamError(f"{update}, rank {self._rank}: {error}") from error
        for peer, tensor in enumerate(found):
            update.agree_with(peer, json.loads(bytes(tensor.tolist())))


def _joined(
    store: RendezvousStore, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> Group:
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        nccl: type[ProcessGroupNCCL] = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, world_size, options)
    own = GlooDevice(hostname=store.own_address)
    return GuardedGloo(store, rank, world_size, timeout, [own])
