"""Memory of a run: every rank by kind and by moment of a step, and hosts.

Pure functions of settings and config.json. Gradients are float32 (Megatron-core, DDP with
grad_reduce_in_fp32); the optimizer's bytes are those of `get_optimizer_itemsize`, with Adam on the
host those of HybridDeviceOptimizer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_rl.config.checks import check_at_least
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import are_colocated
from mcore_rl.config.schema import EngineConfig, Layout, RLConfig, RolloutConfig, TrainConfig
from mcore_rl.controller.object_store import estimate_sample_bytes
from mcore_rl.engine.base import load_backend
from mcore_rl.inference.kv_cache import GPU_SHARE, count_token_bytes
from mcore_rl.jobs.run_plan import WARM_START, RunPlan, Servers, plan_run
from mcore_rl.models.base import (
    HFConfig,
    get_family,
    get_model_sizes,
    pad_vocab_size,
    read_config,
)
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.planner.activations import PackSize, PassMemory, compute_pass_memory, is_sparse
from mcore_rl.planner.fsdp import compute_fsdp_pass, counts_fsdp_passes
from mcore_rl.planner.hardware import load_hardware
from mcore_rl.planner.roles import (
    ITEMSIZES,
    RolePlan,
    StagePlan,
    count_cache_bytes,
    get_optimizer_itemsize,
    plan_roles,
    read_role_config,
)
from mcore_rl.planner.servers import count_graph_bytes, count_workspace_bytes
from mcore_rl.trainers.device_sharing import ROLLOUT

# Bytes of a process on a GPU beside torch's tensors. Sources: NCCL issue 964 (A100) and issue 1685
# (H100); the context and the share of fragments are assumptions.
CONTEXT_BYTES = 600_000_000
NCCL_PAIR_BYTES, NCCL_GROUP_BYTES = 544 << 20, 688 << 20  # of 2 ranks, of more
NCCL_EXCHANGE_BYTES = 3_280_000_000  # all-to-all among the 8 GPUs of a node
_NODE = 8
FRAGMENT_SHARE = 0.05  # of tensors that come and go
_MOVING = ("activations", "MoE dispatch", "logits", "gathered weights", "workspace")
_SCORES = {"critic": "values", "reward_model": "scores"}  # what passes without updates compute
_KEY_BYTES = 4  # of a key that an indexer picks
_HYBRID_BYTES = 16  # of a parameter whose Adam is on the host: gradient, weight, two moments


@dataclass(frozen=True, slots=True)
class Conditions:
    """The assumptions of a plan: load, sequences of servers, devices."""

    device_type: str = "cuda"
    imbalance: float = 1.5  # tokens of the fullest rank's experts in a layer, over the mean
    concurrency: int = 0  # sequences of a server at once; 0: those of a step, or max_num_seqs
    length: int = 0  # their tokens; 0: the longest
    gpus_per_node: int = 8
    memory_bytes: int = 0  # of a GPU, which bounds caches of a default size; 0: not known

    def __post_init__(self) -> None:
        if not 1.0 <= self.imbalance < math.inf:
            raise ConfigError(f"--imbalance={self.imbalance}; allowed: a number from 1")
        check_at_least("--concurrency", self.concurrency, 0)
        check_at_least("--length", self.length, 0)
        check_at_least("--gpus-per-node", self.gpus_per_node, 1)


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory of equal ranks of a role at a moment of a step."""

    name: str
    role: str
    ranks: tuple[int, ...]
    kinds: Mapping[str, int]  # bytes of a rank

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class CachePlan:
    """KV cache of one of the policy's servers, and the most that it has to hold."""

    num_bytes: int  # of each worker; 0: not known, as of a server at a URL
    num_tokens: int  # that all of its data-parallel ranks have room for
    num_sequences: int
    sequence_tokens: int
    is_set: bool  # by the user

    @property
    def num_needed(self) -> int:
        """Return the tokens of all sequences."""
        return self.num_sequences * self.sequence_tokens

    @property
    def mean_tokens(self) -> int:
        """Return the tokens that each sequence has room for where all run at once."""
        return self.num_tokens // self.num_sequences


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of all ranks."""

    roles: tuple[RolePlan, ...]
    moments: tuple[Moment, ...]  # in their order; ranks of a role that are equal are together
    host: Mapping[str, int]  # bytes on the fullest node, by kind
    cache: CachePlan | None  # None: of a job without servers
    uncounted: tuple[str, ...] = ()  # roles whose activations are not counted

    @property
    def worst(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A device that ranks have to fit."""

    name: str
    memory_bytes: int
    device_type: str = "cuda"  # of its ranks: "cuda" or "cpu"

    @classmethod
    def parse(cls, text: str, setting: str = "--hardware") -> MemoryLimit:
        """Parse a name of hardware, the path of its file, or gigabytes (of 1e9 bytes) of a GPU.

        Raises:
            ConfigError: The name is unknown, or the number is not above 0.
        """
        try:
            size = float(text)
        except ValueError:
            try:
                hardware = load_hardware(text, setting)
            except ConfigError as error:
                is_file = text.endswith((".yaml", ".yml"))
                raise ConfigError(f"{error}" + ", or gigabytes" * (not is_file)) from error
            return cls(hardware.name, hardware.memory_bytes, hardware.device)
        if not 0 < size < math.inf:
            raise ConfigError(f"{setting}={text!r}; allowed: a name, a file, or gigabytes above 0")
        return cls("GPU", int(size * 1e9))


