"""The Megatron engines: a GPTModel over ranks with a language model, value or reward head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.algorithms.correction import find_gaps_beyond
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.peft import Factors, check_targets
from mcore_rl.checkpoint.stacks import stack_slices
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import (
    validate_megatron,
    validate_model_engine,
    validate_model_layout,
)
from mcore_rl.config.schema import EngineConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import (
    Backend,
    BaseEngine,
    EngineSpec,
    LossFunction,
    Metrics,
    PendingSave,
    Place,
    ScoredStep,
)
from mcore_rl.engine.megatron import device, offload, passthrough
from mcore_rl.engine.offload import HostMirror
from mcore_rl.engine.packing import MicroBatch, build_micro_batches
from mcore_rl.engine.steps import (
    Result,
    choose_scores,
    compute_logprob_gaps,
    count_tokens,
    pop_scores,
    reduce_metrics,
    restore_batch_order,
)
from mcore_rl.models.base import (
    CLASSIFICATION,
    SEQUENCE,
    HFConfig,
    check_no_unread_field,
    get_family,
    get_model_sizes,
    pad_vocab_size,
    read_config,
)
from mcore_rl.models.heads import (
    build_value_config,
    has_value_bias,
    has_value_head,
    list_value_changes,
    map_model_weights,
    map_value_head_weights,
    map_value_weights,
)
from mcore_rl.models.transformers_model import refuse_layers
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.rules import Weight, list_logical_tensors

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from mcore_rl.engine.megatron.heads import Head
    from mcore_rl.engine.megatron.model import PolicyModel
    from mcore_rl.engine.megatron.router_replay import RoutingPass


class MegatronEngine(BaseEngine):
    """A language model. `total_steps=0` builds no optimizer."""

    shard_format = "megatron"

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.mesh = Mesh(self.layout)
        self._host_copies: dict[Any, torch.Tensor] = {}  # of saves in the background
        self._mirrors = {part: HostMirror() for part in ("parameters", "optimizer state")}

    # Methods import Megatron: device.install() must run before its first import.

    def initialize(self) -> None:
        device.install(self.spec.engine.threads_per_rank, self.spec.engine.modules)
        from mcore_rl.engine.megatron import lora, model, optimizer, weights
        from mcore_rl.parallel.groups import initialize_groups

        settings = self.spec.engine
        optimizer.check_optimizer(settings.optimizer, self.spec.total_steps)
        backend, timeout_s = device.get_collective_backend(), self.spec.timeout_s
        initialize_groups(self.layout, backend, self.spec.seed, timeout_s)
        self.device = torch.device(torch.cuda.current_device())
        self.world_rank = dist.get_rank()
        self._coordinate = self.mesh.get_coordinate(self.world_rank)
        self.hf_config = self._read_model_config()
        family, dtype = get_family(self.hf_config), model.DTYPES[self.spec.model.dtype]
        self.num_mtp_layers = family.num_mtp_layers(self.hf_config) if settings.mtp_loss_coef else 0
        num_layers = self.hf_config["num_hidden_layers"]
        stages = split_into_chunks(self.layout, num_layers, self.num_mtp_layers)
        vocab = pad_vocab_size(self.hf_config, self.layout.tp)
        self.chunks = model.build_chunks(
            family,
            self.hf_config,
            settings,
            dtype,
            stages,
            self._coordinate.pp_rank,
            vocab,
            self._get_model_class(),
        )
        self.weights = self._build_weight_rules(vocab)
        num_experts = self.chunks[0].config.num_moe_experts or 1
        self.placement = weights.WeightPlacement(self.mesh, stages, num_experts)
        reader = CheckpointReader(self.spec.model.path)
        location = (self.chunks, self.weights, self.placement, self._coordinate)
        weights.load_weights(*location, reader, self._list_zero_tensors())
        if settings.lora.rank:
            lora.attach_adapters(*location, settings.lora, self.spec.seed)
        # In DDP, if the engine trains.
        self.wrapped_chunks: list[PolicyModel | DistributedDataParallel] = [*self.chunks]
        self.optimizer: ChainedOptimizer | None = None
        self.schedule: OptimizerParamScheduler | None = None
        self._skip_counter = optimizer.SkipCounter(settings.optimizer)
        if self.spec.total_steps:
            fields = passthrough.read_engine_fields(settings)
            self.wrapped_chunks = optimizer.wrap_chunks(self.chunks, settings.optimizer, fields)
            if settings.lora.rank:
                lora.sum_partial_gradients(self.chunks, self.chunks[0].config)
            self.optimizer, self.schedule = optimizer.build_optimizer(
                self.wrapped_chunks, settings.optimizer, fields, dtype, self.spec.total_steps
            )

    # ValueEngine overrides these methods, and _create_head.

    def _read_model_config(self) -> HFConfig:
        return CheckpointReader(self.spec.model.path).read_config()

    def _get_model_class(self) -> Callable[..., PolicyModel]:
        from mcore_rl.engine.megatron.model import PolicyModel

        return PolicyModel

    def _build_weight_rules(self, padded_vocab: int) -> tuple[Weight, ...]:
        return get_family(self.hf_config).weights(self.hf_config, padded_vocab)

    def _list_zero_tensors(self) -> Collection[str]:
        """Return the tensors that start at zero and are not in the checkpoint."""
        return ()

    @property
    def expert_layers(self) -> tuple[int, ...]:
        from mcore_rl.engine.megatron.moe import iter_routers

        return tuple(layer for chunk in self.chunks for layer, _ in iter_routers(chunk))

    @torch.no_grad()
    def infer_batch(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        adapters: bool = True,
        replay: bool = True,
    ) -> Batch | None:
        from mcore_rl.engine.megatron.lora import disable_adapters
        from mcore_rl.engine.megatron.step import get_context_group

        self._finish_weight_gather()
        # Scores need no other columns, which would be packed and moved to the device, too.
        tokens = batch.select("prompt_ids", "response_ids")
        micros = self._build_micro_batches(tokens, is_training=False)
        base_model = contextlib.nullcontext() if adapters else disable_adapters(self.chunks)
        mode = None if adapters and replay else "off"
        routing = self._create_routing_pass(batch, mode, is_scoring=True, forward_only=True)
        with base_model, routing:
            results = self._run(micros, None, routing, temperature, forward_only=True)
        recorded = routing.collect_columns(batch)
        if not self._has_head:
            return None
        group = get_context_group()
        columns = {
            name: restore_batch_order(batch, micros, results, name, group) for name in results[0]
        }
        return batch.with_columns(**columns, **recorded)

    @torch.no_grad()
    def trace(self, batch: Batch) -> dict[str, torch.Tensor]:
        from mcore_rl.engine.megatron.trace import OutputTracer

        self._finish_weight_gather()
        tokens = batch.select("prompt_ids", "response_ids")
        micros = self._build_micro_batches(tokens, is_training=False)
        routing = self._create_routing_pass(batch, is_scoring=True, forward_only=True)
        with OutputTracer(self.chunks) as tracer, routing:
            self._run(micros, None, routing, 1.0, forward_only=True)
        num_tokens = int(batch.num_tokens.sum())
        return tracer.gather_outputs(micros, num_tokens, self.hf_config["vocab_size"])

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
        micros = self._build_micro_batches(batch, is_training=True)
        biases = [(bias, bias.clone()) for bias in collect_expert_biases(self.chunks)]
        with self._create_routing_pass(batch, is_scoring=False, forward_only=False) as routing:
            results = self._run(
                micros, loss_function, routing, temperature, forward_only=False, with_scores=True
            )
        micro_scores, group = pop_scores(results), step.get_context_group()
        names = micro_scores[0] if micro_scores else ()
        columns = {
            name: restore_batch_order(batch, micros, micro_scores, name, group) for name in names
        }
        scores = Batch({**columns}) if self._has_head else None
        gaps = compute_logprob_gaps(micros, micro_scores, self.device)
        if not find_gaps_beyond(gaps, bounds):
            return ScoredStep(scores, gaps, self._take_step(results))
        # The backward pass has changed them (distributed/finalize_model_grads.py:670).
        for bias, before in biases:
            bias.copy_(before)
        return ScoredStep(scores, gaps, {})

    @record_function("optimizer_step")
    def _take_step(self, results: list[Result]) -> Metrics:
        """Take the optimizer step of the accumulated gradients; return train_batch's metrics."""
        from mcore_rl.engine.megatron.moe import measure_balance

        _, schedule = self._require_optimizer("a training step")
        lr = self.lr_scheduler_step()
        grad_norm = self.optimizer_step()
        if self._skip_counter.num:  # Megatron's training loop does not advance the schedule, either
            schedule.step(increment=-1)
        metrics = self._reduce_metrics(results)
        balance, self.expert_load = measure_balance(self.chunks)  # collective over all ranks
        metrics |= balance if self._has_head else {}
        return {**metrics, "grad_norm": grad_norm, "lr": lr, **self._skip_counter.metrics}

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
        micros = self._build_micro_batches(batch, is_training=not forward_only)
        routing = self._create_routing_pass(batch, is_scoring=False, forward_only=forward_only)
        with routing:
            return self._run(micros, loss_function, routing, temperature, forward_only=forward_only)

    def optimizer_zero_grad(self) -> None:
        """Set gradients and the counts of experts' tokens to zero."""
        optimizer, _ = self._require_optimizer("optimizer_zero_grad")
        self.require("gradients")
        from mcore_rl.engine.megatron.moe import clear_expert_load

        clear_expert_load(self.chunks)
        for chunk in self.wrapped_chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()  # gradients outside of the buffers

    def optimizer_step(self) -> float:
        """Clip, step, and return the gradient norm before clipping."""
        optimizer, _ = self._require_optimizer("optimizer_step")
        self.require("parameters", "gradients", "optimizer state")
        from mcore_rl.engine.megatron.optimizer import clip_and_step

        grad_norm = clip_and_step(optimizer)
        self._skip_counter.count(grad_norm)
        return grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule and return the learning rate that the next step uses."""
        optimizer, schedule = self._require_optimizer("lr_scheduler_step")
        # Advance before the step, so that warm-up starts above zero.
        schedule.step(increment=1)
        return float(optimizer.param_groups[0]["lr"])

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        from mcore_rl.engine.megatron.weights import export_weights, iter_unbuilt_weights

        self._finish_weight_gather()
        tensors = export_weights(self.chunks, self.weights, self.placement, self.world_rank)
        yield from stack_slices(tensors, list(list_logical_tensors(self.weights)))
        if self.is_main_rank:
            reader = CheckpointReader(self.spec.model.path)
            yield from iter_unbuilt_weights(self.weights, self.placement, reader)

    def collect_factors(self) -> list[Factors]:
        from mcore_rl.engine.megatron.lora import gather_factors

        self._finish_weight_gather()
        return gather_factors(self.chunks) if self.spec.engine.lora.rank else []

    def get_local_weights(self) -> LocalWeights:
        from mcore_rl.engine.megatron.weights import collect_local_weights

        self._finish_weight_gather()
        return collect_local_weights(self.chunks, self.weights, self.placement, self._coordinate)

    def move(self, place: Place, parts: frozenset[str]) -> None:
        if "parameters" not in self._offloaded:
            self._finish_weight_gather()
        offload.move_parts(self.wrapped_chunks, self.optimizer, place, parts, self._mirrors)

    def close(self) -> None:
        if self.optimizer is not None:  # else the chunks are not in DDP
            from mcore_rl.engine.megatron.optimizer import unwrap_chunks

            unwrap_chunks(self.wrapped_chunks)
        self.chunks, self.wrapped_chunks, self.optimizer, self.schedule = [], [], None, None
        self._mirrors.clear()

    def memory_report(self) -> offload.MemoryReport:
        """Return the bytes of this rank's parts."""
        return offload.build_memory_report(
            self.wrapped_chunks, self.optimizer, self._offloaded, self._mirrors
        )

    def save_checkpoint(self, path: Path) -> None:
        self._save(path, None).finish()

    def begin_save(self, path: Path) -> PendingSave:
        return self._save(path, self._host_copies)

    def _save(self, path: Path, copies: dict[Any, torch.Tensor] | None) -> PendingSave:
        from mcore_rl.engine.megatron import training_state

        self._finish_weight_gather()
        self.require("optimizer state")
        return training_state.save(path, **self._training_state, copies=copies)

    def load_checkpoint(self, path: Path) -> None:
        from mcore_rl.engine.megatron import training_state

        self._finish_weight_gather()  # a later transfer would overwrite the loaded weights
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

    def _finish_weight_gather(self) -> None:
        """Wait for weights that are in transfer after a step (optimizer.overlap).

        Raises:
            StateError: The parameters are offloaded.
        """
        self.require("parameters")
        from mcore_rl.engine.megatron.optimizer import finish_weight_gather

        finish_weight_gather(self.wrapped_chunks)

    def _require_optimizer(self, call: str) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
        if self.optimizer is None or self.schedule is None:
            raise RuntimeError(f"{call} on an engine that was built for inference (total_steps=0)")
        return self.optimizer, self.schedule

    @property
    def _has_head(self) -> bool:
        return bool(self.chunks[-1].post_process)

    def _build_micro_batches(self, batch: Batch, *, is_training: bool) -> list[MicroBatch]:
        from megatron.core import parallel_state

        from mcore_rl.engine.megatron.moe import needs_equal_packs
        from mcore_rl.engine.megatron.packing import estimate_model_cost, read_pack_split

        config = self.chunks[0].config
        return build_micro_batches(
            batch,
            self.spec.engine.max_tokens_per_micro_batch,
            read_pack_split(config),
            estimate_model_cost(config, self.hf_config["vocab_size"]),
            self.device,
            group=parallel_state.get_data_parallel_group(),
            # The interleaved schedule needs a multiple of the pipeline ranks.
            multiple_of=self.layout.pp if self.layout.vpp > 1 else 1,
            equal_sizes=needs_equal_packs(config),
            num_mtp_layers=self.num_mtp_layers if is_training else 0,
        )

    def _create_routing_pass(
        self, batch: Batch, mode: str | None = None, *, is_scoring: bool, forward_only: bool
    ) -> RoutingPass:
        from mcore_rl.engine.megatron.indexer_replay import create_key_pass
        from mcore_rl.engine.megatron.router_replay import create_routing_pass

        settings, model = self.spec.engine, (self.chunks, batch, self.device)
        routing = create_routing_pass(
            mode or settings.moe.router_replay,
            *model,
            is_scoring=is_scoring,
            forward_only=forward_only,
        )
        mode = mode or settings.indexer_replay
        return create_key_pass(mode, routing, *model, is_scoring=is_scoring)

    def _run(
        self,
        micros: list[MicroBatch],
        loss_function: LossFunction | None,
        routing: RoutingPass,
        temperature: float,
        *,
        forward_only: bool,
        with_scores: bool = False,
    ) -> list[Result]:
        from mcore_rl.engine.megatron import step

        for chunk in self.wrapped_chunks:
            chunk.train(not forward_only)
        head = self._create_head(temperature, loss_function, with_scores=with_scores)
        run = partial(
            step.run_micro_batches, self.wrapped_chunks, micros, forward_only=forward_only
        )
        if loss_function is None:
            return run(partial(step.compute_scores, head), routing.wrap_forward)
        counts = count_tokens(micros, self.device, step.get_data_group())
        loss_func = partial(
            step.compute_training_loss,
            head,
            loss_function,
            counts,
            mtp_loss_coef=self.spec.engine.mtp_loss_coef,
            with_scores=with_scores,
        )
        results = run(loss_func, routing.wrap_forward)
        if self.spec.engine.indexer_loss_coef and not forward_only:
            loss = step.pop_indexer_loss(self.chunks[0].config, counts.total, self.device)
            for result in results:
                result["indexer_loss"] = loss / len(results)
        return results

    def _create_head(
        self, temperature: float, loss_function: LossFunction | None, *, with_scores: bool
    ) -> Head:
        """Return the head that computes the scores a pass needs: all of them without a loss."""
        from mcore_rl.engine.megatron.heads import LanguageModelHead

        return LanguageModelHead(
            self.hf_config["vocab_size"],
            choose_scores(self.spec, temperature, loss_function, with_scores=with_scores),
        )

    def _reduce_metrics(self, results: list[Result]) -> Metrics:
        """Sum metrics over micro-batches, data and context ranks, on the last stage; else none."""
        from mcore_rl.engine.megatron.step import get_data_group

        return reduce_metrics(results, get_data_group()) if self._has_head else {}


