"""Search of layouts: the fastest of trainer and servers that fit a cluster, by predicted step time.

Trainer and servers are searched apart, for each share of the devices, and then joined. The search
estimates memory in closed form (docs/planning_step.md); the fastest are then planned as
`mcore-rl plan memory` does, and those that do not fit are dropped.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mcore_rl.config.checks import check_at_least
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import are_colocated
from mcore_rl.config.resolve_engine import resolve_layout, resolve_model_layout
from mcore_rl.config.schema import EngineConfig, Layout, RLConfig, RolloutConfig
from mcore_rl.models.base import HFConfig, get_model_sizes
from mcore_rl.planner.flops import ModelWork, count_work
from mcore_rl.planner.generation import Lengths, ServerModel
from mcore_rl.planner.hardware import Hardware
from mcore_rl.planner.memory import Conditions, plan_memory
from mcore_rl.planner.step import StepTime, get_dtype, predict_step
from mcore_rl.planner.training import BFLOAT16, FLOAT32, Load, TrainingModel

# CUDA context, NCCL buffers, workspaces of libraries and fragmentation of one process.
RESERVED_BYTES = 6e9
NUM_BEST, NUM_EXCEEDING = 10, 5
_MOST_EXCESS = 1.3  # of the memory of a device: what "nearly fits" means
_MOST_CHECKED = 80  # candidates whose memory is planned
_SERVED_SHARE = 0.88  # of memory, for weights and cache of servers: the rest is graphs and buffers
_SHARES = tuple(n / 8 for n in range(1, 8))  # of separate devices that train
_LOGITS_BYTES = 2 << 29  # actor.logprob_chunk_bytes of a GPU, and its gradients


@dataclass(frozen=True, slots=True)
class Candidate:
    """Layouts of trainer and servers with the step that they give."""

    engine: EngineConfig
    rollout: RolloutConfig
    training_bytes: float  # of the fullest device while it trains
    serving_bytes: float  # while it generates, with the KV cache
    step: StepTime
    reason: str = ""  # what decides its place

    def list_overrides(self) -> list[str]:
        """Return settings as they are pasted after `mcore-rl rl`."""
        layout, rollout = self.engine.layout, self.rollout
        values: dict[str, object] = {
            f"actor.layout.{axis}": getattr(layout, axis)
            for axis in ("tp", "pp", "cp", "dp", "ep", "etp", "vpp")
        }
        for name in ("first_stage_layers", "last_stage_layers"):  # null replaces a recipe's
            layers = getattr(layout, name)
            values[f"actor.layout.{name}"] = "null" if layers is None else layers
        values |= {
            "actor.recompute.granularity": self.engine.recompute.granularity,
            "actor.max_tokens_per_micro_batch": self.engine.max_tokens_per_micro_batch,
            "rollout.num_servers": rollout.num_servers,
            "rollout.tp": rollout.tp,
            "rollout.dp": rollout.dp,
            "rollout.nodes_per_server": rollout.nodes_per_server,
            "rollout.ep": str(rollout.ep).lower(),
            "rollout.kv_cache_bytes": rollout.kv_cache_bytes,
        }
        return [f"{key}={value}" for key, value in values.items()]


@dataclass(frozen=True, slots=True)
class ExceedingLayout:
    """A layout that does not fit by a little."""

    engine: EngineConfig
    missing_bytes: float
    largest: str  # kind of memory that takes most
    step_s: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    best: tuple[Candidate, ...]  # fastest first
    exceeding: tuple[ExceedingLayout, ...]
    num_layouts: int  # of trainers and servers that were predicted


@dataclass(frozen=True, slots=True)
class _Trainer:
    engine: EngineConfig
    kinds: dict[str, float]  # bytes by kind
    update_s: float

    @property
    def num_bytes(self) -> float:
        return sum(self.kinds.values())


def search_layouts(
    config: RLConfig,
    model: HFConfig,
    hardware: Hardware,
    num_devices: int,
    lengths: Lengths,
) -> SearchResult:
    """Search the layouts of a run on a cluster.

    Args:
        config: Settings with batch sizes, trainer and placement; its layouts are replaced.
        model: config.json of the policy.

    Raises:
        ConfigError: No layout fits; the message says what is missing.
    """
    check_at_least("--devices", num_devices, 1)
    work = count_work(model)
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    tokens = samples * (lengths.mean + lengths.prompt) / config.algorithm.num_mini_batches
    load = Load(tokens, lengths.sequence)
    is_shared = are_colocated(config.placement, "actor", "rollout")
    splits = _list_splits(num_devices, hardware, is_shared)
    exceeding: list[_Trainer] = []
    candidates: list[Candidate] = []
    count = 0
    for num_training, num_serving in splits:
        trainers = []
        for trainer in _list_trainers(config, model, work, hardware, num_training, load):
            count += 1
            if trainer.num_bytes <= hardware.memory_bytes:
                trainers.append(trainer)
            elif trainer.num_bytes <= _MOST_EXCESS * hardware.memory_bytes:
                exceeding.append(trainer)
        servers = list(_list_servers(config, model, work, hardware, num_serving, lengths))
        count += len(servers)
        trainers = _select_fastest(trainers)
        servers.sort(key=lambda pair: pair[1])
        for trainer, (rollout, _, serving_bytes) in itertools.product(trainers, servers[:4]):
            planned = _replace_layouts(config, trainer.engine, rollout)
            step = predict_step(planned, model, hardware, lengths, work=work)
            candidates.append(
                Candidate(trainer.engine, rollout, trainer.num_bytes, serving_bytes, step)
            )
    candidates.sort(key=lambda candidate: candidate.step.step_s)
    if not candidates:
        raise ConfigError(_explain_nothing(work, hardware, num_devices, exceeding))
    checked = _check_memory(candidates, config, model, hardware, exceeding)
    if not checked:
        raise ConfigError(_explain_nothing(work, hardware, num_devices, exceeding))
    best = [replace(c, reason=_explain(c, checked[0])) for c in checked]
    return SearchResult(tuple(best), _list_exceeding(exceeding, hardware), count)


def _check_memory(
    candidates: Sequence[Candidate],
    config: RLConfig,
    model: HFConfig,
    hardware: Hardware,
    exceeding: list[_Trainer],
) -> list[Candidate]:
    """Return the fastest that fit by their memory plans; add other trainers to `exceeding`."""
    conditions = Conditions(gpus_per_node=hardware.devices_per_node)
    fitting: list[Candidate] = []
    too_large: list[Layout] = []
    num_checked = 0
    for candidate in candidates:
        if candidate.engine.layout in too_large:
            continue
        if num_checked == _MOST_CHECKED:
            break
        num_checked += 1
        planned = _replace_layouts(config, candidate.engine, candidate.rollout)
        moments = plan_memory(planned, model, conditions).moments
        training = max((m for m in moments if m.role != "rollout"), key=lambda m: m.total)
        serving = max(moment.total for moment in moments if moment.role == "rollout")
        if training.total > hardware.memory_bytes:
            too_large.append(candidate.engine.layout)
            kinds: dict[str, float] = dict(training.kinds)
            exceeding.append(_Trainer(candidate.engine, kinds, candidate.step.update_s))
        elif serving <= hardware.memory_bytes:
            fitting.append(replace(candidate, training_bytes=training.total, serving_bytes=serving))
        if len(fitting) == NUM_BEST:
            break
    return fitting


def _select_fastest(trainers: list[_Trainer]) -> list[_Trainer]:
    """Return the fastest trainers, and the smallest of the others; one for each layout.

    Layouts that differ in vpp alone count as one.
    """
    fastest: dict[tuple[int, ...], _Trainer] = {}
    for trainer in sorted(trainers, key=lambda t: t.update_s):
        layout = trainer.engine.layout
        fastest.setdefault((layout.tp, layout.pp, layout.cp, layout.ep), trainer)
    trainers = list(fastest.values())
    smallest = sorted(trainers[NUM_BEST:], key=lambda trainer: trainer.num_bytes)
    return trainers[:NUM_BEST] + smallest[:NUM_BEST]


def _list_splits(num_devices: int, hardware: Hardware, is_shared: bool) -> list[tuple[int, int]]:
    """Return the devices of trainer and servers; separate ones have nodes of their own."""
    if is_shared:
        return [(num_devices, num_devices)]
    node = hardware.devices_per_node
    unit = node if num_devices >= 2 * node else 1
    shares = {max(unit, round(num_devices * share / unit) * unit) for share in _SHARES}
    return [(n, num_devices - n) for n in sorted(shares) if num_devices - n >= unit]


def _list_powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _list_trainers(
    config: RLConfig,
    model: HFConfig,
    work: ModelWork,
    hardware: Hardware,
    num_devices: int,
    load: Load,
) -> Iterator[_Trainer]:
    """Yield trainers on all devices, with the lightest recompute that fits each layout."""
    sizes = get_model_sizes(model)
    num_layers = len(work.layers)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    axes = itertools.product(
        _list_powers(min(num_devices, hardware.devices_per_node)),
        _list_powers(min(num_devices, num_layers, 64)),
        _list_powers(max(1, min(num_devices, longest // 4096))),
        _list_powers(max(1, sizes.num_experts)),
    )
    for tp, pp, cp, ep in axes:
        dp, rest = divmod(num_devices, tp * pp * cp)
        if rest or not dp or load.tokens < dp * load.sequence:
            continue
        for vpp in (1, 2, 4) if pp > 1 else (1,):
            layout = Layout(tp, pp, cp, dp, ep, 1, vpp)
            if not _fit_stages(layout, num_layers):
                continue
            try:
                resolve_layout("actor.layout", layout)
                resolve_model_layout("actor.layout", layout, sizes)
            except ConfigError:
                continue
            trainer = _choose_recompute(config, work, hardware, layout, load, longest)
            if trainer is not None:
                yield trainer


def _fit_stages(layout: Layout, num_layers: int) -> bool:
    """Set the layers of the first and last stage where the chunks cannot be equal."""
    chunks = layout.pp * layout.vpp
    if num_layers % chunks == 0:
        return True
    inner = math.ceil(num_layers / chunks)
    rest = num_layers - inner * (chunks - 2)
    if chunks < 2 or rest < 2 or layout.vpp > 1:
        return False
    layout.first_stage_layers, layout.last_stage_layers = rest - rest // 2, rest // 2
    return True


def _choose_recompute(
    config: RLConfig,
    work: ModelWork,
    hardware: Hardware,
    layout: Layout,
    load: Load,
    longest: int,
) -> _Trainer | None:
    """Return a trainer with the fastest recompute that fits, else the smallest."""
    trainer = None
    for granularity in ("none", "full"):
        engine = copy.deepcopy(config.actor)
        engine.layout = layout
        engine.recompute.granularity = granularity
        engine.max_tokens_per_micro_batch = max(-(-longest // layout.cp), 4096)
        planner = TrainingModel(work, engine, hardware, get_dtype(config, config.actor))
        kinds = estimate_training_bytes(planner)
        fits = sum(kinds.values()) <= hardware.memory_bytes
        if not fits and sum(kinds.values()) > _MOST_EXCESS * hardware.memory_bytes:
            continue
        trainer = _Trainer(engine, kinds, planner.predict_update(load).total_s)
        if fits:
            break
    return trainer


def estimate_training_bytes(planner: TrainingModel) -> dict[str, float]:
    """Estimate the bytes of the fullest device while it trains, by kind.

    Weights, float32 gradients, Adam's moments and main weights. Activations: per token and layer
    the inputs and outputs of products and norms, over tp; a pipeline rank stores those of pp
    micro-batches, of an interleaved schedule up to (1 + 1 / vpp) times as many (arXiv:2104.04473,
    section 2.2), with full recompute the inputs of layers and one layer.
    """
    engine, work, layout = planner.engine, planner.work, planner.layout
    state = planner.count_optimizer_parameters() * 3 * FLOAT32
    tokens, hidden = engine.max_tokens_per_micro_batch, work.hidden_size
    layer_elements = [
        5 * hidden
        + 2 * layer.heads_elements
        + layer.act_elements
        + 2 * layer.topk * hidden * layout.tp
        for layer in work.layers
    ]
    largest = max(layer_elements)
    num_layers = math.ceil(len(work.layers) / layout.pp)
    in_flight = (
        layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.vpp))
        if layout.vpp > 1
        else layout.pp
    )
    stored = (
        hidden if engine.recompute.granularity == "full" else sum(layer_elements) / len(work.layers)
    )
    elements = num_layers * in_flight * stored + 2 * largest
    return {
        "weights": sum(planner.count_local_parameters()) * BFLOAT16,
        "gradients": sum(planner.count_trained_parameters()) * FLOAT32,
        "optimizer": 0.0 if engine.optimizer.cpu_offload else state,
        "activations": elements * tokens / layout.tp * BFLOAT16 + _LOGITS_BYTES,
        "reserved": RESERVED_BYTES,
    }


def _list_servers(
    config: RLConfig,
    model: HFConfig,
    work: ModelWork,
    hardware: Hardware,
    num_devices: int,
    lengths: Lengths,
) -> Iterator[tuple[RolloutConfig, float, float]]:
    """Yield servers that fit, the seconds in which they generate, and their bytes."""
    sizes = get_model_sizes(model)
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    node = hardware.devices_per_node
    longest = lengths.prompt + lengths.longest
    for workers in _list_powers(min(num_devices, 8 * node)):
        if num_devices % workers:
            continue
        for tp in _list_powers(workers):
            dp, has_experts = workers // tp, sizes.num_experts > 0
            if sizes.num_attention_heads % tp or (dp > 1 and not has_experts):
                continue
            for ep in (True, False) if has_experts and workers > 1 else (False,):
                if (dp > 1 and not ep) or (ep and sizes.num_experts < workers):
                    continue
                rollout = copy.deepcopy(config.rollout)
                rollout.tp, rollout.dp, rollout.ep = tp, dp, ep
                rollout.num_servers = num_devices // workers
                rollout.nodes_per_server = max(1, workers // node)
                weights = _count_served_bytes(work, rollout)
                free = hardware.memory_bytes * _SERVED_SHARE - RESERVED_BYTES - weights
                server = ServerModel(work, model, rollout, hardware)
                if free < server.kv_bytes * longest:
                    continue
                share = max(1, round(samples / rollout.num_servers))
                needed = server.kv_bytes * longest * min(share, 1024)
                rollout.kv_cache_bytes = int(min(free, needed)) >> 20 << 20
                seconds = server.predict(
                    lengths.draw(share).tolist(), lengths.prompt, config.algorithm.group_size
                ).total_s
                yield rollout, seconds, weights + rollout.kv_cache_bytes + RESERVED_BYTES


def _count_served_bytes(work: ModelWork, rollout: RolloutConfig) -> float:
    """Return the bytes of a server's weights on one worker."""
    itemsize = 1 if rollout.quantization is not None else BFLOAT16
    expert = sum(layer.expert_parameters for layer in work.layers)
    dense = work.parameters - expert
    return itemsize * (dense / rollout.tp + expert / rollout.num_workers)