def plan_memory(config: RLConfig, model: HFConfig, conditions: Conditions) -> MemoryPlan:
    """Plan the memory of a resolved run.

    Args:
        model: config.json of the policy. Quantised weights are planned as what they become,
            model.dtype.
    """
    run = plan_run(config)
    roles = plan_roles(run, model, conditions.device_type)
    planner = _Planner(config, run, model, conditions, roles)
    return MemoryPlan(
        tuple(planner.roles.values()),
        tuple(planner.list_moments()),
        planner.compute_host_bytes(),
        plan_cache(run.servers[0], planner.roles[ROLLOUT], model, conditions),
        planner.list_uncounted_roles(),
    )


def plan_cache(
    servers: Servers, role: RolePlan, model: HFConfig, conditions: Conditions
) -> CachePlan:
    """Plan the KV cache of a server.

    Args:
        role: Its plan.
        model: Its config.json.
    """
    need, dp = servers.count_cache_need(model, conditions.device_type), servers.settings.dp
    size = role.stages[0].cache_bytes
    token_bytes = count_token_bytes(model, servers.settings, servers.model.dtype)
    concurrency = need.num_sequences * dp
    if servers.num_sequences is not None:
        concurrency = min(concurrency, servers.num_sequences)
    return CachePlan(
        size,
        size // token_bytes * dp if token_bytes else 0,
        conditions.concurrency or concurrency,
        conditions.length or need.sequence_tokens,
        servers.settings.kv_cache_bytes is not None,
    )


