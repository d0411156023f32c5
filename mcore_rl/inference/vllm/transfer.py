"""The trainer's shards as one of vLLM's weight transfer engines, under the name "mcore_rl".

Any vLLM server of this version can be updated, not only ours: one that is started with
`--weight-transfer-config '{"backend": "mcore_rl"}'` finds it by the plugin of this package
(pyproject.toml, vllm.general_plugins). vLLM's four phases are init (join all ranks), start, update
(take a version) and finish; their fields are those of the classes below.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import PeerError
from mcore_rl.inference.vllm.weights import ShardWriter, begin_reload, finish_reload, worker_layout
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.weight_sync.spec import TransferSpec, build_generation_side, check_worker_layout
from mcore_rl.weight_sync.transport import (
    DENSE,
    StreamError,
    WeightTransport,
    WeightUpdate,
    connect,
)


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    endpoint: dict[str, Any]  # fields of a RendezvousEndpoint
    spec: dict[str, Any]  # TransferSpec.to_dict
    first_rank: int  # generation rank of this server's first worker


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: int
    format: str = DENSE


class ShardTransferEngine(WeightTransferEngine[ConnectInfo, UpdateInfo]):
    """One worker's end."""

    init_info_cls = ConnectInfo
    update_info_cls = UpdateInfo

    _rank = 0  # generation rank
    _transport: WeightTransport | None = None

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Returns when all training ranks and all workers of servers are connected.

        May be called again, when training ranks or servers have come or gone.

        Raises ConfigError where vLLM lays this worker's parameters out in another way than the
        rules of the model's family, else as `connect`.
        """
        self.shutdown()
        spec = TransferSpec.parse(init_info.spec)
        config = CheckpointReader(self.model_config.model).read_config()
        parallel = self.parallel_config
        first_rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size
        self._rank = rank = first_rank + get_tp_group().rank_in_group
        ranks, (_, weights) = build_generation_side(config, spec.generation)
        check_worker_layout(worker_layout(self.model), ranks, weights, rank, spec.dtype)
        endpoint = RendezvousEndpoint(**init_info.endpoint)
        self._transport = connect(spec, endpoint, config, spec.num_training + rank, self.device)

    def start_weight_update(self) -> None:
        begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # done when it returns

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises StreamError, ReshardError or ValueError when a complete set did not come."""
        if self._transport is None:
            raise StreamError("no trainer has been joined: init_weight_transfer_engine comes first")
        update = WeightUpdate(update_info.version, update_info.format)
        writer = ShardWriter(self.model, self._rank)
        try:
            with contextlib.closing(self._transport.receive(update)) as arriving:
                for slices in arriving:
                    writer.write(slices)
        except PeerError:
            self.shutdown()  # what waits for this worker fails too, at once
            raise
        writer.finish()

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        finish_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