class ValueEngine(MegatronEngine):
    """A value model: `infer_batch` adds "values", and loss functions read inputs.values.

    model.path is a token classification checkpoint with one label, or a language model. The head of
    a language model is left out, and the value head starts at zero, so that all values do
    (lm-human-preferences; Huang et al. 2023, "The N Implementation Details of RLHF with PPO"). An
    export is a token classification checkpoint. A value model that starts from a reward model stays
    one.
    """

    _kind = CLASSIFICATION

    @property
    def config_changes(self) -> HFConfig:
        return list_value_changes(read_config(self.spec.model.path), self._kind)

    def _read_model_config(self) -> HFConfig:
        return build_value_config(read_config(self.spec.model.path), self._kind)

    def _get_model_class(self) -> Callable[..., PolicyModel]:
        from mcore_rl.engine.megatron.heads import ValueModel

        return partial(ValueModel, has_bias=has_value_bias(self.hf_config))

    def _build_weight_rules(self, padded_vocab: int) -> tuple[Weight, ...]:
        return map_value_weights(self.hf_config, padded_vocab)

    def _list_zero_tensors(self) -> Collection[str]:
        if has_value_head(read_config(self.spec.model.path)):
            return ()
        return [
            tensor.name for tensor in list_logical_tensors(map_value_head_weights(self.hf_config))
        ]

    def _create_head(
        self, temperature: float, loss_function: LossFunction | None, *, with_scores: bool
    ) -> Head:
        from mcore_rl.engine.megatron.heads import compute_value_scores

        return compute_value_scores