def _replace_layouts(config: RLConfig, engine: EngineConfig, rollout: RolloutConfig) -> RLConfig:
    planned = copy.copy(config)
    planned.actor, planned.rollout = engine, rollout
    return planned


# Explanations


def _list_parts(step: StepTime) -> dict[str, float]:
    n = step.num_mini_batches
    update = step.update
    return {
        "generation": step.generation.prefill_s + step.generation.decode_s,
        "expert-parallel exchange of servers": step.generation.expert_parallel_s,
        "tail of generation": step.generation.tail_s,
        "log-probs": step.log_probs_s + step.reference_s + step.values_s,
        "forward and backward": n * update.compute_s,
        "recompute": n * update.recompute_s,
        "tensor-parallel communication": n * update.tensor_parallel_s,
        "expert-parallel exchange": n * update.expert_parallel_s,
        "context-parallel communication": n * update.context_parallel_s,
        "pipeline bubble": n * (update.bubble_s + update.pipeline_s),
        "data-parallel communication": n * update.data_parallel_s,
        "optimizer": n * update.optimizer_s,
        "offload": step.offload_s,
        "weight sync": step.weight_sync_s,
    }


def _explain(candidate: Candidate, first: Candidate) -> str:
    """Return the largest part of the fastest, and of others the part that costs them most."""
    parts, base = _list_parts(candidate.step), _list_parts(first.step)
    if candidate is first or candidate.step.step_s == first.step.step_s:
        name = max(parts, key=lambda part: parts[part])
        return f"{name} is {parts[name] / sum(parts.values()):.0%} of the work"
    name = max(parts, key=lambda part: parts[part] - base[part])
    return f"{name}: {parts[name] - base[name]:+.1f} s against the first"


