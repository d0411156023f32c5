"""The Megatron engine: a GPTModel over ranks, behind the engine interface."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.algorithms.correction import find_gaps_beyond
from mcore_rl.algorithms.inputs import get_needs
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.peft import Factors
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import (
    BaseEngine,
    EngineSpec,
    LossFunction,
    Metrics,
    PendingSave,
    Place,
    ScoredStep,
)
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.host_mirror import HostMirror
from mcore_rl.models.base import HFConfig, get_family, pad_vocab_size
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.rules import Weight

if TYPE_CHECKING:
    from mcore_rl.engine.megatron.offload import MemoryReport

Result = dict[str, torch.Tensor]


class MegatronEngine(BaseEngine):
    has_full_tensors = False

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.mesh = Mesh(self.layout)
        self._host_copies: dict[Any, torch.Tensor] = {}  # of saves in the background
        self._mirrors = {"parameters": HostMirror(), "optimizer state": HostMirror()}

    # Megatron is imported inside methods: device.install() must have run before its first import.

    def initialize(self) -> None:
        device.install(self.spec.engine.threads_per_rank, self.spec.engine.modules)
        from mcore_rl.engine.megatron import lora, model, optimizer, weights
        from mcore_rl.parallel.groups import initialize_groups

        settings = self.spec.engine
        optimizer.check(settings.optimizer, self.spec.total_steps)
        backend, timeout_s = device.collective_backend(), self.spec.timeout_s
        initialize_groups(self.layout, backend, self.spec.seed, timeout_s)
        self.device = torch.device(torch.cuda.current_device())
        self.world_rank = dist.get_rank()
        at = self.mesh.get_coordinate(self.world_rank)
        self.hf_config = self._model_config()
        family, dtype = get_family(self.hf_config), model.DTYPES[self.spec.model.dtype]
        self.num_mtp_layers = family.num_mtp_layers(self.hf_config) if settings.mtp_loss_coef else 0
        num_layers = self.hf_config["num_hidden_layers"]
        stages = split_into_chunks(self.layout, num_layers, self.num_mtp_layers)
        vocab = pad_vocab_size(self.hf_config, self.layout.tp)
        self.chunks = model.build_chunks(
            family, self.hf_config, settings, dtype, stages, at.pp_rank, vocab, self._model_class()
        )
        self.weights = self._weight_rules(vocab)
        num_experts = self.chunks[0].config.num_moe_experts or 1
        self.placement = weights.WeightPlacement(self.mesh, stages, num_experts)
        reader = CheckpointReader(self.spec.model.path)
        weights.load_weights(self.chunks, self.weights, self.placement, at, reader, self._zeros())
        if settings.lora.rank:
            lora.attach(
                self.chunks, self.weights, self.placement, at, settings.lora, self.spec.seed
            )
        self.wrapped: list[Any] = list(self.chunks)
        self.optimizer: Any = None
        self.schedule: Any = None
        self._skips = optimizer.Skips(settings.optimizer)
        if self.spec.total_steps:
            self.wrapped = optimizer.wrap_for_training(self.chunks, settings.optimizer)
            if settings.lora.rank:
                lora.sum_partial_gradients(self.chunks, self.chunks[0].config)
            self.optimizer, self.schedule = optimizer.build_optimizer(
                self.wrapped, settings.optimizer, dtype, self.spec.total_steps
            )

    # What a value model does differently: see value_engine.py.

    def _model_config(self) -> HFConfig:
        return CheckpointReader(self.spec.model.path).read_config()

    def _model_class(self) -> Any:
        from mcore_rl.engine.megatron.model import PolicyModel

        return PolicyModel

    def _weight_rules(self, padded_vocab: int) -> tuple[Weight, ...]:
        return get_family(self.hf_config).weights(self.hf_config, padded_vocab)

    def _zeros(self) -> Collection[str]:
        """Tensors that the checkpoint does not have and that begin at zero."""
        return ()

    @property
    def expert_layers(self) -> tuple[int, ...]:
        from mcore_rl.engine.megatron.moe import routers

        return tuple(layer for chunk in self.chunks for layer, _ in routers(chunk))

    @torch.no_grad()
    def infer_batch(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        adapters: bool = True,
        replay: bool = True,
    ) -> Batch | None:
        from mcore_rl.engine.megatron.lora import without_adapters
        from mcore_rl.engine.megatron.step import in_batch_order

        self._finish_weights()
        micros = self._micro_batches(batch.select("prompt_ids", "response_ids"), training=False)
        off = contextlib.nullcontext() if adapters else without_adapters(self.chunks)
        mode = None if adapters and replay else "off"
        with off, self._routing(batch, mode, scoring=True, forward_only=True) as routing:
            results = self._run(micros, None, routing, temperature, forward_only=True)
        routed = routing.columns(batch)
        if not self._has_head:
            return None
        columns = {name: in_batch_order(batch, micros, results, name) for name in results[0]}
        return batch.with_columns(**columns, **routed)

    @torch.no_grad()
    def trace(self, batch: Batch) -> dict[str, torch.Tensor]:
        from mcore_rl.engine.megatron.trace import Tracing

        self._finish_weights()
        micros = self._micro_batches(batch.select("prompt_ids", "response_ids"), training=False)
        routing = self._routing(batch, scoring=True, forward_only=True)
        with Tracing(self.chunks) as tracing, routing:
            self._run(micros, None, routing, 1.0, forward_only=True)
        return tracing.whole(micros, int(batch.num_tokens.sum()), self.hf_config["vocab_size"])

    def train_batch(
        self, batch: Batch, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> Metrics:
        self.require("gradients", "parameters", "optimizer state")
        self.optimizer_zero_grad()
        results = self.forward_backward_batch(
            batch, loss_function, forward_only=False, temperature=temperature
        )
        return self._take_step(results)

    def train_batch_with_scores(
        self,
        batch: Batch,
        loss_function: LossFunction,
        *,
        temperature: float = 1.0,
        bounds: Mapping[str, float],
    ) -> ScoredStep:
        from mcore_rl.engine.megatron import step
        from mcore_rl.engine.megatron.moe import collect_expert_biases

        self.require("gradients", "parameters", "optimizer state")
        self.optimizer_zero_grad()
        micros = self._micro_batches(batch, training=True)
        biases = [(bias, bias.clone()) for bias in collect_expert_biases(self.chunks)]
        with self._routing(batch, scoring=False, forward_only=False) as routing:
            results = self._run(
                micros, loss_function, routing, temperature, forward_only=False, with_scores=True
            )
        micro_scores = step.pop_scores(results)
        names = micro_scores[0] if micro_scores else ()
        columns = {name: step.in_batch_order(batch, micros, micro_scores, name) for name in names}
        scores = Batch({**columns}) if self._has_head else None
        gaps = step.compute_logprob_gaps(micros, micro_scores, self.device)
        if not find_gaps_beyond(gaps, bounds):
            return ScoredStep(scores, gaps, self._take_step(results))
        for bias, before in biases:
            bias.copy_(before)
        return ScoredStep(scores, gaps, {})

    def _take_step(self, results: list[Result]) -> Metrics:
        """Take the optimizer step of the gradients that are there; return train_batch's metrics."""
        lr = self.lr_scheduler_step()
        steps = {"grad_norm": self.optimizer_step(), "lr": lr, **self._skips.metrics}
        if self._skips.num:  # Megatron's training loop leaves the schedule where it was, too
            self.schedule.step(increment=-1)
        return {**self._summed(results), **self._balance(), **steps}

    def forward_backward_batch(
        self,
        batch: Batch,
        loss_function: LossFunction | None,
        *,
        forward_only: bool,
        temperature: float = 1.0,
    ) -> list[Result]:
        """Run all micro-batches; gradients accumulate unless forward_only.

        One result each on the last pipeline stage, none on the others: its parts of the sums that
        train_batch returns or, without a loss function, its scores.
        """
        self.require("parameters", *(() if forward_only else ("gradients",)))
        micros = self._micro_batches(batch, training=not forward_only)
        with self._routing(batch, scoring=False, forward_only=forward_only) as routing:
            return self._run(micros, loss_function, routing, temperature, forward_only=forward_only)

    def expert_load(self) -> dict[int, torch.Tensor]:
        """By decoder layer with experts, [experts]: tokens routed to each, of all ranks.

        Of training passes since optimizer_zero_grad, padding left out. The same on every rank; all
        ranks take part. Empty for a model without experts.
        """
        from mcore_rl.engine.megatron.moe import expert_load

        return expert_load(self.chunks)

    def optimizer_zero_grad(self) -> None:
        self._require_optimizer("optimizer_zero_grad")
        self.require("gradients")
        from mcore_rl.engine.megatron.moe import clear_load

        clear_load(self.chunks)
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip, step, and return the gradient norm before clipping."""
        self._require_optimizer("optimizer_step")
        self.require("parameters", "gradients", "optimizer state")
        from mcore_rl.engine.megatron.optimizer import clipped_step

        return self._skips.counted(clipped_step(self.optimizer))

    def lr_scheduler_step(self) -> float:
        """Advance the schedule and return the learning rate that the next step uses."""
        self._require_optimizer("lr_scheduler_step")
        # Advanced before the step, so that warm-up starts above zero.
        self.schedule.step(increment=1)
        return float(self.optimizer.param_groups[0]["lr"])

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        from mcore_rl.engine.megatron.weights import export_weights, untouched_weights

        self._finish_weights()
        yield from export_weights(self.chunks, self.weights, self.placement, self.world_rank)
        if self.is_main_rank:
            reader = CheckpointReader(self.spec.model.path)
            yield from untouched_weights(self.weights, self.placement, reader)

    def collect_factors(self) -> list[Factors]:
        from mcore_rl.engine.megatron.lora import gathered_factors

        self._finish_weights()
        return gathered_factors(self.chunks) if self.spec.engine.lora.rank else []

    def get_local_weights(self) -> LocalWeights:
        from mcore_rl.engine.megatron.handover import get_local_weights

        self._finish_weights()
        at = self.mesh.get_coordinate(self.world_rank)
        return get_local_weights(self.chunks, self.weights, self.placement, at)

    def move(self, place: Place, parts: frozenset[str]) -> None:
        from mcore_rl.engine.megatron.offload import move

        if "parameters" not in self._offloaded:
            self._finish_weights()
        move(self.wrapped, self.optimizer, place, parts, self._mirrors)

    def close(self) -> None:
        if self.optimizer is not None:
            from mcore_rl.engine.megatron.optimizer import unwrap

            unwrap(self.wrapped)
        self.chunks, self.wrapped, self.optimizer, self.schedule = [], [], None, None
        self._mirrors.clear()

    def memory_report(self) -> MemoryReport:
        """Return the bytes of this rank's parts."""
        from mcore_rl.engine.megatron.offload import memory_report

        return memory_report(self.wrapped, self.optimizer, self._offloaded, self._mirrors)

    def save_checkpoint(self, path: Path) -> None:
        self._save(path, None).finish()

    def begin_save(self, path: Path) -> PendingSave:
        return self._save(path, self._host_copies)

    def _save(self, path: Path, copies: dict[Any, torch.Tensor] | None) -> PendingSave:
        from mcore_rl.engine.megatron import training_state

        self._finish_weights()
        self.require("optimizer state")
        return training_state.save(path, **self._training_state, copies=copies)

    def load_checkpoint(self, path: Path) -> None:
        from mcore_rl.engine.megatron import training_state

        self._finish_weights()  # nothing may arrive after the weights that are read
        self.require("optimizer state")
        training_state.load(path, **self._training_state)

    @property
    def _training_state(self) -> dict[str, Any]:
        return {
            "spec": self.spec,
            "vocab_size": self.hf_config["vocab_size"],
            "chunks": self.chunks,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    def _finish_weights(self) -> None:
        """With optimizer.overlap, weights may still be in transfer after a step.

        Raises StateError when they are away.
        """
        self.require("parameters")
        from mcore_rl.engine.megatron.optimizer import finish_weight_gather

        finish_weight_gather(self.wrapped)

    def _require_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(f"{what} on an engine that was built for inference (total_steps=0)")

    @property
    def _has_head(self) -> bool:
        return bool(self.chunks[-1].post_process)

    def _micro_batches(self, batch: Batch, *, training: bool) -> list[Any]:
        from mcore_rl.engine.megatron.moe import gathers_packs
        from mcore_rl.engine.megatron.step import micro_batches, model_cost

        config = self.chunks[0].config
        # The interleaved schedule takes micro-batches in groups of as many as pipeline ranks.
        multiple_of = self.layout.pp if self.layout.vpp > 1 else 1
        budget = self.spec.engine.max_tokens_per_micro_batch
        cost = model_cost(config, self.hf_config["vocab_size"])
        return micro_batches(
            batch,
            budget,
            multiple_of,
            cost,
            self.device,
            equal_sizes=gathers_packs(config),
            num_ahead=self.num_mtp_layers if training else 0,
        )

    def _routing(
        self, batch: Batch, mode: str | None = None, *, scoring: bool, forward_only: bool
    ) -> Any:
        from mcore_rl.engine.megatron.router_replay import routing_of

        mode = mode or self.spec.engine.moe.router_replay
        options = {"scoring": scoring, "forward_only": forward_only}
        return routing_of(mode, self.chunks, batch, self.device, **options)

    def _balance(self) -> Metrics:
        """Metrics of the experts' load, on the last stage; all ranks take part."""
        from mcore_rl.engine.megatron.moe import balance_metrics

        metrics = balance_metrics(self.chunks)
        return metrics if self._has_head else {}

    def _run(
        self,
        micros: list[Any],
        loss_function: LossFunction | None,
        routing: Any,
        temperature: float,
        *,
        forward_only: bool,
        with_scores: bool = False,
    ) -> list[Result]:
        from mcore_rl.engine.megatron import step

        for chunk in self.wrapped:
            chunk.train(not forward_only)
        if loss_function is None:
            make_loss = step.inference(self._head(temperature, training=False))
        else:
            counts = step.count_tokens(micros, self.device)
            needs = get_needs(loss_function) | ({"entropy"} if with_scores else set())
            head = self._head(temperature, training=True, needs=needs)
            coef = self.spec.engine.mtp_loss_coef
            make_loss = step.training(head, loss_function, counts, coef, with_scores=with_scores)
        return step.run_micro_batches(
            self.wrapped, micros, make_loss, routing.around, forward_only=forward_only
        )

    def _head(self, temperature: float, *, training: bool, needs: Collection[str] = ()) -> Any:
        from mcore_rl.engine.megatron.heads import LanguageModelHead

        return LanguageModelHead(
            vocab_size=self.hf_config["vocab_size"],
            temperature=temperature,
            chunk_bytes=self.spec.engine.logprob_chunk_bytes,
            with_entropy="entropy" in needs or not training,
            with_squares=self.spec.with_sum_pi_squared and not training,
            num_top=0 if training else self.spec.num_top_log_probs,
        )

    def _summed(self, results: list[Result]) -> Metrics:
        """Metrics of all micro-batches, data and context ranks, on the last stage; else none."""
        from megatron.core import parallel_state

        if not self._has_head:
            return {}
        names = list(results[0])
        totals = torch.stack([torch.stack([r[name] for r in results]).sum() for name in names])
        dist.all_reduce(
            totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        return dict(zip(names, totals.tolist(), strict=True))