class RewardEngine(ValueEngine):
    """A value model whose value at the last token is the score of a sequence.

    It starts from a language model, or from a sequence classification checkpoint with one label;
    an export is the latter.
    """

    _kind = SEQUENCE


def _check_settings(key: str, engine: EngineConfig, device_type: str) -> None:
    """Check the settings, and that ranks on "cuda" or "cpu" can have the modules that they name."""
    validate_megatron(key, engine)
    device.choose_modules(engine.modules, device_type, key)
    passthrough.check_fields(key, engine, device_type)


def _check_model(key: str, engine: EngineConfig, hf_config: HFConfig) -> None:
    """Check that the layout divides the model, and that it has the parts that settings name."""
    family = get_family(hf_config)
    if family.layer_spec is refuse_layers:
        raise ConfigError(
            f"{key}.backend='megatron': {family.architecture} has no layers of Megatron here; "
            f"allowed: {key}.backend=fsdp, or a family of your own in model.family"
        )
    check_no_unread_field(hf_config)
    sizes = get_model_sizes(hf_config)
    validate_model_layout(f"{key}.layout", engine.layout, sizes)
    validate_model_engine(key, engine, sizes)
    if engine.fp8.recipe != "off":
        weights = map_model_weights(hf_config, pad_vocab_size(hf_config, 1))
        passthrough.check_float8_sizes(key, engine, weights, sizes.num_layers)
    if engine.lora.rank:
        weights = map_model_weights(hf_config, pad_vocab_size(hf_config, 1))
        check_targets(f"{key}.lora", weights, engine.lora)


BACKEND = Backend(
    engines={
        "language_model": MegatronEngine,
        "value_model": ValueEngine,
        "reward_model": RewardEngine,
    },
    settings=tuple(field.name for field in fields(EngineConfig) if field.name != "fsdp"),
    check_settings=_check_settings,
    check_model=_check_model,
    rank_environment=device.build_rank_environment,
    package="megatron",
)