def _list_exceeding(
    exceeding: Sequence[_Trainer], hardware: Hardware
) -> tuple[ExceedingLayout, ...]:
    fastest = sorted(exceeding, key=lambda trainer: trainer.update_s)[:NUM_EXCEEDING]
    return tuple(
        ExceedingLayout(
            trainer.engine,
            trainer.num_bytes - hardware.memory_bytes,
            max(trainer.kinds, key=lambda kind: trainer.kinds[kind]),
            trainer.update_s,
        )
        for trainer in fastest
    )


def _explain_nothing(
    work: ModelWork, hardware: Hardware, num_devices: int, exceeding: Sequence[_Trainer]
) -> str:
    state = work.parameters * (BFLOAT16 + FLOAT32 + 3 * FLOAT32)
    text = (
        f"--devices={num_devices}: no layout of {work.parameters / 1e9:.1f} B parameters fits "
        f"{num_devices} x {hardware.name} of {hardware.memory_bytes / 1e9:.0f} GB; weights, "
        f"gradients and optimizer are {state / 1e9:,.0f} GB of "
        f"{num_devices * hardware.memory_bytes / 1e9:,.0f}"
    )
    if exceeding:
        least = min(exceeding, key=lambda trainer: trainer.num_bytes)
        missing = (least.num_bytes - hardware.memory_bytes) / 1e9
        text += f"; the smallest lacks {missing:.1f} GB a device"
    return f"{text}; allowed: more devices, actor.optimizer.cpu_offload=true, or adapters"
