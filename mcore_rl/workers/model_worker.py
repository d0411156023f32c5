"""One rank of a training engine as an actor: what a controller may ask of a model."""

from __future__ import annotations

import gc
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.checkpoint.hf_writer import room_for, write_checkpoint
from mcore_rl.config.schema import WeightSyncConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import EngineSpec, LossFunction, Metrics, create_engine
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.checkpoint_engine import CheckpointEngine, RoutePlan
from mcore_rl.weight_sync.colocated import ShardEndpoint
from mcore_rl.weight_sync.disaggregated import Endpoint, checkpoint_engine
from mcore_rl.weight_sync.disk import FolderEndpoint
from mcore_rl.weight_sync.shards import (
    Places,
    ShardRoute,
    generation_side,
    plan_colocated,
    training_side,
)
from mcore_rl.weight_sync.shared_memory import site_of
from mcore_rl.weight_sync.stream import StreamEndpoint, StreamSender


class ModelWorker:
    """`loss_function` is what `update` minimises; None for a model that only scores.

    `model_type` is "language_model" or "value_model".
    """

    def __init__(
        self,
        spec: EngineSpec,
        loss_function: LossFunction | None,
        model_type: str = "language_model",
    ) -> None:
        # Imported for what they register.
        import mcore_rl.engine.megatron.engine
        import mcore_rl.engine.megatron.value_engine  # noqa: F401
        from mcore_rl.engine.megatron.device import device_name

        self._spec = spec
        self._loss_function = loss_function
        self._engine: Any = create_engine(model_type, "megatron", device_name(), spec)
        self._sender: StreamSender | None = None
        self._route: ShardRoute | None = None
        self._rendezvous: RendezvousServer | None = None
        self._checkpoint_engine: CheckpointEngine | None = None

    def close(self) -> None:
        """Let go of the model and its memory: the process goes on with another one."""
        self._engine.close()
        gc.collect()  # modules and their hooks lead to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def initialize(self) -> None:
        self._engine.initialize()

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def compute_log_probs(self, batch: Batch, *, temperature: float) -> Batch | None:
        """Adds the columns log_probs and entropy of a language model, at a temperature above 0."""
        return self._engine.infer_batch(batch, temperature=temperature)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def compute_values(self, batch: Batch) -> Batch | None:
        """Adds the column values; of a value model."""
        return self._engine.infer_batch(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def update(self, batch: Batch, *, temperature: float = 1.0) -> Metrics:
        """One optimizer step on a mini-batch; its loss is that of scores at `temperature`.

        See BaseEngine.train_batch for what comes back.
        """
        if self._loss_function is None:
            raise RuntimeError("update on a model without a loss function")
        return self._engine.train_batch(batch, self._loss_function, temperature=temperature)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weight_stream(
        self, bind_address: str, num_receivers: int, timeout_s: float
    ) -> StreamEndpoint:
        """Where `send_weights` will serve its receivers; stays open for later versions."""
        self._sender = StreamSender(bind_address, num_receivers, timeout_s)
        return self._sender.endpoint

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int) -> None:
        """Stream the weights in Hugging Face form from rank 0, with the help of the others."""
        tensors = self._engine.get_per_tensor_param()
        if self._sender is not None:
            self._sender.send(tensors, version)
        else:
            for _ in tensors:  # drives this rank's part of the export
                raise RuntimeError("weights surfaced on a rank without an open stream")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def site(self) -> tuple[str, str]:
        """What shares memory with this rank, and its host."""
        return site_of(self._engine.device), socket.gethostname()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_shard_route(
        self, layout: GenerationLayout, places: Places, config: WeightSyncConfig
    ) -> ShardEndpoint | None:
        """Where `send_shards` will serve the generation rank on this device, if there is one."""
        engine, dtype = self._engine, getattr(torch, self._spec.model.dtype)
        training = training_side(engine.hf_config, engine.layout, engine.num_mtp_layers)
        _, generation = generation_side(engine.hf_config, layout)
        plan = plan_colocated(training, generation, places, dtype.itemsize)
        self._route = ShardRoute(plan, dist.group.WORLD, engine.device, dtype, config)
        return self._route.endpoint

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_checkpoint_engine(
        self, layout: GenerationLayout, config: WeightSyncConfig, folder: Path
    ) -> tuple[Endpoint, RoutePlan]:
        """What the ranks of both sides make their CheckpointEngine from; stays open."""
        engine, dtype = self._engine, self._spec.model.dtype
        plan = RoutePlan(engine.layout, engine.num_mtp_layers, layout, dtype, config)
        if config.transport == "disk":
            folder.mkdir()
            return FolderEndpoint(str(folder), config.timeout_s), plan
        self._rendezvous = RendezvousServer(config.bind_address)
        return self._rendezvous.endpoint, plan

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_checkpoint_engine(self, endpoint: Endpoint, plan: RoutePlan) -> None:
        """Returns when all training ranks and all workers of servers are in reach of each other."""
        engine = self._engine
        self._checkpoint_engine = checkpoint_engine(
            endpoint, plan, engine.hf_config, engine.world_rank, engine.device
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_checkpoint(self, version: int) -> None:
        """This rank's part of a version of the weights."""
        assert self._checkpoint_engine is not None  # join_checkpoint_engine came first
        self._checkpoint_engine.send_weights(self._engine.local_weights(), version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_shards(self, version: int) -> None:
        """Exchange shards with the other ranks and hand the generation rank's own to it."""
        assert self._route is not None  # open_shard_route came first
        self._route.send(self._engine.local_weights(), version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, path: str, num_bytes: int) -> str:
        """Write a Hugging Face checkpoint, with config and tokenizer of the one started from.

        Returns why it could not be written, for less room than `num_bytes` or another fault of the
        disk; "" when it stands there. A folder made on the way is for this user alone.
        """
        tensors = self._engine.get_per_tensor_param()
        if not self._engine.is_main_rank:
            for _ in tensors:
                raise RuntimeError("weights surfaced on a rank that does not write")
            return ""
        try:
            with room_for(Path(path), num_bytes):
                write_checkpoint(
                    path,
                    tensors,
                    reference=self._spec.model.path,
                    config_changes=self._engine.config_changes,
                )
        except OSError as error:
            for _ in tensors:  # the other ranks go on sending
                pass
            return f"{error.strerror}: {error.filename or path}"
        return ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        self._engine.save_checkpoint(Path(path))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        self._engine.load_checkpoint(Path(path))