class _Planner:
    def __init__(
        self,
        config: RLConfig,
        run: RunPlan,
        model: HFConfig,
        conditions: Conditions,
        roles: Sequence[RolePlan],
    ) -> None:
        self.config, self.run, self.model, self.conditions = config, run, model, conditions
        self.roles = {role.name: role for role in roles}
        self.is_gpu = conditions.device_type == "cuda"
        self._overheads = {name: self._compute_overhead(name) for name in self.roles}
        if self.is_gpu and conditions.memory_bytes:
            self.roles |= {servers.name: self._fit_cache(servers) for servers in run.servers}

    def list_moments(self) -> Iterator[Moment]:
        for role in self.roles.values():
            if role.has_servers:
                yield self._plan_generation(role)
                continue
            yield from self._plan_passes(role, is_trained=self.run[role.name].is_trained)
        yield from self._plan_weight_sync()

    # Training engines

    def _plan_passes(self, role: RolePlan, *, is_trained: bool) -> Iterator[Moment]:
        passes = [False, True] if is_trained and role.name != WARM_START else [is_trained]
        for trains in passes:
            scored = _SCORES.get(role.name, "log-probs")
            name = f"{role.name}: {'update' if trains else scored}"
            moments: dict[tuple[tuple[str, int], ...], list[int]] = {}
            for pp_rank, stage in enumerate(role.stages):
                sizes = self._compute_stage(role.name, stage, pp_rank, trains=trains)
                moments.setdefault(tuple(sizes.items()), []).extend(stage.ranks)
            for kinds, ranks in moments.items():
                yield Moment(name, role.name, tuple(ranks), dict(kinds))

    def _compute_stage(
        self, name: str, stage: StagePlan, pp_rank: int, *, trains: bool
    ) -> dict[str, int]:
        engine = self.run[name].spec.engine
        kinds = count_state_bytes(engine, stage)
        if not trains:
            kinds = {"weights": kinds["weights"]}
        kinds |= self._count_pass(name, engine, pp_rank, trains=trains)
        if self._counts_activations(name) and (
            keys := self._count_key_bytes(name, engine, trains=trains)
        ):
            kinds["indexer keys"] = keys
        return self._add_overhead(name, kinds)

    def _count_pass(
        self, name: str, engine: EngineConfig, pp_rank: int, *, trains: bool
    ) -> dict[str, int]:
        config = self.config
        samples = config.trainer.prompts_per_step * config.algorithm.group_size
        return count_pass_bytes(
            engine,
            self._get_model(name),
            Rows(
                samples // config.algorithm.num_mini_batches,
                config.max_sequence_tokens,
                config.rollout.response_limit,
            ),
            self.conditions,
            config.model.dtype,
            pp_rank,
            has_value_head=self.run[name].model_type != "language_model",
            trains=trains,
        )

    def _count_key_bytes(self, name: str, engine: EngineConfig, *, trains: bool) -> int:
        """Count the keys of sparse attention's indexers on a rank, with indexer_replay=record.

        32-bit positions of each token in all layers, of other stages too: those of a step's samples
        and their copy while log-probs are computed, those of a mini-batch and of its packs in an
        update (engine/megatron/indexer_replay.py).
        """
        if engine.indexer_replay == "off":
            return 0
        fields = get_family(self.model).config_map(self.model)
        layout, algorithm = engine.layout, self.config.algorithm
        longest = self.config.max_sequence_tokens
        samples = self.config.trainer.prompts_per_step * algorithm.group_size
        if trains:
            samples //= algorithm.num_mini_batches
        tokens = -(-samples // layout.dp) * longest
        packed = max(engine.max_tokens_per_micro_batch, longest) * layout.pp
        stored = tokens + min(packed, tokens) if trains else 2 * tokens
        return stored * int(fields["num_layers"] * fields["dsa_indexer_topk"]) * _KEY_BYTES

    def list_uncounted_roles(self) -> tuple[str, ...]:
        """Return the roles whose engine's activations are not counted."""
        engines = (name for name, role in self.roles.items() if not role.has_servers)
        return tuple(name for name in engines if not self._counts_activations(name))

    def _counts_activations(self, name: str) -> bool:
        return counts_activations(self.run[name].spec.engine, self._get_model(name))

    def _get_model(self, name: str) -> HFConfig:
        return read_role_config(self.run, self.run[name], self.model)

    # Servers

    def _fit_cache(self, servers: Servers) -> RolePlan:
        """Return the plan of servers with a KV cache that fits, where its size is the default."""
        role = self.roles[servers.name]
        [stage] = role.stages
        other = self._plan_generation(role).total - stage.cache_bytes
        room = int(GPU_SHARE * self.conditions.memory_bytes) - other
        model = self._get_servers(servers.name)[1]
        size = count_cache_bytes(servers, model, self.conditions.device_type, room)
        return replace(role, stages=(replace(stage, cache_bytes=size),))

    def _plan_generation(self, role: RolePlan) -> Moment:
        [stage] = role.stages
        kinds = {"weights": stage.weight_bytes, "KV cache": stage.cache_bytes}
        if self.is_gpu:
            settings, model = self._get_servers(role.name)
            kinds["CUDA graphs"] = count_graph_bytes(settings, model)
            kinds["workspace"] = count_workspace_bytes(
                settings, model, ITEMSIZES[self.config.model.dtype], self.conditions.imbalance
            )
        return Moment(
            f"{role.name}: generate", role.name, stage.ranks, self._add_overhead(role.name, kinds)
        )

    def _get_servers(self, name: str) -> tuple[RolloutConfig, HFConfig]:
        servers = self.run.find_servers(name)
        assert servers is not None
        is_policy = servers.model.path == self.config.model.path
        return servers.settings, self.model if is_policy else read_config(servers.model.path)

    # Weight updates

    def _plan_weight_sync(self) -> Iterator[Moment]:
        """Plan the weight update: both copies on shared devices, and two buckets a rank."""
        config, buckets = self.config, 2 * self.config.weight_sync.bucket_bytes
        actor, rollout = self.roles["actor"], self.roles["rollout"]
        largest = max(actor.stages, key=lambda stage: stage.weight_bytes)
        served = rollout.stages[0].weight_bytes
        if are_colocated(config.placement, "actor", "rollout"):
            sent = count_state_bytes(config.actor, largest)["weights"]
            kinds = {"weights": sent + served, "buffers": buckets}
            if self.is_gpu:
                kinds["CUDA graphs"] = count_graph_bytes(config.rollout, self.model)
            yield Moment("weight sync", "actor", largest.ranks, self._add_overhead("actor", kinds))
            return
        full = max(
            actor.stages, key=lambda s: s.weight_bytes + s.gradient_bytes + s.optimizer_bytes
        )
        kinds = count_state_bytes(config.actor, full) | {"buffers": buckets}
        yield Moment(
            "weight sync, trainer", "actor", full.ranks, self._add_overhead("actor", kinds)
        )
        stage = rollout.stages[0]
        kinds = {"weights": served, "KV cache": stage.cache_bytes, "buffers": buckets}
        if self.is_gpu:
            kinds["CUDA graphs"] = count_graph_bytes(config.rollout, self.model)
        yield Moment(
            "weight sync, servers", "rollout", stage.ranks, self._add_overhead("rollout", kinds)
        )

    # Beside tensors

    def _compute_overhead(self, name: str) -> tuple[int, int]:
        """Return the bytes of the CUDA context and of NCCL of a role's process."""
        if not self.is_gpu:
            return 0, 0
        if self.roles[name].has_servers:
            settings, model = self._get_servers(name)
            exchanges = settings.ep and bool(get_model_sizes(model).num_experts)
            sizes = [settings.tp, settings.num_workers * exchanges]
            return CONTEXT_BYTES, sum(map(_count_group_bytes, sizes))
        return CONTEXT_BYTES, count_nccl_bytes(self.run[name].layout)

    def _add_overhead(self, name: str, kinds: Mapping[str, int]) -> dict[str, int]:
        """Add what the processes on the device of a role take: all that share its pool."""
        if not self.is_gpu:
            return dict(kinds)
        overheads = [self._overheads[role] for role in self._list_processes(name)]
        return {
            **kinds,
            "CUDA contexts": sum(context for context, _ in overheads),
            "NCCL": sum(nccl for _, nccl in overheads),
            "fragmentation": count_fragmentation(kinds),
        }

    def _list_processes(self, name: str) -> list[str]:
        """Return the roles whose processes are on a device of a role: those of its pool.

        The warm start ends before the others start.
        """
        return [name] if name == WARM_START else list(self.run.get_pool(name).roles)

    # Hosts

    def compute_host_bytes(self) -> dict[str, int]:
        """Return the bytes on the fullest node, which shared roles leave to each other."""
        config, size = self.config, self.conditions.gpus_per_node
        host = Counter[str]()
        for role in self.run:
            if role.name != WARM_START:
                host += count_node_bytes(
                    config,
                    self.roles[role.name],
                    role.spec.engine,
                    size,
                    takes_turns=self.run.takes_turns(role.name),
                )
        host["object store"] = config.object_store_bytes or estimate_sample_bytes(config)
        return dict(host)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of an optimizer step, as many on each data-parallel rank."""

    number: int
    longest: int  # tokens of a row
    scored: int  # of them, at most


def counts_activations(engine: EngineConfig, model: HFConfig) -> bool:
    """Return whether count_pass_bytes counts an engine and model."""
    is_megatron = load_backend(engine).shard_format == "megatron"
    return is_megatron or counts_fsdp_passes(engine, model)


def count_pass_bytes(
    engine: EngineConfig,
    model: HFConfig,
    rows: Rows,
    conditions: Conditions,
    dtype: str,
    pp_rank: int,
    *,
    has_value_head: bool,
    trains: bool,
) -> dict[str, int]:
    """Return the bytes of a pass on a pipeline rank, by kind; {} if they are not counted.

    Args:
        dtype: Of weights and products.
    """
    if not counts_activations(engine, model):
        return {}
    layout, family, longest = engine.layout, get_family(model), rows.longest
    tokens = max(engine.max_tokens_per_micro_batch, -(-longest // layout.cp))
    scored = min(tokens, int(tokens * rows.scored / longest) + 1)
    packs = max(1, rows.number * longest // (tokens * layout.cp * layout.dp))
    itemsize = ITEMSIZES[dtype]
    if load_backend(engine).shard_format == "rows":
        memory = compute_fsdp_pass(
            engine,
            model,
            PackSize(tokens, scored, 1, longest),
            itemsize=itemsize,
            device_type=conditions.device_type,
            head_rows=1 if has_value_head else model["vocab_size"],
            trains=trains,
        )
        return _name_pass_kinds(memory) | {"gathered weights": memory.gathered}
    fields = family.config_map(model)
    num_mtp = family.num_mtp_layers(model) if engine.mtp_loss_coef and trains else 0
    chunks = split_into_chunks(layout, fields["num_layers"], num_mtp)
    own_chunks = [chunk for chunk in chunks if chunk.pp_rank == pp_rank]
    imbalance = conditions.imbalance
    num_sparse = sum(is_sparse(fields, n) for chunk in own_chunks for n in chunk.layers)
    # Layers route independently: over n of them the excess falls with their root.
    mean_imbalance = 1 + (imbalance - 1) / math.sqrt(max(1, num_sparse))
    is_fused = conditions.device_type == "cuda" and engine.modules != "torch"
    memory = compute_pass_memory(
        engine,
        fields,
        PackSize(tokens, scored, packs, longest, imbalance, mean_imbalance),
        own_chunks,
        itemsize=itemsize,
        modules="te" if is_fused else "torch",
        head_rows=1 if has_value_head else pad_vocab_size(model, layout.tp) // layout.tp,
        trains=trains,
    )
    return _name_pass_kinds(memory)


def _name_pass_kinds(memory: PassMemory) -> dict[str, int]:
    return {
        "activations": memory.activations,
        "MoE dispatch": memory.dispatch,
        "logits": memory.logits,
    }


def has_state_on_host(engine: EngineConfig) -> bool:
    """Return whether FSDP2 has weights, gradients and optimizer in host memory."""
    return load_backend(engine).shard_format == "rows" and engine.fsdp.cpu_offload


def count_state_bytes(engine: EngineConfig, stage: StagePlan) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer on a device, by kind."""
    sizes = {"weights": stage.weight_bytes, "gradients": stage.gradient_bytes}
    if not engine.optimizer.cpu_offload:
        sizes["optimizer"] = stage.optimizer_bytes
    return dict.fromkeys(sizes, 0) if has_state_on_host(engine) else sizes


def count_fragmentation(kinds: Mapping[str, int]) -> int:
    """Return the bytes that tensors which come and go leave unused."""
    return int(FRAGMENT_SHARE * sum(kinds.get(kind, 0) for kind in _MOVING))


def count_node_bytes(
    config: RLConfig | TrainConfig,
    role: RolePlan,
    engine: EngineConfig,
    size: int,
    *,
    takes_turns: bool,
) -> Counter[str]:
    """Return the host's bytes on the fullest node of a role, by kind.

    Args:
        size: Ranks of a node.
        takes_turns: The role leaves its devices to other roles, and is on the host meanwhile.
    """
    stages = {rank: stage for stage in role.stages for rank in stage.ranks}
    fullest = Counter[str]()
    for start in range(0, role.num_ranks, size):
        node = Counter[str]()
        for stage in (stages[rank] for rank in range(start, min(start + size, role.num_ranks))):
            is_trained = stage.gradient_bytes > 0
            has_host_adam = engine.optimizer.cpu_offload and is_trained
            if has_host_adam:
                itemsize = get_optimizer_itemsize(engine, ITEMSIZES[config.model.dtype])
                node["optimizer on the host"] += stage.optimizer_bytes // itemsize * _HYBRID_BYTES
            if has_state_on_host(engine):
                node["FSDP2 on the host"] += (
                    stage.weight_bytes + stage.gradient_bytes + stage.optimizer_bytes
                )
            elif takes_turns:
                node["offloaded weights"] += stage.weight_bytes
                node["offloaded optimizer"] += 0 if has_host_adam else stage.optimizer_bytes
            if config.checkpoint.async_save and is_trained:
                node["checkpoint in flight"] += stage.weight_bytes + stage.optimizer_bytes
        fullest = max(fullest, node, key=lambda counts: sum(counts.values()))
    return fullest


def _count_group_bytes(size: int) -> int:
    """Return the bytes of an NCCL communicator of so many ranks."""
    return 0 if size < 2 else NCCL_PAIR_BYTES if size == 2 else NCCL_GROUP_BYTES


def count_nccl_bytes(layout: Layout) -> int:
    """Return the bytes of the NCCL communicators of a training rank that it moves tensors with."""
    sizes = Mesh(layout).sizes
    groups = [layout.tp, layout.pp, layout.cp, layout.dp * layout.cp, sizes["edp"]]
    if layout.ep == 1:
        groups.pop()
    world = layout.world_size
    peers = min(layout.ep * layout.etp, _NODE) - 1
    exchange = NCCL_EXCHANGE_BYTES * peers // (_NODE - 1)
    return sum(map(_count_group_bytes, [*groups, world])) + exchange
