"""The FSDP2 engines: language models of transformers, and value and reward models of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from mcore_rl.algorithms.correction import find_gaps_beyond
from mcore_rl.checkpoint import sharded_rows
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.peft import Factors
from mcore_rl.config.checks import check_divides
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import TRANSFORMERS
from mcore_rl.config.rules_engine import validate_fsdp
from mcore_rl.config.schema import EngineConfig, LoRAConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.images import ImageStore, ImageTokens
from mcore_rl.engine.base import (
    Backend,
    BaseEngine,
    LossFunction,
    Metrics,
    Place,
    ScoredStep,
)
from mcore_rl.engine.fsdp import lora
from mcore_rl.engine.fsdp.attention import ATTENTION, Pack, register_functions
from mcore_rl.engine.fsdp.model import (
    RankMeshes,
    ShardedPolicy,
    ShardedValueModel,
    allocate,
    check_filled,
    choose_experts_function,
    iter_local,
    keep_local_experts,
    list_unread,
    load_weights,
    recompute_layers,
    shard_model,
)
from mcore_rl.engine.fsdp.start_check import StartCheck
from mcore_rl.engine.fsdp.vision import VisionInputs
from mcore_rl.engine.offload import HostMirror, move_storages
from mcore_rl.engine.packing import MicroBatch, PackSplit, build_micro_batches
from mcore_rl.engine.steps import (
    Result,
    ScoreSettings,
    choose_scores,
    compute_learning_rate,
    compute_logprob_gaps,
    compute_loss,
    count_tokens,
    pop_scores,
    reduce_metrics,
    restore_batch_order,
)
from mcore_rl.models.base import (
    CLASSIFICATION,
    SEQUENCE,
    HFConfig,
    estimate_cost,
    get_frozen_prefixes,
    get_model_sizes,
    has_images,
    read_config,
)
from mcore_rl.models.heads import build_value_config, list_value_changes
from mcore_rl.models.transformers_model import build_empty_model, map_sharded_weights
from mcore_rl.parallel.devices import detect_device
from mcore_rl.parallel.store import join_world
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import ShardedRanks
from mcore_rl.reshard.rules import Shard, StackedRows, Weight
from mcore_rl.weight_sync.spec import ShardFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FSDPEngine(BaseEngine):
    """A language model. `total_steps=0` builds no optimizer."""

    shard_format: ClassVar[ShardFormat] = "rows"
    _root_class: ClassVar[type[ShardedPolicy]] = ShardedPolicy
    _kind: ClassVar[str] = ""  # suffix of the architecture of a value model

    def initialize(self) -> None:
        settings, layout = self.spec.engine, self.layout
        device = detect_device()
        self.device = device.select_local()
        torch.set_num_threads(settings.threads_per_rank)
        if not dist.is_initialized():
            join_world(device.backend, self.spec.timeout_s)
        self.world_rank, self.num_steps = dist.get_rank(), 0
        self.hf_config = self._read_model_config()
        self.meshes = RankMeshes.create(self.device.type, layout, settings.fsdp.num_replicas)
        self.ranks = ShardedRanks(layout.world_size, settings.fsdp.num_replicas, layout.ep)
        self.weights = map_sharded_weights(self.hf_config, layout.ep)
        register_functions()
        with torch.no_grad():
            self._start_check.compare_layers()
        model = build_empty_model(self.hf_config, attn_implementation=ATTENTION)
        experts: list[Any] = []
        dtype = DTYPES[self.spec.model.dtype]
        choose_experts_function(model, dtype)
        if self.meshes.ep_group is not None:
            by_name = {weight.name: weight for weight in self.weights}
            experts = keep_local_experts(model, by_name, self.meshes.ep_group, dtype)
        self.adapter_weights: tuple[Weight, ...] = ()
        if settings.lora.rank:
            lora.attach_adapters(model, settings.lora)
            self.adapter_weights = lora.map_factors(model)
        if settings.recompute.granularity == "full":
            recompute_layers(model)
        if not self.spec.total_steps:  # buffers such as rotary frequencies stay wide
            for name, parameter in model.named_parameters():
                if not name.startswith("score."):
                    parameter.data = parameter.data.to(dtype)
        self.root = self._root_class(model)
        shard_model(
            self.root,
            experts,
            self.meshes,
            dtype,
            is_training=self.spec.total_steps > 0,
            cpu_offload=settings.fsdp.cpu_offload,
        )
        is_on_host = settings.fsdp.cpu_offload
        allocate(self.root, torch.device("cpu") if is_on_host else self.device, self.device)
        self.reader = CheckpointReader(self.spec.model.path)
        load_weights(self.root, self._iter_local(self.weights), self.weights, self.reader)
        lora.initialize_factors(self._iter_local(self.adapter_weights), self.spec.seed)
        self.parameters = [p for p in self.root.parameters() if p.requires_grad]
        self.optimizer = self._build_optimizer() if self.spec.total_steps else None
        self._mirrors = {"parameters": HostMirror(), "optimizer state": HostMirror()}
        self.vision = self._build_vision(model)
        check_filled(self.root, self.spec.model.path)
        self.root.eval()  # always: scores of a training pass are those of a scoring pass
        with torch.no_grad():
            self._start_check.compare_weights(self.root, dtype)
        self.root.reshard()  # type: ignore[operator]

    def _build_vision(self, model: PreTrainedModel) -> VisionInputs | None:
        """Return what makes inputs of images, for a model that takes them."""
        folder = self.spec.images_folder
        if (tokens := ImageTokens.load(self.spec.model.path)) is None:
            return None
        self.root.runs_tower = bool(folder)
        torch.backends.cudnn.allow_tf32 = False  # of patches in float32; by default it is on
        return VisionInputs(model, tokens, ImageStore.open(folder) if folder else None)

    def _read_model_config(self) -> HFConfig:
        config = read_config(self.spec.model.path)
        config.pop("quantization_config", None)  # tensors are read dequantized
        return build_value_config(config, self._kind) if self._kind else config

    @property
    def config_changes(self) -> HFConfig:
        config = read_config(self.spec.model.path)
        return list_value_changes(config, self._kind) if self._kind else {}

    def _build_optimizer(self) -> torch.optim.AdamW:
        """Build AdamW; as in Megatron neither biases nor norms decay."""
        config, groups = self.spec.engine.optimizer, dict[tuple[DeviceMesh, bool], list[DTensor]]()
        for name, parameter in self.root.named_parameters():
            if parameter.requires_grad:
                assert isinstance(parameter, DTensor)
                decays = parameter.dim() > 1 and not name.endswith("bias")
                # torch's fused loops take parameters of one mesh.
                groups.setdefault((parameter.device_mesh, decays), []).append(parameter)
        return torch.optim.AdamW(
            [
                {"params": members, "weight_decay": config.weight_decay if decays else 0.0}
                for (_, decays), members in groups.items()
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )

    @property
    def _start_check(self) -> StartCheck:
        return StartCheck(
            self.spec.model.path,
            self.hf_config,
            self._root_class,
            None if self._kind else choose_scores(self.spec, 1.0, None),
            self.spec.engine.fsdp.packing,
            self.spec.engine.lora,
            self._split,
            self.meshes.context_group,
            self.device,
        )

    @property
    def _split(self) -> PackSplit:
        cp = self.layout.cp
        return PackSplit(cp=cp, cp_rank=self.world_rank % cp, kind="contiguous")

    def _build_pack(self, micro: MicroBatch) -> Pack:
        return Pack(micro.lengths, self.meshes.context_group)

    def _score(self, micro: MicroBatch, settings: ScoreSettings | None) -> Result:
        scores: Result = self.root(micro, self._build_pack(micro), settings)
        return scores

    def _build_micro_batches(self, batch: Batch) -> list[MicroBatch]:
        settings = self.spec.engine
        # A sample above the limit has its own micro-batch.
        limit = settings.max_tokens_per_micro_batch if settings.fsdp.packing else 1
        group = self.meshes.data["dp"].get_group()
        cost = estimate_cost(self.hf_config)
        micros = build_micro_batches(batch, limit, self._split, cost, self.device, group=group)
        vision = self.vision
        return [vision.add(batch, micro) for micro in micros] if vision is not None else micros

    @torch.no_grad()
    def infer_batch(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        adapters: bool = True,
        replay: bool = True,
    ) -> Batch:
        self.require("parameters")
        micros = self._build_micro_batches(batch.select_inputs())
        settings = choose_scores(self.spec, temperature, None)
        base = contextlib.nullcontext() if adapters else lora.disable_adapters(self.root)
        with base:
            results = [self._score(micro, settings) for micro in micros]
        self.root.reshard()  # type: ignore[operator]  # a forward pass leaves the root whole
        return batch.with_columns(**self._collect(batch, micros, results))

    def _collect(
        self, batch: Batch, micros: list[MicroBatch], results: list[Result]
    ) -> dict[str, Jagged]:
        group = self.meshes.context_group
        return {
            name: restore_batch_order(batch, micros, results, name, group) for name in results[0]
        }

    def train_batch(
        self, batch: Batch, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> Metrics:
        _, results = self._accumulate(batch, loss_function, temperature)
        return self._take_step(results)

    def train_batch_with_scores(
        self,
        batch: Batch,
        loss_function: LossFunction,
        *,
        temperature: float = 1.0,
        bounds: Mapping[str, float],
    ) -> ScoredStep:
        micros, results = self._accumulate(batch, loss_function, temperature, with_scores=True)
        micro_scores = pop_scores(results)
        scores = Batch({**self._collect(batch, micros, micro_scores)})
        gaps = compute_logprob_gaps(micros, micro_scores, self.device)
        if find_gaps_beyond(gaps, bounds):
            return ScoredStep(scores, gaps, {})
        return ScoredStep(scores, gaps, self._take_step(results))

    @record_function("forward_backward")
    def _accumulate(
        self,
        batch: Batch,
        loss_function: LossFunction,
        temperature: float,
        *,
        with_scores: bool = False,
    ) -> tuple[list[MicroBatch], list[Result]]:
        """Run all micro-batches forward and backward; return them and their results."""
        self.require("parameters", "gradients", "optimizer state")
        if self.optimizer is None:
            raise RuntimeError("a training step on an engine built for inference (total_steps=0)")
        self.optimizer.zero_grad()
        micros = self._build_micro_batches(batch)
        counts = count_tokens(micros, self.device, None)
        settings = choose_scores(self.spec, temperature, loss_function, with_scores=with_scores)
        results = []
        for micro in micros:
            loss, result = compute_loss(
                self._score(micro, settings),
                loss_function,
                counts,
                micro,
                self.meshes.context_group,
                with_scores=with_scores,
            )
            loss.backward()
            results.append(result)
        return micros, results

    @record_function("optimizer_step")
    def _take_step(self, results: list[Result]) -> Metrics:
        """Take the optimizer step of the accumulated gradients; return train_batch's metrics."""
        assert self.optimizer is not None
        config = self.spec.engine.optimizer
        norm = self._clip_gradients(config.clip_grad)
        metrics = reduce_metrics(results, None)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradients is {norm}: no step was taken")
        self.num_steps += 1
        lr = compute_learning_rate(config, self.num_steps, self.spec.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return {**metrics, "grad_norm": norm, "lr": lr}

    def _clip_gradients(self, limit: float) -> float:
        """Clip to a norm over all ranks; return it before. 0 clips nothing.

        torch.nn.utils.clip_grad_norm_ takes no parameters of several meshes.
        """
        local = [p.grad.to_local() for p in self.parameters if isinstance(p.grad, DTensor)]
        norms = torch._foreach_norm([grad for grad in local if grad.numel()], 2)
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if norms:
            squares += torch.stack(norms).to(self.device, torch.float64).square().sum()
        dist.all_reduce(squares)
        # Each replica has added the squares of all shards.
        norm = math.sqrt(float(squares) / self.spec.engine.fsdp.num_replicas)
        if limit and norm > limit:
            torch._foreach_mul_(local, limit / (norm + 1e-6))
        return norm

    def get_local_weights(self) -> LocalWeights:
        self.require("parameters")
        if not self.adapter_weights:
            local = self._iter_local(self.weights)
            return LocalWeights({weight.name: rows for weight, _, rows in local})
        return LocalWeights({}, {weight.name: merge for weight, merge in self._iter_merged()})

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.require("parameters")
        dtype = DTYPES[self.spec.model.dtype]
        local = dict(self._iter_merged())
        for weight in self.weights:
            holders = self.ranks.get_holders(weight)
            rows = local[weight]() if weight in local else None
            sent_dtype = torch.float32 if weight.axis is None else dtype  # buffers stay wide
            full = sharded_rows.gather_rows(weight, holders, rows, sent_dtype, self.device)
            if full is None:
                continue
            first = 0
            for tensor in weight.rule.tensors:
                end = first + (tensor.shape[0] if tensor.shape else 0)
                part = full[first:end] if tensor.shape else full
                # A copy also on the CPU: a view would keep the memory of the whole stack.
                yield tensor.name, part.to("cpu", copy=True)
                first = end
        if self.is_main_rank and not self._kind:
            expected = {tensor.name for w in self.weights for tensor in w.rule.tensors}
            for name in list_unread(self.reader, expected):
                yield name, self.reader.read_tensor(name).to(dtype)

    def _iter_local(
        self, weights: tuple[Weight, ...]
    ) -> Iterator[tuple[Weight, Shard, torch.Tensor]]:
        return iter_local(self.root, weights, self.ranks, self.world_rank)

    def _iter_merged(self) -> Iterator[tuple[Weight, Callable[[], torch.Tensor]]]:
        """Yield what returns this rank's rows of each weight, merged with its adapter."""
        factors, config = lora.gather_factors(self.root.model), self.spec.engine.lora
        for weight, shard, rows in self._iter_local(self.weights):
            adapter, local = factors.get(weight.name), range(0)
            if isinstance(weight.rule, StackedRows):
                local = weight.rule.get_rows(shard)
            yield weight, partial(_merge, rows, adapter, local, config)

    def collect_factors(self) -> list[Factors]:
        if not self.adapter_weights:
            return []
        rules = {weight.name: weight for weight in self.weights}
        factors = lora.list_factors(self.root.model, rules)
        return factors if self.is_main_rank else []

    def move(self, place: Place, parts: frozenset[str]) -> None:
        if "gradients" in parts and self.optimizer is not None:
            self.optimizer.zero_grad()
        tensors = {part: partial(self.list_tensors, part) for part in self._mirrors}
        move_storages(tensors, place, parts, self._mirrors, self.device)

    def list_tensors(self, part: str) -> list[torch.Tensor]:
        """Return this rank's shards of "parameters", with buffers, or of "optimizer state"."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        tensors: Any = [value for state in states for value in state.values()]
        if part == "parameters":
            tensors = (*self.root.parameters(), *self.root.buffers())
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]

    def save_checkpoint(self, path: Path) -> None:
        self.require("parameters", "optimizer state")
        facts = self._facts | {"num_steps": self.num_steps}
        sharded_rows.save(path, self._collect_state(), self.ranks, facts)

    def load_checkpoint(self, path: Path) -> None:
        self.require("parameters", "optimizer state")

        def map_weights(ep: int) -> tuple[Weight, ...]:
            return map_sharded_weights(self.hf_config, ep) + self.adapter_weights

        state = self._collect_state()
        self.num_steps = sharded_rows.load(path, state, self._facts, map_weights)
        if self.optimizer is not None:
            for moments in self.optimizer.state.values():
                moments["step"] = torch.tensor(float(self.num_steps))

    @property
    def _facts(self) -> dict[str, object]:
        lora_config = self.spec.engine.lora
        facts: dict[str, object] = {
            "engine": "fsdp",
            "architecture": self.hf_config["architectures"][0],
            "has_optimizer": self.optimizer is not None,
            "lora_rank": lora_config.rank,
        }
        if lora_config.rank:
            # With another alpha the same factors are another model; with fewer targets, factors of
            # the checkpoint would be left out without a word.
            facts["lora_alpha"] = lora_config.alpha
            facts["lora_targets"] = sorted(set(lora_config.targets))
        return facts

    def _collect_state(self) -> sharded_rows.State:
        """Return weights and Adam's moments, which are zeros before the first step."""
        weights = self.weights + self.adapter_weights
        state = {f"weight.{item[0].name}": item for item in self._iter_local(weights)}
        if self.optimizer is None:
            return state
        parameters = dict(self.root.model.named_parameters())
        for weight, shard, local in list(state.values()):
            parameter = parameters.get(weight.name)
            if parameter is None or not parameter.requires_grad:  # a buffer, or frozen
                continue
            moments = self.optimizer.state[parameter]
            if not moments:
                moments["step"] = torch.tensor(0.0)
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in moments:
                    moments[moment] = torch.zeros_like(parameter)
                rows = moments[moment].to_local().view(local.shape)
                state[f"{moment}.{weight.name}"] = (weight, shard, rows)
        return state


class FSDPValueEngine(FSDPEngine):
    """A value model: `infer_batch` adds "values". A language model's gets a head of zeros."""

    _root_class = ShardedValueModel
    _kind = CLASSIFICATION


class FSDPRewardEngine(FSDPValueEngine):
    """A value model whose value at the last token is the score of a sequence."""

    _kind = SEQUENCE


def _merge(
    rows: torch.Tensor,
    adapter: tuple[torch.Tensor, torch.Tensor] | None,
    local: range,
    config: LoRAConfig,
) -> torch.Tensor:
    """Return rows of a weight with its adapter merged, computed in float32."""
    if adapter is None:
        return rows
    a, b = adapter
    local_b = b[local.start : local.stop].to(rows.device, torch.float32)
    wide_a, scale = a.to(rows.device, torch.float32), config.alpha / config.rank
    merged = torch.addmm(rows.float(), local_b, wide_a, alpha=scale)
    return merged.to(rows.dtype)


def _check_settings(key: str, engine: EngineConfig, device_type: str) -> None:
    """Check what can be checked without the model."""
    del device_type
    validate_fsdp(key, engine)


def _check_model(key: str, engine: EngineConfig, hf_config: HFConfig) -> None:
    """Check that the layout divides the model, and that its attention takes packs."""
    sizes = get_model_sizes(hf_config)
    if frozen := get_frozen_prefixes(hf_config):
        raise ConfigError(
            f"{key}.backend='fsdp': {hf_config['architectures']} has a frozen tower "
            f"({', '.join(frozen)}), which this engine would train; allowed: 'megatron'"
        )
    if sizes.has_indexer:
        raise ConfigError(
            f"{key}.backend='fsdp': the indexer of {hf_config['architectures'][0]} in transformers "
            "needs a mask, which packs do not have; allowed: 'megatron'"
        )
    for name in ("cp", "ep") if has_images(hf_config) else ():
        if (size := getattr(engine.layout, name)) > 1:
            raise ConfigError(
                f"{key}.layout.{name}={size}: model_type={hf_config['model_type']!r} takes images, "
                "and their tokens and experts are not divided over ranks; allowed: 1"
            )
    check_divides(
        f"{key}.layout.cp", engine.layout.cp, "attention heads", sizes.num_attention_heads
    )
    if engine.layout.ep > 1 and not sizes.num_experts:
        raise ConfigError(
            f"{key}.layout.ep={engine.layout.ep}: the model has no experts; allowed: 1"
        )
    if sizes.num_experts:
        check_divides(f"{key}.layout.ep", engine.layout.ep, "experts", sizes.num_experts)


_OPTIMIZER = (
    "lr", "min_lr", "schedule", "warmup_steps", "wsd_decay_steps", "beta1", "beta2", "eps",
    "weight_decay", "clip_grad",
)  # fmt: skip

BACKEND = Backend(
    engines={
        "language_model": FSDPEngine,
        "value_model": FSDPValueEngine,
        "reward_model": FSDPRewardEngine,
    },
    takes_images=True,
    family=TRANSFORMERS,
    settings=(
        "layout.dp",
        "layout.cp",
        "layout.ep",
        "fsdp",
        "lora",
        "max_tokens_per_micro_batch",
        "logprob_chunk_bytes",
        "recompute.granularity",
        *(f"optimizer.{name}" for name in _OPTIMIZER),
    ),
    check_settings=_check_settings,
    check_model=_check_model,
)
