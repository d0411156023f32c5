"""The worker of a training engine: one rank, and the methods that a controller calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Concatenate, cast

import numpy as np
from torch.profiler import record_function

from mcore_rl.checkpoint.hf_writer import reserve_folder, write_checkpoint
from mcore_rl.checkpoint.peft import FOLDER, Factors, pack_adapters, write_adapters
from mcore_rl.config.errors import PeerError
from mcore_rl.config.schema import WeightSyncConfig
from mcore_rl.controller.dispatch import (
    ANY_COLUMNS,
    CallPart,
    Dispatch,
    DispatchMode,
    Joined,
    RankGroup,
    Results,
    register,
)
from mcore_rl.data.batch import MODEL_INPUTS, PICKED_KEYS, Batch, Samples
from mcore_rl.data.examples import build_scoring_batch
from mcore_rl.data.routed_experts import EXPERTS, format_layers, select_stage_experts
from mcore_rl.engine.base import (
    EngineSpec,
    LossFunction,
    Metrics,
    PendingSave,
    Place,
    create_engine,
)
from mcore_rl.engine.profiling import StepProfiler
from mcore_rl.parallel.devices import detect_device
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec, WeightFormat, WorkerLists
from mcore_rl.weight_sync.transport import WeightTransport, WeightUpdate, connect

# Columns that a pass over samples reads, and those that it may add.
_SCORED = MODEL_INPUTS
_SCORES = (
    "log_probs", "entropy", "sum_pi_squared", "routed_experts", PICKED_KEYS, "top_ids",
    "top_log_probs",
)  # fmt: skip


def _join_scores(parts: Sequence[CallPart], results: Results) -> tuple[Samples, Metrics, Metrics]:
    """Join the scores of (scores, gaps, metrics); every rank reports the numbers of all of them."""
    scores = {rank: result and result[0] for rank, result in results.items()}
    assert parts[0].output_rank is not None  # each part has one
    _, gaps, metrics = results[parts[0].output_rank]
    return Dispatch.MEGATRON_COMPUTE.gather(parts, scores), gaps, metrics


_SCORED_STEP: DispatchMode[Joined[tuple[Samples, Metrics, Metrics]]] = DispatchMode(
    Dispatch.MEGATRON_COMPUTE.scatter, _join_scores
)


class ModelWorker:
    """One rank of a training engine, behind the calls of a WorkerGroup.

    A call that needs what was offloaded (`to`) brings it back to the device first. The driver
    offloads the models that share the device before (trainers/device_sharing.py).
    """

    def __init__(
        self,
        spec: EngineSpec,
        loss_function: LossFunction | None,
        model_type: str = "language_model",
    ) -> None:
        """Create the engine, which `initialize` then builds.

        Args:
            loss_function: Minimised by `update`; None for a model that only scores.
            model_type: "language_model", "value_model" or "reward_model".
        """
        self._spec = spec
        self._loss_function = loss_function
        self._model_type = model_type
        self._engine = create_engine(model_type, spec)
        self._rendezvous: RendezvousServer | None = None
        self._transport: WeightTransport | None = None
        self._saving: PendingSave | None = None
        self._profiler: StepProfiler | None = None
        self._is_offloaded = False  # a part of the model, at least

    def close(self) -> None:
        """Free the model and its memory: the process continues with another one."""
        self._disconnect()
        self._engine.close()
        gc.collect()  # modules and their hooks reference each other
        detect_device().empty_cache()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def initialize(self) -> None:
        self._engine.initialize()
        detect_device().reset_peak_memory()

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=(*_SCORED, EXPERTS), writes=_SCORES)
    @record_function("compute_log_probs")
    def compute_log_probs(
        self, batch: Batch, *, temperature: float, replay: bool = True
    ) -> Batch | None:
        """Add the columns log_probs and entropy of a language model, at a temperature above 0.

        Without `replay` routers choose, whatever actor.moe.router_replay is.
        """
        self._onload()
        if not (replay and self._replays_rollout):
            return self._engine.infer_batch(batch, temperature=temperature, replay=replay)
        scored = self._engine.infer_batch(self._select_experts(batch), temperature=temperature)
        return None if scored is None else scored.drop_columns(EXPERTS)

    @property
    def _replays_rollout(self) -> bool:
        return self._spec.engine.moe.router_replay == "rollout"

    @property
    def part(self) -> str:
        """The part of the recorded experts that this rank reads: its layers."""
        return format_layers(self._engine.expert_layers) if self._replays_rollout else ""

    def _select_experts(self, batch: Batch) -> Batch:
        """Add the recorded experts of this rank's layers, if the actor replays them."""
        if not self._replays_rollout:
            return batch
        return select_stage_experts(batch, self._engine.expert_layers)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=_SCORED, writes=_SCORES)
    @record_function("compute_reference_log_probs")
    def compute_reference_log_probs(self, batch: Batch, *, temperature: float) -> Batch | None:
        """Add log_probs and entropy of the base model of a LoRA actor: without its adapters."""
        self._onload()
        return self._engine.infer_batch(batch, temperature=temperature, adapters=False)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=_SCORED, writes=("values",))
    @record_function("compute_values")
    def compute_values(self, batch: Batch) -> Batch | None:
        """Add the column values of a value or reward model."""
        self._onload()
        return self._engine.infer_batch(batch)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE, reads=_SCORED, writes=("scores",))
    @record_function("compute_scores")
    def compute_scores(self, batch: Batch) -> Batch | None:
        """Add the column scores of a reward model: [samples], at the last token of each."""
        self._onload()
        scored = self._engine.infer_batch(build_scoring_batch(batch.select_inputs()))
        if scored is None:
            return None
        return batch.with_columns(scores=scored.jagged("values").values.astype(np.float32))

    @register(dispatch_mode=Dispatch.RANK_ZERO, writes=ANY_COLUMNS)
    def apply(self, function: Callable[..., object], batch: Samples, *args: object) -> object:
        """Return `function(batch, *args)`; `apply_on_rank_zero` calls it."""
        return function(batch, *args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(
        self, place: Place, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move parts of the model (BaseEngine.to)."""
        self._engine.to(place, model=model, optimizer=optimizer, grad=grad)
        is_all = model and optimizer and grad
        self._is_offloaded = place == "host" or (self._is_offloaded and not is_all)

    def _onload(self) -> None:
        """Bring weights, optimizer state and gradients back, if they are away."""
        if self._is_offloaded:
            self._engine.to("device")
            self._is_offloaded = False

    def _onload_weights(self) -> None:
        """Bring the weights alone back, for a call that only reads them."""
        if self._is_offloaded:  # and still is: the next `_onload` brings the rest
            self._engine.to("device", optimizer=False, grad=False)

    @register(dispatch_mode=Dispatch.MINI_BATCHES)
    @record_function("update")
    def update(
        self, batch: Batch, *, sizes: Sequence[int] | None = None, temperature: float = 1.0
    ) -> list[Metrics]:
        """Take an optimizer step on each mini-batch; return the metrics of each (train_batch).

        Args:
            batch: Columns that the loss reads (select_read_columns in trainers/roles.py).
            sizes: Consecutive rows of each mini-batch; None: all rows are one.
            temperature: Sampling temperature of the log-probs that the loss reads.
        """
        if self._loss_function is None:
            raise RuntimeError("update on a model without a loss function")
        self._onload()
        rows, metrics, start = self._select_experts(batch), list[Metrics](), 0
        for size in [len(batch)] if sizes is None else sizes:
            part = rows if size == len(batch) else rows.take(range(start, start + size))
            metrics.append(
                self._engine.train_batch(part, self._loss_function, temperature=temperature)
            )
            start += size
        return metrics

    @register(dispatch_mode=_SCORED_STEP, writes=("log_probs", "entropy"))
    @record_function("update_with_scores")
    def update_with_scores(
        self, batch: Batch, *, temperature: float, bounds: Mapping[str, float]
    ) -> tuple[Batch | None, Metrics, Metrics]:
        """Take an optimizer step on all rows; return their log-probs and entropies, the gaps to the
        servers, and metrics (BaseEngine.train_batch_with_scores).
        """
        if self._loss_function is None:
            raise RuntimeError("update on a model without a loss function")
        self._onload()
        step = self._engine.train_batch_with_scores(
            self._select_experts(batch), self._loss_function, temperature=temperature, bounds=bounds
        )
        return step.scores, step.gaps, step.metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(
        self, prefix: str, step: int, *, ranks: Sequence[int], max_trace_bytes: int, memory: bool
    ) -> None:
        """Profile this rank, if it is one of `ranks`, until `stop_profile`.

        In a process with several models the first of them records all.

        Args:
            prefix: Path of the files, to which the rank is added.
            step: Step of the trainer.
            max_trace_bytes, memory: As in ProfileConfig.
        """
        rank = self._engine.world_rank
        if rank in ranks and not StepProfiler.is_running():
            path = Path(f"{prefix}-{rank}")
            self._profiler = StepProfiler(path, step, max_trace_bytes, memory=memory)
            self._profiler.start()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> str:
        """Write what `start_profile` has begun; return which files are missing and why, or ""."""
        profiler, self._profiler = self._profiler, None
        return "" if profiler is None else profiler.stop()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_peak_memory(self) -> dict[str, int]:
        """Return the peaks of torch's allocator since `initialize`, in bytes; {} on the CPU."""
        stats = detect_device().get_memory_stats()
        names = {"max_allocated_bytes": "allocated", "max_reserved_bytes": "reserved"}
        return {n: stats[f"{kind}_bytes.all.peak"] for n, kind in names.items()} if stats else {}

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def get_expert_load(self) -> dict[str, list[int]]:
        """Return the tokens of each expert in the last optimizer step, by decoder layer.

        Empty for a model without experts.
        """
        load = self._engine.expert_load
        return {str(layer): counts.long().tolist() for layer, counts in load.items()}

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weights(
        self,
        generation: GenerationLayout,
        settings: WeightSyncConfig,
        weight_format: WeightFormat = "vllm",
        worker_lists: WorkerLists | None = None,
    ) -> tuple[RendezvousEndpoint, TransferSpec]:
        """Open a rendezvous for both sides, which stays until the next one; return its endpoint."""
        engine, dtype = self._engine, self._spec.model.dtype
        if self._rendezvous is not None:
            self._rendezvous.close()
        address = settings.bind_address
        if address == "auto":  # this rank's, where the ranks of the actor have met
            address = RendezvousEndpoint.read_environment().host
        self._rendezvous = RendezvousServer(address)
        spec = TransferSpec(
            engine.layout,
            engine.num_mtp_layers,
            generation,
            dtype,
            settings,
            shard_format=engine.shard_format,
            num_replicas=self._spec.engine.fsdp.num_replicas,
            weight_format=weight_format,
            family=self._spec.model.family,
            worker_lists=worker_lists or [],
        )
        return self._rendezvous.endpoint, spec

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_weights(self, endpoint: RendezvousEndpoint, spec: TransferSpec) -> None:
        """Connect with all training ranks and all workers of servers.

        May be called again, when servers have joined or left.
        """
        self._disconnect()
        engine = self._engine
        self._transport = connect(
            spec, endpoint, engine.hf_config, engine.world_rank, engine.device
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @record_function("send_weights")
    def send_weights(self, version: int) -> None:
        """Send this rank's part of a version of the weights.

        A transport that fails is closed, so that what waits for this rank fails at once, too.
        """
        self._onload_weights()
        assert self._transport is not None  # connect_weights came first
        try:
            self._transport.send(self._engine.get_local_weights(), WeightUpdate(version))
        except PeerError:
            self._disconnect()
            raise

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def collect_adapters(self) -> bytes:
        """Return the adapters as a safetensors file with PEFT's names; b"" but on the main rank."""
        self._onload_weights()
        factors = self._engine.collect_factors()
        return pack_adapters(factors) if self._engine.is_main_rank else b""

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
        self._onload_weights()
        is_whole = self._model_type == "language_model"  # a head of its own is trained, too
        factors = self._engine.collect_factors() if is_whole else []
        tensors = self._engine.get_per_tensor_param()
        if not self._engine.is_main_rank:
            for _ in tensors:
                raise RuntimeError("weights surfaced on a rank that does not write")
            return ""
        try:
            with reserve_folder(Path(path), num_bytes):
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
        lora, config = self._spec.engine.lora, self._engine.hf_config

        def write(folder: Path) -> None:
            write_adapters(folder / FOLDER, lambda: iter(factors), lora.rank, lora.alpha, config)

        return write

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, *, in_background: bool = False) -> str:
        """Save the training state; return why the disk did not take it, "" if it did.

        With `in_background` it returns when the state has been copied to the host; `finish_save`
        has to come before the next one.
        """
        self._onload()
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
        """Return whether `finish_save` has nothing to wait for on this rank."""
        return self._saving is None or self._saving.is_written

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> str:
        """Wait for a save in the background; return what save_checkpoint returns."""
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.finish(self._spec.timeout_s)
        except OSError as error:
            return str(error)
        return ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Load what save_checkpoint has written, in any layout."""
        self._onload()
        self._engine.load_checkpoint(Path(path))


def apply_on_rank_zero[**P, R](
    workers: RankGroup,
    function: Callable[Concatenate[Batch, P], R],
    batch: Samples,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Return `function(batch, *args)`, computed where the columns of the batch are.

    Advantages, corrections and loss weights need all samples of a step, or of a mini-batch. The
    function has to be one that can be imported; the engine has no part in it. A batch that it
    returns comes back by reference, joined to the columns that were given; batches in a tuple come
    back with their new columns alone.
    """
    return cast(R, workers.call(ModelWorker.apply, function, batch, *args, **kwargs))
