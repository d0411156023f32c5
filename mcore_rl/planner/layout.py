"""Search of layouts: the fastest of trainer and servers that fit a cluster, by predicted step time.

Trainer and servers are searched apart, for each share of the devices, and then joined. The search
estimates memory in closed form (`estimate_training_bytes`); the fastest are then planned as
`mcore-rl plan memory` does, and those that do not fit are dropped. Estimates are not exact: layouts
that leave less than a tenth of a device come last. Critic, reward model and teachers on the devices
of the actor follow its layout.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from mcore_rl.config.checks import check_at_least
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import are_colocated, validate_rl
from mcore_rl.config.rules_engine import (
    validate_layout,
    validate_megatron,
    validate_model_layout,
)
from mcore_rl.config.schema import (
    CriticConfig,
    EngineConfig,
    Layout,
    RecomputeConfig,
    RLConfig,
    RolloutConfig,
)
from mcore_rl.engine.base import load_backend
from mcore_rl.inference.kv_cache import GPU_SHARE
from mcore_rl.jobs.run_plan import ACTOR, CRITIC, REFERENCE, Role, RunPlan, plan_run
from mcore_rl.models.base import HFConfig, get_model_sizes, read_config
from mcore_rl.planner.activations import DEFAULT_CHUNK_BYTES
from mcore_rl.planner.fixes import format_value
from mcore_rl.planner.flops import LayerWork, ModelWork, count_work
from mcore_rl.planner.generation import Lengths, ServerModel
from mcore_rl.planner.hardware import Hardware
from mcore_rl.planner.memory import Conditions, plan_memory
from mcore_rl.planner.step import StepTime, get_dtype, predict_step
from mcore_rl.planner.training import FLOAT32, Load, TrainingModel
from mcore_rl.trainers.device_sharing import ROLLOUT

NUM_BEST, NUM_EXCEEDING = 10, 5
_MOST_EXCESS = 1.3  # of the memory of a device: what "nearly fits" means
_MOST_CHECKED = 40  # candidates whose memory is planned
_SHARES = tuple(n / 8 for n in range(1, 8))  # of separate devices that train


@dataclass(frozen=True, slots=True)
class Candidate:
    """Layouts of a run with the step that they give."""

    config: RLConfig  # with these layouts
    overrides: tuple[str, ...]  # settings as they are pasted after `mcore-rl rl`
    training_bytes: float  # of the fullest device while it trains
    serving_bytes: float  # while it generates, with the KV cache
    step: StepTime
    has_margin: bool = True  # whether each device has a tenth of its memory left
    reason: str = ""  # what decides its place

    @property
    def engine(self) -> EngineConfig:
        return self.config.actor

    @property
    def rollout(self) -> RolloutConfig:
        return self.config.rollout


@dataclass(frozen=True, slots=True)
class ExceedingLayout:
    """A layout that does not fit by a little."""

    engine: EngineConfig
    missing_bytes: float
    largest: str  # kind of memory that takes most
    step_s: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    best: tuple[Candidate, ...]  # fastest first; those without a margin after the others
    exceeding: tuple[ExceedingLayout, ...]
    num_layouts: int  # of trainers and servers that were predicted


@dataclass(frozen=True, slots=True)
class Trainer:
    """A layout of the actor with the bytes of the fullest device and the time of an update."""

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
    check: Callable[[RLConfig], object] | None = None,
) -> SearchResult:
    """Search the layouts of a run on a cluster.

    Args:
        config: Settings with batch sizes, trainer and placement; its layouts are replaced.
        model: config.json of the policy.
        check: Raises ConfigError for settings that cannot be. None checks them without a model.

    Raises:
        ConfigError: No layout fits; the message says what is missing. Or the actor's backend has no
            layouts of Megatron.
    """
    check_at_least("--devices", num_devices, 1)
    if load_backend(config.actor, "actor").shard_format != "megatron":
        raise ConfigError(
            f"actor.backend={config.actor.backend!r}: its layouts are not searched; allowed: "
            "'megatron'"
        )
    work = count_work(model)
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    tokens = samples * (lengths.mean + lengths.prompt) / config.algorithm.num_mini_batches
    load = Load(tokens, lengths.sequence)
    is_shared = are_colocated(config.placement, "actor", "rollout")
    splits = _list_splits(_count_free_devices(config, num_devices), hardware, is_shared)
    run = plan_run(config)
    reference = run.find(REFERENCE)
    if reference and reference.pool != run[ACTOR].pool:
        # The reference has the actor's layout on as many devices; servers that share the actor's
        # have no others.
        splits = [(n // 2, n // 2 if is_shared else serving) for n, serving in splits if n > 1]
    check = check or _check_settings
    exceeding: list[Trainer] = []
    candidates: list[Candidate] = []
    count = 0
    for num_training, num_serving in splits:
        trainers, too_large, num_trainers = search_trainers(
            config, model, work, hardware, num_training, load
        )
        exceeding += too_large
        count += num_trainers
        servers = list(_list_servers(config, model, work, hardware, num_serving, lengths))
        count += len(servers)
        servers.sort(key=lambda pair: pair[1])
        for trainer, (rollout, _, serving_bytes) in itertools.product(trainers, servers[:4]):
            planned, overrides = _replace_layouts(config, trainer.engine, rollout)
            step = predict_step(planned, model, hardware, lengths, work=work)
            has_margin = trainer.num_bytes <= _count_room(hardware)
            candidates.append(
                Candidate(planned, overrides, trainer.num_bytes, serving_bytes, step, has_margin)
            )
    candidates.sort(key=_rank)
    if not candidates:
        raise ConfigError(_explain_nothing(config, work, hardware, num_devices, exceeding))
    checked = _check_candidates(candidates, model, hardware, exceeding, check)
    if not checked:
        raise ConfigError(_explain_nothing(config, work, hardware, num_devices, exceeding))
    best = [replace(c, reason=_explain(c, checked[0])) for c in checked]
    return SearchResult(tuple(best), _list_exceeding(exceeding, hardware), count)


def _check_settings(config: RLConfig) -> None:
    validate_rl(config, needs_data=False)


def _count_free_devices(config: RLConfig, num_devices: int) -> int:
    """Return the devices without those of roles on other pools, whose layouts are not searched."""
    searched = {ACTOR, ROLLOUT, REFERENCE}
    other = [pool for pool in plan_run(config).pools if not searched & {*pool.roles}]
    num_other = sum(pool.num_devices for pool in other)
    if num_other >= num_devices:
        names = ", ".join(pool.name for pool in other)
        raise ConfigError(
            f"--devices={num_devices}: {names} take {num_other} of them; allowed: more than "
            f"{num_other}"
        )
    return num_devices - num_other


def _check_candidates(
    candidates: Sequence[Candidate],
    model: HFConfig,
    hardware: Hardware,
    exceeding: list[Trainer],
    check: Callable[[RLConfig], object],
) -> list[Candidate]:
    """Return the fastest that can be and fit by their memory plans, those with a margin first.

    Add trainers that are too large to `exceeding`.
    """
    conditions = Conditions(
        hardware.device,
        gpus_per_node=hardware.devices_per_node,
        memory_bytes=hardware.memory_bytes,
    )
    fitting: list[Candidate] = []
    too_large: list[EngineConfig] = []
    num_checked, refusal = 0, None
    for candidate in candidates:
        if candidate.engine in too_large:
            continue
        if num_checked == _MOST_CHECKED:
            break
        try:
            check(candidate.config)
        except ConfigError as error:
            refusal = refusal or error
            continue
        num_checked += 1
        moments = plan_memory(candidate.config, model, conditions).moments
        training = max((m for m in moments if m.role != "rollout"), key=lambda m: m.total)
        serving = max(moment.total for moment in moments if moment.role == "rollout")
        if training.total > hardware.memory_bytes:
            too_large.append(candidate.engine)
            kinds: dict[str, float] = dict(training.kinds)
            exceeding.append(Trainer(candidate.engine, kinds, candidate.step.update_s))
        elif serving <= hardware.memory_bytes:
            has_margin = max(training.total, serving) <= _count_room(hardware)
            planned = replace(candidate, training_bytes=training.total, serving_bytes=serving)
            fitting.append(replace(planned, has_margin=has_margin))
        if sum(c.has_margin for c in fitting) == NUM_BEST:
            break
    if refusal is not None and not num_checked:
        raise refusal  # of every layout: it is of another setting
    return sorted(fitting, key=_rank)[:NUM_BEST]


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.has_margin, candidate.step.step_s


def _count_room(hardware: Hardware) -> float:
    """Return the bytes of a device without the margin for what a plan does not know."""
    return GPU_SHARE * hardware.memory_bytes


def search_trainers(
    config: RLConfig,
    model: HFConfig,
    work: ModelWork,
    hardware: Hardware,
    num_devices: int,
    load: Load,
) -> tuple[list[Trainer], list[Trainer], int]:
    """Search the layouts of the actor on all devices.

    Chunks of pipeline stages and sizes of micro-batches are varied for the fastest.

    Returns:
        The fastest that fit and some small ones, those that nearly fit, and how many there were.
    """
    longest = config.data.prompt_limit + config.rollout.response_limit
    dtype = get_dtype(config, config.actor)

    def plan(layout: Layout, micro_batch: int) -> list[Trainer]:
        return plan_trainers(config.actor, work, hardware, dtype, layout, load, micro_batch)

    fitting: list[Trainer] = []
    exceeding: list[Trainer] = []
    count = 0
    for layout in _list_layouts(model, work, hardware, num_devices, load, longest):
        trainers = plan(layout, _get_least_micro_batch(layout, longest))
        count += bool(trainers)
        for trainer in trainers:
            (fitting if trainer.num_bytes <= hardware.memory_bytes else exceeding).append(trainer)
    room = _count_room(hardware)
    selected = _select_fastest(fitting, room)
    for index, trainer in enumerate(selected[:NUM_BEST]):
        layout = trainer.engine.layout
        least = _get_least_micro_batch(layout, longest)
        for chunked in _list_chunked_layouts(layout, len(work.layers)):
            for factor in (1, 2, 4):
                varied = [t for t in plan(chunked, factor * least) if t.num_bytes <= room]
                if not varied or trainer.num_bytes > room:
                    break
                selected[index] = min(selected[index], *varied, key=lambda t: t.update_s)
    return selected, exceeding, count


def _get_least_micro_batch(layout: Layout, longest: int) -> int:
    """Return the tokens of a context-parallel rank: one of the longest sequences, and 4096."""
    return max(-(-longest // layout.cp), 4096)


def _select_fastest(trainers: list[Trainer], room: float) -> list[Trainer]:
    """Return the fastest trainers, and the smallest of the others; one for each layout.

    Layouts that differ in vpp alone count as one. Those of more than `room` bytes come last.
    """
    fastest: dict[tuple[int, ...], Trainer] = {}
    for trainer in sorted(trainers, key=lambda t: (t.num_bytes > room, t.update_s)):
        layout, is_tight = trainer.engine.layout, trainer.num_bytes > room
        key = (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, is_tight)
        fastest.setdefault(key, trainer)
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


def _list_layouts(
    model: HFConfig,
    work: ModelWork,
    hardware: Hardware,
    num_devices: int,
    load: Load,
    longest: int,
) -> Iterator[Layout]:
    """Yield layouts that can be, of pipelines with one chunk a stage, two, and the most."""
    sizes = get_model_sizes(model)
    num_layers = len(work.layers)
    axes = itertools.product(
        _list_powers(min(num_devices, hardware.devices_per_node)),
        _list_powers(min(num_devices, num_layers, 64)),
        _list_powers(max(1, min(num_devices, longest // 4096))),
        _list_powers(max(1, sizes.num_experts)),
        _list_powers(hardware.devices_per_node if sizes.num_experts else 1),
    )
    for tp, pp, cp, ep, etp in axes:
        dp, rest = divmod(num_devices, tp * pp * cp)
        if rest or not dp or load.tokens < dp * load.sequence:
            continue
        chunked = list(_list_chunked_layouts(Layout(tp, pp, cp, dp, ep, etp), num_layers))
        try:
            for layout in chunked[:1]:
                validate_layout("actor.layout", layout)
                validate_model_layout("actor.layout", layout, sizes)
        except ConfigError:
            continue
        yield from [*chunked[:2], *chunked[2:][-1:]]


def _list_chunked_layouts(layout: Layout, num_layers: int) -> Iterator[Layout]:
    """Yield a layout with each number of chunks a stage that suits the layers, the fewest first.

    The first and the last chunk have fewer layers where they cannot be equal.
    """
    most = max(1, num_layers // layout.pp) if layout.pp > 1 else 1
    for vpp in sorted({1, 2, 3, 4, most, *(-(-num_layers // (layout.pp * n)) for n in (1, 2, 3))}):
        chunks = layout.pp * vpp
        if not 1 <= vpp <= most:
            continue
        if num_layers % chunks == 0:
            yield replace(layout, vpp=vpp, first_stage_layers=None, last_stage_layers=None)
            continue
        inner = math.ceil(num_layers / chunks)
        ends = num_layers - inner * (chunks - 2)
        if chunks > 2 and ends >= 2:
            first, last = ends - ends // 2, ends // 2
            yield replace(layout, vpp=vpp, first_stage_layers=first, last_stage_layers=last)


def plan_trainers(
    actor: EngineConfig,
    work: ModelWork,
    hardware: Hardware,
    dtype: str,
    layout: Layout,
    load: Load,
    micro_batch: int,
) -> list[Trainer]:
    """Return a layout with the fastest recompute that fits, and with the fastest with a margin.

    Adam is on the host where nothing else fits.

    Args:
        dtype: Of products, see `get_dtype`.
        micro_batch: Tokens of one on a context-parallel rank.

    Returns:
        One if both are the same; the smallest if none fits; none if all exceed a device by far.
    """
    trainers: list[Trainer] = []
    for engine in _list_engines(actor, work, layout, micro_batch):
        planner = TrainingModel(work, engine, hardware, dtype)
        kinds = estimate_training_bytes(planner)
        num_bytes = sum(kinds.values())
        if num_bytes > _MOST_EXCESS * hardware.memory_bytes:
            continue
        try:
            validate_megatron("actor", engine)
        except ConfigError:  # such as full recompute with moe.overlap
            continue
        trainer = Trainer(engine, kinds, planner.predict_update(load).total_s)
        if not trainers or trainers[0].num_bytes > hardware.memory_bytes:
            trainers = [trainer]
        elif num_bytes <= _count_room(hardware):
            trainers.append(trainer)
        if num_bytes <= _count_room(hardware):
            break
    return trainers


def _list_engines(
    actor: EngineConfig, work: ModelWork, layout: Layout, micro_batch: int
) -> Iterator[EngineConfig]:
    """Yield settings of a trainer with a layout, those that take less memory later."""
    modules = _list_cheap_modules(work)
    for offloads in (True,) if actor.optimizer.cpu_offload else (False, True):
        optimizer = replace(actor.optimizer, distributed=True, cpu_offload=offloads)
        for granularity in ("none", "selective", "full"):
            recompute = replace(actor.recompute, granularity=granularity)
            if granularity == "selective":
                recompute.modules = modules
            yield replace(
                actor,
                layout=layout,
                recompute=recompute,
                optimizer=optimizer,
                max_tokens_per_micro_batch=micro_batch,
            )


def _list_cheap_modules(work: ModelWork) -> list[str]:
    """Return the modules whose activations cost little time to recompute."""
    modules = ["layernorm", "moe_act"] if any(layer.is_moe for layer in work.layers) else []
    parts = {matrix.part for layer in work.layers for matrix in layer.matrices}
    if "mla_up_proj" in parts:
        modules.append("mla_up_proj")
    return modules or ["layernorm", "mlp"]


def _count_recomputed_elements(layer: LayerWork, recompute: RecomputeConfig, hidden: int) -> float:
    """Return the elements per token that selective recompute does not store."""
    if recompute.granularity != "selective":
        return 0.0
    elements = {
        "layernorm": 2 * hidden,
        "mla_up_proj": 2 * layer.heads_elements,
        "moe_act": layer.act_elements / 3 * layer.is_moe,  # products of gate and up
        "mlp": layer.act_elements * (not layer.is_moe),
    }
    return sum(elements.get(module, 0.0) for module in recompute.modules)


def estimate_training_bytes(planner: TrainingModel) -> dict[str, float]:
    """Estimate the bytes of the fullest device while it trains, by kind.

    Weights, float32 gradients, the optimizer's state. Activations: per token and layer
    the inputs and outputs of products and norms, over tp; a pipeline rank stores those of pp
    micro-batches, of an interleaved schedule up to (1 + 1 / vpp) times as many (arXiv:2104.04473,
    section 2.2), with full recompute the inputs of layers and one layer.
    """
    engine, work, layout = planner.engine, planner.work, planner.layout
    state = planner.count_optimizer_parameters() * planner.optimizer_itemsize
    tokens, hidden = engine.max_tokens_per_micro_batch, work.hidden_size
    modules = "te" if planner.hardware.device == "cuda" else "torch"
    logits = engine.logprob_chunk_bytes or DEFAULT_CHUNK_BYTES[modules]
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
    stored: float = hidden
    if engine.recompute.granularity != "full":
        recomputed = sum(
            _count_recomputed_elements(layer, engine.recompute, hidden) for layer in work.layers
        )
        stored = (sum(layer_elements) - recomputed) / len(work.layers)
    elements = num_layers * in_flight * stored + 2 * largest
    return {
        "weights": sum(planner.count_local_parameters()) * planner.itemsize,
        "gradients": sum(planner.count_trained_parameters()) * FLOAT32,
        "optimizer": 0.0 if engine.optimizer.cpu_offload else state,
        "activations": elements * tokens / layout.tp * planner.itemsize + 2 * logits,
        "reserved": planner.hardware.reserved_bytes,
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
                rollout = replace(
                    config.rollout,
                    num_servers=num_devices // workers,
                    nodes_per_server=max(1, workers // node),
                    tp=tp,
                    dp=dp,
                    ep=ep,
                    kv_cache_bytes=None,
                )
                server = ServerModel(work, model, rollout, hardware, config.model.dtype)
                [servers, *_] = plan_run(replace(config, rollout=rollout)).servers
                need = servers.count_cache_need(model, hardware.device)
                cache = need.choose_bytes(int(server.count_cache_room()))
                if cache > server.count_cache_room():  # there is no room for one sequence
                    continue
                share = max(1, round(samples / rollout.num_servers))
                seconds = server.predict(
                    lengths.draw(share).tolist(), lengths.prompt, config.algorithm.group_size
                ).total_s
                taken = server.count_weight_bytes() + hardware.reserved_bytes
                yield rollout, seconds, taken + cache


def _replace_layouts(
    config: RLConfig, engine: EngineConfig, rollout: RolloutConfig
) -> tuple[RLConfig, tuple[str, ...]]:
    """Return settings with layouts of actor and servers, and the overrides that give them.

    Other engines on the actor's devices follow it where their models can.
    """
    planned = copy.copy(config)
    planned.actor, planned.rollout = engine, rollout
    trained = {"actor": engine}
    frozen = {}
    run = plan_run(config)
    colocated = [role for role in run if role.pool == run[ACTOR].pool]
    if CRITIC in (role.name for role in colocated):
        planned.critic = _follow(config.critic, engine)
        trained["critic"] = planned.critic
    for role in filter(Role.is_scoring, colocated):
        key = role.name.partition(".")[0]
        if key not in frozen:
            settings = _follow_frozen(config, run, key, engine.layout)
            setattr(planned, key, settings)
            frozen[key] = settings
    values: dict[str, object] = {}
    for key, settings in (trained | frozen).items():
        for axis in fields(Layout):
            values[f"{key}.layout.{axis.name}"] = getattr(settings.layout, axis.name)
        values[f"{key}.max_tokens_per_micro_batch"] = settings.max_tokens_per_micro_batch
    for key, settings in trained.items():
        recompute, optimizer = settings.recompute, settings.optimizer
        values[f"{key}.recompute.granularity"] = recompute.granularity
        if recompute.granularity == "selective":
            values[f"{key}.recompute.modules"] = recompute.modules
        values[f"{key}.optimizer.distributed"] = optimizer.distributed
        values[f"{key}.optimizer.cpu_offload"] = optimizer.cpu_offload
    for name in ("num_servers", "tp", "dp", "nodes_per_server", "ep", "kv_cache_bytes"):
        values[f"rollout.{name}"] = getattr(rollout, name)
    return planned, tuple(f"{key}={format_value(value)}" for key, value in values.items())


def _follow(settings: CriticConfig, engine: EngineConfig) -> CriticConfig:
    """Return the settings of a critic with the layout and the memory settings of the actor."""
    optimizer = replace(
        settings.optimizer,
        distributed=engine.optimizer.distributed,
        cpu_offload=engine.optimizer.cpu_offload,
    )
    return replace(
        settings,
        layout=engine.layout,
        recompute=engine.recompute,
        optimizer=optimizer,
        max_tokens_per_micro_batch=engine.max_tokens_per_micro_batch,
    )


def _follow_frozen(config: RLConfig, run: RunPlan, key: str, layout: Layout) -> EngineConfig:
    """Return the settings of a reward model or of the teachers on the devices of the actor.

    They have the layout of the actor without chunks, or where a model does not divide so, tp and
    data-parallel ranks alone, or their own.
    """
    settings: EngineConfig = getattr(config, key)
    paths = [role.path for role in run if role.name.partition(".")[0] == key]
    sizes = [get_model_sizes(read_config(path)) for path in paths]
    plain = Layout(tp=layout.tp, dp=layout.world_size // layout.tp)
    for candidate in (replace(layout, vpp=1), plain):
        try:
            for model_sizes in sizes:
                validate_model_layout(f"{key}.layout", candidate, model_sizes)
        except ConfigError:
            continue
        return replace(settings, layout=candidate)
    return settings


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
    exceeding: Sequence[Trainer], hardware: Hardware
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
    config: RLConfig,
    work: ModelWork,
    hardware: Hardware,
    num_devices: int,
    exceeding: Sequence[Trainer],
) -> str:
    model = TrainingModel(
        work, replace(config.actor, layout=Layout()), hardware, get_dtype(config, config.actor)
    )
    state = sum(model.count_local_parameters()) * model.itemsize
    state += sum(model.count_trained_parameters()) * (FLOAT32 + model.optimizer_itemsize)
    if not exceeding and state < num_devices * hardware.memory_bytes / 100:
        return (
            f"--devices={num_devices}: no layout divides the model, with at least one sequence of "
            "a step on each data-parallel rank; allowed: fewer devices, or more "
            "trainer.prompts_per_step"
        )
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
    return f"{text}; allowed: more devices, or adapters"
