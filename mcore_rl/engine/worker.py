"""One rank of a training engine as an actor: the methods that a controller calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_rl.checkpoint.hf_writer import room_for, write_checkpoint
from mcore_rl.checkpoint.peft import FOLDER, Factors, write_adapters
from mcore_rl.config.errors import PeerError
from mcore_rl.config.schema import WeightSyncConfig
from mcore_rl.controller.call_parts import CallPart, Results
from mcore_rl.controller.dispatch import ANY_COLUMNS, Dispatch, DispatchMode, register
from mcore_rl.data.batch import Batch
from mcore_rl.data.examples import build_scoring_batch
from mcore_rl.data.routed_experts import EXPERTS, format_layers, select_stage_experts
from mcore_rl.engine.base import (
    EngineSpec,
    LossFunction,
    MemoryReport,
    Metrics,
    PendingSave,
    Place,
    create_engine,
)
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import WeightTransport, WeightUpdate, connect

# Columns that a pass over samples reads, and those that it may add.
_SCORED = ("prompt_ids", "response_ids")
_SCORES = ("log_probs", "entropy", "sum_pi_squared", "routed_experts", "top_ids", "top_log_probs")


def _join_scores(parts: Sequence[CallPart], results: Results) -> tuple[Any, Metrics, Metrics]:
    """Join the scores of (scores, gaps, metrics); every rank reports the numbers of all of them."""
    scores = {rank: result and result[0] for rank, result in results.items()}
    assert parts[0].output_rank is not None  # each part has one
    _, gaps, metrics = results[parts[0].output_rank]
    return Dispatch.MEGATRON_COMPUTE.gather(parts, scores), gaps, metrics


_SCORED_STEP = DispatchMode(Dispatch.MEGATRON_COMPUTE.scatter, _join_scores)


class ModelWorker:
    """`loss_function` is what `update` minimises; None for a model that only scores.

    `model_type` is "language_model", "value_model" or "reward_model".
    """

    def __init__(
        self,
        spec: EngineSpec,
        loss_function: LossFunction | None,
        model_type: str = "language_model",
    ) -> None:
        self._spec = spec
        self._loss_function = loss_function
        self._model_type = model_type
        self._engine = create_engine(model_type, spec)
        self._rendezvous: RendezvousServer | None = None
        self._transport: WeightTransport | None = None
        self._saving: PendingSave | None = None

    def close(self) -> None:
        """Free the model and its memory: the process continues with another one."""
        self._disconnect()
        self._engine.close()
        gc.collect()  # modules and their hooks lead to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def initialize(self) -> None:
        self._engine.initialize()

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=(*_SCORED, EXPERTS), writes=_SCORES)
    def compute_log_probs(
        self, batch: Batch, *, temperature: float, replay: bool = True
    ) -> Batch | None:
        """Adds the columns log_probs and entropy of a language model, at a temperature above 0.

        Without `replay` routers choose, whatever actor.moe.router_replay says.
        """
        if not (replay and self._replays_rollout):
            return self._engine.infer_batch(batch, temperature=temperature, replay=replay)
        scored = self._engine.infer_batch(self._with_experts(batch), temperature=temperature)
        return None if scored is None else scored.drop_columns(EXPERTS)

    @property
    def _replays_rollout(self) -> bool:
        return self._spec.engine.moe.router_replay == "rollout"

    @property
    def part(self) -> str:
        """Of the experts that servers have recorded this rank reads those of its layers."""
        return format_layers(self._engine.expert_layers) if self._replays_rollout else ""

    def _with_experts(self, batch: Batch) -> Batch:
        """With those of this rank's layers, if it replays them."""
        if not self._replays_rollout:
            return batch
        return select_stage_experts(batch, self._engine.expert_layers)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=_SCORED, writes=_SCORES)
    def compute_reference_log_probs(self, batch: Batch, *, temperature: float) -> Batch | None:
        """The same for the base model of a LoRA actor: the actor without its adapters."""
        return self._engine.infer_batch(batch, temperature=temperature, adapters=False)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=_SCORED, writes=("values",))
    def compute_values(self, batch: Batch) -> Batch | None:
        """Adds the column values of a value or reward model."""
        return self._engine.infer_batch(batch)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=_SCORED, writes=("scores",))
    def compute_scores(self, batch: Batch) -> Batch | None:
        """Adds the column scores of a reward model: [samples], at the last token of each."""
        scored = self._engine.infer_batch(
            build_scoring_batch(batch.select("prompt_ids", "response_ids"))
        )
        if scored is None:
            return None
        return batch.with_columns(scores=scored.jagged("values").values.astype(np.float32))

    @register(dispatch_mode=Dispatch.RANK_ZERO, writes=ANY_COLUMNS)
    def apply(self, function: Callable[..., Any], batch: Batch, *args: object) -> Any:
        """`function(batch, *args)`: see near_data.py. The engine has no part in it."""
        return function(batch, *args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(
        self, place: Place, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> MemoryReport:
        """See BaseEngine.to; returns the memory report of each rank."""
        self._engine.to(place, model=model, optimizer=optimizer, grad=grad)
        return self._engine.memory_report()

    @register(dispatch_mode=Dispatch.MINI_BATCHES)
    def update(
        self, batch: Batch, *, sizes: Sequence[int] | None = None, temperature: float = 1.0
    ) -> list[Metrics]:
        """An optimizer step on each mini-batch; its loss is that of scores at `temperature`.

        A mini-batch is as many consecutive rows as `sizes` says; all rows, where it is None. It
        reads all columns that it is given, as a loss of one's own may: `read_by_loss` of
        policy_loss.py leaves out what others do not. See BaseEngine.train_batch for what comes
        back, of each step.
        """
        if self._loss_function is None:
            raise RuntimeError("update on a model without a loss function")
        mine, found, start = self._with_experts(batch), list[Metrics](), 0
        for size in [len(batch)] if sizes is None else sizes:
            part = mine if size == len(batch) else mine.take(range(start, start + size))
            step = self._engine.train_batch(part, self._loss_function, temperature=temperature)
            found.append(step)
            start += size
        return found

    @register(dispatch_mode=_SCORED_STEP, writes=("log_probs", "entropy"))
    def update_with_scores(
        self, batch: Batch, *, temperature: float, bounds: Mapping[str, float]
    ) -> tuple[Batch | None, Metrics, Metrics]:
        """The optimizer step of all rows, whose log-probs and entropies it returns; gaps; metrics.

        See BaseEngine.train_batch_with_scores.
        """
        if self._loss_function is None:
            raise RuntimeError("update on a model without a loss function")
        step = self._engine.train_batch_with_scores(
            self._with_experts(batch), self._loss_function, temperature=temperature, bounds=bounds
        )
        return step.scores, step.gaps, step.metrics

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weights(
        self, generation: GenerationLayout, settings: WeightSyncConfig
    ) -> tuple[RendezvousEndpoint, TransferSpec]:
        """The endpoint for both sides; the rendezvous stays open until the next one."""
        engine, dtype = self._engine, self._spec.model.dtype
        if self._rendezvous is not None:
            self._rendezvous.close()
        address = settings.bind_address
        if address == "auto":  # this rank's, where the ranks of the actor have met
            address = RendezvousEndpoint.from_environment().host
        self._rendezvous = RendezvousServer(address)
        spec = TransferSpec(engine.layout, engine.num_mtp_layers, generation, dtype, settings)
        return self._rendezvous.endpoint, spec

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_weights(self, endpoint: RendezvousEndpoint, spec: TransferSpec) -> None:
        """Returns when all training ranks and all workers of servers are connected.

        May be called again, when servers have come or gone.
        """
        self._disconnect()
        engine = self._engine
        self._transport = connect(
            spec, endpoint, engine.hf_config, engine.world_rank, engine.device
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int) -> None:
        """This rank's part of a version of the weights.

        A transport that fails is given up: what waits for this rank fails too, at once.
        """
        assert self._transport is not None  # connect_weights came first
        try:
            self._transport.send(self._engine.local_weights(), WeightUpdate(version))
        except PeerError:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, path: str, num_bytes: int) -> str:
        """Write a Hugging Face checkpoint, with config and tokenizer of the one started from.

        Adapters are merged; those of a language model are also there as they are, in PEFT's format.

        Returns why it could not be written, for less room than `num_bytes` or another fault of the
        disk; "" when it stands there. A folder made on the way is for this user alone.
        """
        is_whole = self._model_type == "language_model"  # a head of its own is trained, too
        factors = self._engine.gathered_factors() if is_whole else []
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
                    write_more=self._write_adapters(factors),
                )
        except OSError as error:
            for _ in tensors:  # the other ranks continue to send
                pass
            return f"{error.strerror}: {error.filename or path}"
        return ""

    def _write_adapters(self, factors: list[Factors]) -> Callable[[Path], None] | None:
        if not factors:
            return None
        lora = self._spec.engine.lora

        def write(folder: Path) -> None:
            write_adapters(folder / FOLDER, lambda: iter(factors), lora.rank, lora.alpha)

        return write

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, *, in_background: bool = False) -> str:
        """Why the disk did not take it; "" when it stands there.

        `in_background` it returns when the training state has been copied; `finish_save` has to
        come before the next one.
        """
        try:
            if in_background:
                self._saving = self._engine.begin_save(Path(path))
            else:
                self._engine.save_checkpoint(Path(path))
        except OSError as error:
            return str(error)
        return ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_saved(self) -> bool:
        """Whether `finish_save` has nothing to wait for on this rank."""
        return self._saving is None or self._saving.is_written

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> str:
        """Waits for a save in the background; what comes back is that of save_checkpoint."""
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.finish(self._spec.timeout_s)
        except OSError as error:
            return str(error)
        return ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        self._engine.load_checkpoint(Path(path))
